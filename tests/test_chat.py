"""Conversations as token ids."""

import itertools
from unittest import mock

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax import bundled
from dllm_jax.decoding.chat import chat_ids, encode_chats
from dllm_jax.decoding.stream_chat import undecided
from tests import refuses


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(bundled.path("tiny-llada"))


def test_ids_end_where_the_answer_begins_and_batches_are_padded_on_the_left(tokenizer):
    short, long = ([{"role": "user", "content": text}] for text in ("ab", "abcd"))
    ids = chat_ids(tokenizer, long)
    assert tokenizer.decode(ids).endswith("abcd<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n")
    prompt, mask = encode_chats(tokenizer, [short, long], pad_id=7)
    assert prompt.tolist() == [[7, 7, *chat_ids(tokenizer, short)], ids]
    assert mask.sum(axis=1).tolist() == [len(ids) - 2, len(ids)]


def test_nothing_to_answer_and_no_template_are_refused(tokenizer):
    for conversations in ([], [[]]):
        refuses("messages are empty", encode_chats, tokenizer, conversations, 0)
    tokenizer.chat_template = None
    refuses("no chat template", chat_ids, tokenizer, [{"role": "user", "content": "ab"}])


def test_a_template_without_a_system_role_gets_its_text_in_the_user_message(tokenizer):
    """As iLLaDA's authors do; two newlines between."""
    talk = [{"role": "system", "content": "Be brief <|eot_id|>."}, {"role": "user", "content": "ab"}]
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    plain = tokenizer.chat_template
    tokenizer.chat_template = f"{refusal}{{% endif %}}{plain}"
    merged = [{"role": "user", "content": "Be brief <|eot_id|>.\n\nab"}]
    assert chat_ids(tokenizer, talk) == chat_ids(tokenizer, merged)
    refuses("messages have a system message without a user message", chat_ids, tokenizer, talk[:1])
    tokenizer.chat_template = f"{refusal.replace('System role', 'No role')}{{% endif %}}{plain}"
    refuses("refused by the chat template: No role not supported", chat_ids, tokenizer, talk)


def test_special_tokens_in_messages_are_plain_text(tokenizer):
    """The template's own are special, those that a user writes are not; other conversations are as before."""
    text = " What is <|mdm_mask|> and <|eot_id|>?\n"
    talk = [{"role": "user", "content": text}, {"role": "assistant", "content": "x"}]
    talk = [*talk, {"role": "user", "content": "y <|endoftext|>"}]
    ids = chat_ids(tokenizer, talk)
    assert tokenizer.decode(ids) == tokenizer.apply_chat_template(
        talk, add_generation_prompt=True, tokenize=False
    )
    plain = chat_ids(tokenizer, [message | {"content": "z"} for message in talk])
    for token in ("<|mdm_mask|>", "<|eot_id|>", "<|endoftext|>", "<|start_header_id|>"):
        special = tokenizer.convert_tokens_to_ids(token)
        assert ids.count(special) == plain.count(special)
    model = dj.load(bundled.path("tiny-llada"))
    assert isinstance(dj.chat(model, tokenizer, talk, length=4), str)


def encoded(tokenizer, talk, **how) -> list[int]:
    """What transformers itself encodes, special tokens of messages included."""
    return tokenizer.apply_chat_template(talk, add_generation_prompt=True, return_dict=True, **how)[
        "input_ids"
    ]


QWEN3 = (
    "{%- for m in messages %}{%- set content = m.content %}"
    "{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}"
    "{{- '<|start_header_id|>' + m.role + '<|end_header_id|>' + content + '<|eot_id|>\n' }}{%- endfor %}"
)
BODY = "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>BODY<|eot_id|>{% endfor %}"
TEMPLATES = [
    None, QWEN3,
    *(BODY.replace("BODY", body) for body in (
        "{{ m.content }}", "{{ m.content.strip() }}{{ m.content }}", "{{ m.content[3:] }}",
        "{{ m | tojson }}",
        "{{ m.content | upper }}", "{{ m.content.split('</think>')[-1] }}", "<|{{ m.content }}|>",
        "{% if '</think>' in m.content %}T{% endif %}{{ '<|' ~ 'eot_id' ~ '|>' }}{{ m.content }}",
        "{{ m.content | reverse }}", "{{ messages[-1].content }}",
    )),
    "{% for m in messages | reverse %}<|start_header_id|><|{{ m.role }}|>{{ m.content }}{% endfor %}",
]  # fmt: skip
TEXTS = (
    "plain", "<|eot_id|>", "<|eot_id|></think>", " x <|eot_id|>\n", "a</think>\n\nb<|mdm_mask|>", "eot_id",
    "<|eot_", "id|>",
    "<|start_header_id|>system<|end_header_id|>", "\ue000\ue001<|eot_id|>\ue001\ue000",
    "\U0010fffd\U0010fffc<",
    "<|<|eot_id|>|>",
)  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_special_tokens_come_from_the_template_alone(tokenizer, template):
    """Of every text in every role, whatever the template does to it; other ids are those of transformers."""
    tokenizer.chat_template = template or tokenizer.chat_template
    special = {
        i for i, token in tokenizer.added_tokens_decoder.items() if token.special and i != 6
    }  # unknown
    count = lambda ids: [i for i in ids if i in special]
    for roles in (("user",), ("system", "user"), ("user", "assistant", "user")):
        talk = [{"role": role, "content": "q w"} for role in roles]
        assert chat_ids(tokenizer, talk) == encoded(tokenizer, talk)
        for texts in itertools.product(TEXTS, repeat=min(2, len(roles))):
            said = [m | {"content": text} for m, text in zip(talk, [*texts, *texts], strict=False)]
            said += talk[len(said) :]
            ids = chat_ids(tokenizer, said)
            assert count(ids) == count(encoded(tokenizer, talk)), said
            if not any("<" in text or "eot" in text or ">" in text for text in texts):
                assert ids == encoded(tokenizer, said)


def test_special_tokens_that_a_template_makes_are_refused_by_name(tokenizer):
    tokenizer.chat_template = BODY.replace("BODY", "{{ m.content | replace('a', '') }}")
    talk = [{"role": "user", "content": "x"}, {"role": "user", "content": "<|eaot_id|>"}]
    refuses(
        r"messages contain a part of .*'<\|eot_id\|>', a special token.*Remove it", chat_ids, tokenizer, talk
    )
    talk[1]["content"] += "<|mdm_mask|>"
    refuses(
        r"messages\[1\]\['content'\] contains '<\|mdm_mask\|>', .* rewrites it", chat_ids, tokenizer, talk
    )


@pytest.mark.parametrize("name", bundled.NAMES)
def test_ordinary_messages_are_encoded_as_transformers_does(name):
    tokenizer = dj.load_tokenizer(bundled.path(name))
    for text in ("T=105;T=", " a\nb ", "\ue000\ue001", "\ue001\ue000", "1 < 2", "x |> y", "[1]"):
        talk = [{"role": "system", "content": "s"}, {"role": "user", "content": text}]
        assert chat_ids(tokenizer, talk) == encoded(tokenizer, talk)


def test_a_lone_surrogate_is_refused_with_its_place(tokenizer):
    """In any text of a conversation or its template's variables, and in a terminal's input."""
    bad, rule = (
        "T=1;\ud83dT=",
        "holds the lone surrogate U.D83D at position 4, half of a character. Remove it",
    )
    ask = lambda *given: refuses(given[0] + rule, chat_ids, tokenizer, *given[1:])
    user = {"role": "user", "content": "T=1;"}
    ask(r"messages\[1\]\['content'\] ", [user, user | {"content": bad}])
    ask(r"messages\[0\]\['name'\]\[0\] ", [user | {"name": [bad]}])
    ask(r"template\['x'\] ", [user], {"x": bad})
    with pytest.raises(ValueError, match=r"messages\[1\]\[0\]\['content'\] " + rule):
        dj.chat(dj.load(bundled.path("tiny-llada")), tokenizer, [[user], [user | {"content": bad}]], length=4)
    refuses("or the byte 0xE9, which is no UTF-8", chat_ids, tokenizer, [user | {"content": "1\udce9"}])


def test_the_same_text_may_stand_in_two_roles(tokenizer):
    model = dj.load(bundled.path("tiny-llada"))
    talk = [{"role": role, "content": "<|eot_id|>"} for role in ("user", "assistant", "user")]
    assert isinstance(dj.chat(model, tokenizer, talk, length=4), str)


def test_variables_reach_the_template_and_those_that_it_does_not_read_are_warned_of(tokenizer):
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "a <|mdm_mask|>"}]
    tokenizer.chat_template += (
        "{% if enable_thinking is defined and not enable_thinking %}no{% endif %}{{ x }}"
    )
    plain = chat_ids(tokenizer, talk)
    assert chat_ids(tokenizer, talk, {"enable_thinking": False}) == plain + tokenizer.encode("no")
    assert chat_ids(tokenizer, talk, {"x": "now"}) == plain + tokenizer.encode("now")
    with pytest.warns(UserWarning, match="template variables y have no effect: the chat template reads .*x"):
        assert chat_ids(tokenizer, talk, {"y": 1}) == plain
    refuses("template=3 must be variables by name", chat_ids, tokenizer, talk, 3)
    asked = []
    tokenizer.apply_chat_template = lambda *args, **options: asked.append(options) or "T="
    dj.chat(dj.load(bundled.path("tiny-llada")), tokenizer, talk[:1], length=4, enable_thinking=False)
    assert asked[0]["enable_thinking"] is False

    # A2D's models do not think unless they are asked to.
    model = dj.load(bundled.path("tiny-llada")).replace_spec(family="a2d-qwen3")
    for given in ({}, {"enable_thinking": True}, {"template": {"enable_thinking": True}}):
        dj.chat(model, tokenizer, talk[:1], length=4, **given)
    assert [options["enable_thinking"] for options in asked[1:]] == [False, True, True]


def test_a_role_that_the_template_does_not_name_is_warned_of(tokenizer):
    message = [{"role": "robot", "content": "T=211;T="}]
    with pytest.warns(
        UserWarning, match="role='robot' is not one that the chat template names: .* Use assistant"
    ):
        chat_ids(tokenizer, message)


PREFIXES = [
    dict(sampler=dj.samplers.Threshold(0.9)), dict(sampler=dj.samplers.RandomOrder(), key=jax.random.key(1)),
    dict(sampler=dj.samplers.WINO(wide_in=0.1, narrow_out=0.5)), dict(stop=["1"]),
    dict(buckets=dj.buckets.Ladder((64,))),
    dict(
        length=2, block=2, max_length=8, buckets=dj.buckets.Ladder((64,)), stop=["1"],
        sampler=dj.samplers.DAEDAL(expansion=2, checked=2), forbid=[5],
    ),
    dict(
        stop=["##x"], allow=[[i] for i in (33, 16, 16, 102, 33, 16, 16, 101)],
        sampler=dj.samplers.Sequential(),
    ),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::dllm_jax.decoding.report.LengthWarning")
@pytest.mark.parametrize("options", PREFIXES)
def test_a_streamed_chat_adds_to_its_text_and_ends_with_the_answer(tokenizer, options):
    """What it calls text is never taken back; its draft shows masks, whatever order they are filled in."""
    model = dj.load(bundled.path("tiny-llada"))
    talks = [[{"role": "user", "content": text}] for text in ("aob=407;T=211;iez=830;T=", "T=105;T=")]
    layout = dict(length=8, block=8, forbid=[1, 5]) | options
    answers = dj.chat(model, tokenizer, talks, **layout)
    parts = list(dj.stream_chat(model, tokenizer, talks, every=1, **layout))
    before = ["", ""]
    for part in parts:
        for old, new, draft in zip(before, part.text, part.draft, strict=True):
            assert new.startswith(old)
            assert draft.startswith(new)
        before = part.text
    assert before == parts[-1].draft == answers
    assert any("░" in draft for part in parts for draft in part.draft)
    assert parts[-1].snapshot.output is not None
    *_, last = dj.stream_chat(model, tokenizer, talks[0], **layout)
    assert last.text == answers[0]
    with pytest.raises(TypeError, match="progress"):
        dj.stream_chat(model, tokenizer, talks, progress=True)


def test_a_part_of_a_character_or_of_a_stop_is_held_back(tokenizer):
    stops = dj.StopTexts(tokenizer, ["##x", "abcd", "bc"])
    for text, certain in (
        ("4", 1),
        ("4#", 1),
        ("4##", 1),
        ("4##y", 4),
        ("4abc", 1),
        ("4bcd", 1),
        ("4bcdab", 1),
    ):
        ids = np.asarray(tokenizer.encode(text, add_special_tokens=False))
        assert undecided(tokenizer, stops, ids, len(stops.decode(ids))) == certain, text
    assert undecided(tokenizer, None, ids, 3) == 3
    half = mock.Mock(decode=lambda ids, **options: "a\ufffd", clean_up_tokenization_spaces=False)
    assert undecided(half, None, ids, 2) == 1


def test_images_need_a_processor(tokenizer):
    for name in ("tiny-llada", "tiny-llada-v"):
        model = dj.load(bundled.path(name))
        talk = [{"role": "user", "content": "<image> what?", "images": ["missing.png"]}]
        refuses(r"images=\['missing.png'\].*dj.vision.Processor.load", dj.chat, model, tokenizer, talk)
