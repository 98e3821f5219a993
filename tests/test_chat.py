"""Conversations as token ids."""

import pytest
from transformers import AutoTokenizer

import dllm_jax as dj
from dllm_jax import bundled
from dllm_jax.decoding.chat import chat_ids, encode_chats
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


def test_special_tokens_that_cannot_be_told_apart_are_refused_in_the_words_of_a_chat(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'][3:] }}{% endfor %}"
    with pytest.raises(ValueError, match=r"<\|mdm_mask\|>.* holds the text of special tokens.*other words"):
        chat_ids(tokenizer, [{"role": "user", "content": "what is <|mdm_mask|>?"}])


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


def test_images_need_a_processor(tokenizer):
    for name in ("tiny-llada", "tiny-llada-v"):
        model = dj.load(bundled.path(name))
        talk = [{"role": "user", "content": "<image> what?", "images": ["missing.png"]}]
        refuses(r"images=\['missing.png'\].*dj.vision.Processor.load", dj.chat, model, tokenizer, talk)
