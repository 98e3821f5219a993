"""Stop texts: found as texts, whatever tokens spell them, and decoding ends there."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models
from transformers import PreTrainedTokenizerFast

import dllm_jax as dj
from dllm_jax import bundled, policies, samplers
from dllm_jax.decoding.stops import Contents, added_tokens, byte_table, token_contents, token_table
from dllm_jax.decoding.stream_chat import undecided
from dllm_jax.engine.features.stops import BEGIN, FOUND
from tests import refuses
from tests.models import WIDE, tiny
from tests.policy_cases import matrix

S = samplers
WORDS = ["a", "b", "#", "\n", "\n\n", "##", "a#", "#b", "b\n", "é", "€", "a##", "stop", "st", "op"]
ENOUGH = [*WORDS, *(chr(ord("A") + i) for i in range(26))]  # of a vocabulary of 61


def made(vocab: dict[str, int], decoder=None, special: tuple[str, ...] = (), **options):
    """A tokenizer of transformers with these tokens, joined unless a decoder says otherwise."""
    base = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    base.decoder = decoders.Fuse() if decoder is None else decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=base, **options)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    return tokenizer


@functools.cache
def words():
    """Tokens of several letters, by which a text can be written in many ways."""
    return made({word: i for i, word in enumerate(ENOUGH)}, special=("<|x|>",))


def truth(text: str, stops) -> str:
    """The text up to the first stop in it."""
    return text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)]


def decided(text: str, stops) -> bool:
    """Whether nothing that follows changes where the first stop begins."""
    start = len(truth(text, stops))
    return start < len(text) and not any(
        stop.startswith(text[at:]) for stop in stops for at in range(min(start, len(text)))
    )


def test_the_automaton_says_as_soon_as_it_is_certain_where_the_first_stop_begins():
    rng = np.random.default_rng(0)
    letters = lambda size: "".join(rng.choice(list("ab#"), size))
    seen = set()
    for _ in range(300):
        stops = list(dict.fromkeys(letters(rng.integers(1, 6)) for _ in range(rng.integers(1, 4))))
        tokens = ["", *(letters(rng.integers(1, 5)) for _ in range(12))]
        table = token_table(Contents(*[tuple(t.encode() for t in tokens)] * 2), byte_table(stops))
        state, text = BEGIN, ""
        for token in rng.integers(len(tokens), size=30):
            state, text = table[state, token], text + tokens[token]
            certain = any(decided(text[:n], stops) for n in range(1, len(text) + 1))
            assert (state == FOUND) == certain, (stops, text)
        seen.add(state == FOUND)
    assert seen == {True, False}


def forced(answers: list[str], tokenizer, length: int) -> list:
    """Sets of allowed tokens by which every sequence answers this; later positions are free."""
    ids = [tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
    return [[[i] for i in one] + [None] * (length - len(one)) for one in ids]


def response(tokenizer, words_of: list[str]) -> list[list[int]]:
    return [[i] for i in tokenizer.convert_tokens_to_ids(words_of)]


ANSWER = ["A", "b\n", "a#", "#b", "B", "\n\n", "C", "D"]  # "Ab\na##bB\n\nCD"
CASES = [
    (["\n"], 2), (["##"], 4), (["#"], 3), (["B"], 5), (["b\na##"], 4), (["bB\n\nC", "##"], 4), (["\n\n"], 6),
    (["##bB\n\nX", "bB"], 7), (["nowhere"], 8), (["bBX", "#bB"], 5),
]  # fmt: skip


@pytest.mark.parametrize(("stops", "tokens"), CASES)
@pytest.mark.parametrize("block", [4, 8, 1])
def test_decoding_ends_as_soon_as_the_stop_is_decided(stops, tokens, block):
    """In blocks of all sizes: after the token that decides it, or with its block."""
    model, tokenizer = tiny("llada"), words()
    stop = dj.StopTexts(tokenizer, stops)
    options = dict(length=8, block=block, sampler=S.Sequential(), allow=response(tokenizer, ANSWER))
    out = dj.generate(model, [[1, 2, 3]], stop=stop, **options)
    answer = np.asarray(out.tokens)[0, -8:]
    full = np.asarray(dj.generate(model, [[1, 2, 3]], **options).tokens)[0, -8:]
    assert stop.decode(answer) == stop.decode(full) == truth("".join(ANSWER), stops)
    np.testing.assert_array_equal(answer, np.where(np.arange(8) < tokens, full, model.spec.eos_id))
    assert out.stats.nfe[0] == tokens
    assert out.stats.answer_tokens[0] == tokens


REVISING = [S.WINO(wide_in=0.1, narrow_out=0.2), S.Edit(0.1, 0.1)]
EVERY = [S.Confidence(), S.Threshold(0.05), S.FreeDave(S.Confidence(), branches=3), *REVISING]


@matrix(
    "sampler, policy",
    EVERY,
    [policies.Policy(), policies.DualCache()],
    today=[(EVERY[0], policies.DualCache()), *((s, policies.Policy()) for s in EVERY[1:])],
)
def test_tokens_are_those_of_the_whole_generation_up_to_the_stop(sampler, policy):
    """Batches of prompts of several lengths, streams and slots answer alike, whatever fills masks in."""
    model, tokenizer, prompt = tiny("llada"), words(), [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    answers = [
        ANSWER,
        ["A", "B", "stop", "C", "D", "E", "F", "G"],
        ["A", "B", "C", "D", "E", "st", "op", "F"],
    ]
    stop = dj.StopTexts(tokenizer, ["##", "stop"])
    allow = [response(tokenizer, each) for each in answers]
    options = dict(length=8, block=4, sampler=sampler, policy=policy, widths=WIDE)
    ask = lambda **more: dj.generate(model, prompt, allow=allow, **options | more)
    out, full = ask(stop=stop), ask()
    texts = [stop.decode(row[-8:]) for row in np.asarray(out.tokens)]
    assert texts == [truth("".join(each), stop.texts) for each in answers] == ["Ab\na", "AB", "ABCDE"]
    ends = np.array([4, 3, 7])[:, None]
    kept = np.where(np.arange(8) < ends, np.asarray(full.tokens)[:, -8:], model.spec.eos_id)
    np.testing.assert_array_equal(np.asarray(out.tokens)[:, -8:], kept)
    assert (np.asarray(out.stats.nfe) <= full.stats.nfe).all()
    assert out.stats.nfe[1] < full.stats.nfe[1], "the second block is not computed"
    np.testing.assert_array_equal(ask(stop=stop, buckets=dj.buckets.Ladder((8,))).tokens, out.tokens)
    *_, last = dj.stream(model, prompt, allow=allow, stop=stop, every=1, **options)
    np.testing.assert_array_equal(last.tokens, out.tokens)
    asked = [dict(prompt=one, allow=sets) for one, sets in zip(prompt, allow, strict=True)]
    asked.append(asked[0] | dict(stop=dj.StopTexts(tokenizer, ["D"])))
    found = dict(dj.generate_many(model, asked, slots=2, stop=stop, **options))
    for i in range(3):
        np.testing.assert_array_equal(found[i].tokens[0, -8:], np.asarray(out.tokens)[i, -8:])
    assert dj.StopTexts(tokenizer, ["D"]).decode(found[3].tokens[0, -8:]) == "Ab\na##bB\n\nC"


@pytest.mark.parametrize("sampler", [S.WINO(wide_in=0.02, narrow_out=0.3), S.Edit(0.02, 0.02)])
def test_a_stop_that_is_revised_ends_nothing(sampler):
    """Tokens of a block that a sampler may take back are read once the block is finished."""
    model, tokenizer = tiny("sdar", block_size=12) if isinstance(sampler, S.Edit) else tiny("llada"), words()
    prompt = np.random.default_rng(0).integers(0, 40, (24, 4))
    options = dict(length=12, block=12, sampler=sampler, allow=[list(range(len(ENOUGH)))] * 12)
    full, seen = dj.generate(model, prompt, **options, trace=True), np.zeros(24, bool)
    tokens = np.asarray(full.trace.tokens)[:, :, 4:16]
    for stops in (["a"], ["#", "B"], ["X"], ["\n"]):
        stop = dj.StopTexts(tokenizer, stops)
        out = np.asarray(dj.generate(model, prompt, stop=stop, **options).tokens)[:, 4:]
        table, ids = stop.table(61), np.asarray(full.tokens)[:, 4:]
        for answer, own in zip(out, ids, strict=True):
            state, count = BEGIN, 0
            while state != FOUND and count < 12:
                state, count = table.follows[state, table.kind[own[count]]], count + 1
            assert answer.tolist() == [*own[:count], *[model.spec.eos_id] * (12 - count)]
        holds = np.isin(tokens, [i for i, word in enumerate(ENOUGH) if any(s in word for s in stops)])
        seen |= (holds.any(axis=0) & ~holds[-1]).any(axis=1)
    assert seen.any(), "no token with a stop is taken back"


def test_a_stop_behind_an_end_of_text_is_none():
    model, tokenizer = tiny("llada"), words()
    for end in (model.spec.eos_id, model.spec.eot_id):
        allow = [*response(tokenizer, ["A", "B"]), [end], *response(tokenizer, ["##", "C", "D", "E", "F"])]
        options = dict(length=8, block=4, allow=allow)
        out = dj.generate(model, [[1, 2]], stop=dj.StopTexts(tokenizer, ["#"]), **options)
        np.testing.assert_array_equal(out.tokens, dj.generate(model, [[1, 2]], **options).tokens)


def test_other_stops_need_no_other_program():
    model, tokenizer = tiny("llada"), words()
    run = lambda *stops: dj.generate(
        model, [[1, 2, 3]], length=8, block=4, stop=dj.StopTexts(tokenizer, stops), sampler=S.Threshold(0.9)
    )
    run("a")
    before = dj.engine.loop.denoise._cache_size()
    for stops in (["b"], ["a", "#"], ["\n\n"], ["st"]):
        run(*stops)
    assert dj.engine.loop.denoise._cache_size() == before
    traced = jax.jit(
        lambda prompt: dj.generate(model, prompt, length=8, stop=dj.StopTexts(tokenizer, ["a"])).tokens
    )
    alone = dj.generate(model, [[1, 2, 3]], length=8, stop=dj.StopTexts(tokenizer, ["a"])).tokens
    np.testing.assert_array_equal(traced(np.asarray([[1, 2, 3]])), alone)


@pytest.mark.parametrize("family", ["sdar", "dream"])
def test_stops_of_other_families_and_after_a_suffix(family):
    model, tokenizer = tiny(family, **{"block_size": 4} if family == "sdar" else {}), words()
    stop, allow = dj.StopTexts(tokenizer, ["##"]), response(tokenizer, ANSWER)
    more = {} if family == "sdar" else {"suffix": [5, 6]}
    for prompt in ([[1, 2, 3]], [[1, 2, 3, 4]]):
        out = dj.generate(model, prompt, length=8, block=4, stop=stop, allow=allow, **more)
        answer = np.asarray(out.tokens)[0, len(prompt[0]) :][:8]
        assert stop.decode(answer) == "Ab\na"
        assert (answer[4:] == model.spec.eos_id).all()


def byte_level():
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    vocab = {letter: i for i, letter in enumerate(sorted(letters))}
    for token in ("ĊĊ", "ĠĊ", "Ãł", "ab", "ĠQ:"):
        vocab[token] = len(vocab)
    return made(vocab, decoders.ByteLevel(), special=("<|x|>",))


def metaspace(**options):
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("▁a", "a", "▁", "b", "▁Q", ":", "é"):
        vocab[token] = len(vocab)
    replace = decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    return made(vocab, decoders.Sequence(list(replace)), special=("<s>",), **options)


@pytest.mark.parametrize("make", [words, byte_level, metaspace])
def test_bytes_of_tokens_make_up_the_text(make):
    """Parts of characters, spaces that only later tokens have, special tokens in between."""
    tokenizer, rng = make(), np.random.default_rng(1)
    count = len(tokenizer)
    contents = token_contents(tokenizer, count + 3, added_tokens(tokenizer))
    assert (
        contents.later[count - 1] == contents.later[-1] == b""
    )  # the special token; none of the tokenizer's
    usable = [i for i in range(count) if make != metaspace or not 128 <= i < 256]  # bytes of no ASCII letter
    for _ in range(100):
        drawn = (tokenizer.decode(rng.choice(usable, size=2), skip_special_tokens=True) for _ in range(2))
        stop = dj.StopTexts(tokenizer, [s for s in drawn if s and "\ufffd" not in s] or ["a"])
        table, ids = stop.table(count), rng.choice(usable, size=40).tolist()
        state, read = BEGIN, 0
        while state != FOUND and read < len(ids):
            state, read = table.follows[state, table.kind[ids[read]]], read + 1
        assert stop.decode(ids) == truth(tokenizer.decode(ids, skip_special_tokens=True), stop.texts)
        assert stop.decode(ids[:read]) == stop.decode(ids)


def test_tokens_that_are_added_later_are_seen():
    """A token of text, and one that becomes special, so that it adds none."""
    tokenizer = made({word: i for i, word in enumerate(ENOUGH)}, special=("<|x|>",))
    stop, new = dj.StopTexts(tokenizer, ["é!"]), len(tokenizer)
    ends = lambda *ids: functools.reduce(lambda state, i: table.follows[state, table.kind[i]], ids, BEGIN)
    table = stop.table(new + 1)
    assert ends(new) != FOUND
    tokenizer.add_tokens(["aé!"])
    table = stop.table(new + 1)
    assert ends(new) == FOUND
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|x|>", "aé!"]})
    table = stop.table(new + 1)
    assert ends(new) != FOUND


def test_stops_that_tokens_do_not_show_are_only_cut():
    """A tokenizer that puts spaces between words, for one: decoding goes on to the end."""
    spaced = made({word: i for i, word in enumerate(ENOUGH)}, decoders.WordPiece("##", cleanup=True))
    assert dj.StopTexts(spaced, ["st op"]).table(61) is None
    model = tiny("llada")
    options = dict(length=8, block=4, allow=response(spaced, ANSWER))
    out = dj.generate(model, [[1, 2]], stop=dj.StopTexts(spaced, ["B"]), **options)
    np.testing.assert_array_equal(out.tokens, dj.generate(model, [[1, 2]], **options).tokens)
    assert dj.StopTexts(spaced, ["B"]).decode(out.tokens[0, -8:]).endswith("#b ")


def test_no_spaces_of_an_answer_are_cleaned_up():
    """A tokenizer's file may ask for it: the text would break its pattern and lose its stop."""
    signs = made({word: i for i, word in enumerate([*ENOUGH, " ", ".", ",", "!", "="])})
    signs.clean_up_tokenization_spaces = True
    ids = response(signs, ["a", " ", "!", "=", " ", "b", " ", ",", " ", "."])
    ids = [i for each in ids for i in each]
    assert signs.decode(ids) == "a!= b,."
    assert dj.decode_answers(tiny("llada", vocab=61), signs, [ids]) == ["a != b , ."]
    stop = dj.StopTexts(signs, [" ,"])
    assert stop.decode(ids) == "a != b"
    assert stop.table(61) is not None
    assert undecided(signs, None, np.asarray(ids), 99) == len("a != b , .")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """`tiny-llada` with a BPE tokenizer that has merges."""
    folder = tmp_path_factory.mktemp("bpe") / "model"
    shutil.copytree(bundled.path("tiny-llada"), folder)
    read = json.loads((folder / "tokenizer.json").read_text())
    vocab, merges = read["model"]["vocab"], [("\n", "\n"), ("#", "#"), ("o", "p"), ("4", "#")]
    for pair in merges:
        vocab.setdefault("".join(pair), max(vocab.values()) + 1)
    read["model"] = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<|unk|>"}
    read["pre_tokenizer"] = None
    (folder / "tokenizer.json").write_text(json.dumps(read))
    return dj.load(folder), dj.load_tokenizer(folder)


def ask(model, tokenizer, answer: str, stop: list[str], **options) -> str:
    """What `chat` makes of an answer that is forced on it."""
    ids = tokenizer.encode(answer, add_special_tokens=False)
    talk = [{"role": "user", "content": "T=4"}]
    return dj.chat(model, tokenizer, talk, length=len(ids), allow=[[i] for i in ids], stop=stop, **options)


TALKS = [
    ("4\nQ: next", ["\n"]), ("4\n\nQ: next", ["\n"]), ("4## next", ["#"]), ("4## next", ["##"]),
    ("a stop b", ["stop"]),
    ("4# op next", ["# o"]), ("a##<b", ["##<", "#"]), ("4\n\nQ", ["\n\nQ", "\n"]), ("none", ["\n"]),
]  # fmt: skip


@pytest.mark.parametrize(("answer", "stop"), TALKS)
def test_a_chat_ends_where_its_text_has_a_stop(checkpoint, answer, stop):
    assert ask(*checkpoint, answer, stop) == truth(answer, stop)
    assert ask(*checkpoint, answer, stop, stop_at_eos=True, steps=1) == truth(answer, stop)


@pytest.mark.parametrize("name", ["tiny-llada", "tiny-dream", "tiny-sdar"])
def test_a_stop_inside_of_a_token_of_bundled_models(name):
    path = bundled.path(name)
    assert ask(dj.load(path), dj.load_tokenizer(path), "4\n\nQ: n", ["\n"]) == "4"


def test_a_stop_may_be_a_special_token(checkpoint):
    model, tokenizer = checkpoint
    special = "<|start_header_id|>"
    for answer, stop in (("ab" + special + "cd", [special]), ("ab" + special + "cd", ["b" + special, "d"])):
        assert ask(model, tokenizer, answer, stop) == truth(answer, stop)
    assert ask(model, tokenizer, "a<|unk|>b\n", ["ab"]) == "", "an unknown token adds no text"
    assert ask(model, tokenizer, "ab<|eot_id|>cd", ["d"]) == "ab"


def test_stops_that_are_none_are_refused(checkpoint):
    for bad in ("x", [""], [3], None, 3):
        refuses("must be a list of texts, none of them empty", ask, *checkpoint, "a", bad)
    refuses(r"stop\[1\]=.*U.D83D at position 0", ask, *checkpoint, "a", ["a", "\ud83d"])
    refuses("must be a list of texts", dj.StopTexts, checkpoint[1], [])
    refuses("Use stop=dj.StopTexts", dj.generate, checkpoint[0], [[1]], stop=["\n"], length=4)


def test_the_text_of_a_response_ends_at_its_first_end_or_stop():
    path = bundled.path("tiny-llada")
    model, tokenizer = dj.load(path), dj.load_tokenizer(path)
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False)
    eos, end_of_turn = [model.spec.eos_id], [model.spec.eot_id]
    assert eos != end_of_turn
    ended = [ids("12") + eos + ids("3"), ids("4") + end_of_turn + ids("5"), ids("a;b")]
    assert dj.decode_answers(model, tokenizer, ended) == ["12", "4", "a;b"]
    assert dj.decode_answers(model, tokenizer, ended, dj.StopTexts(tokenizer, [";"])) == ["12", "4", "a"]
    batch = np.asarray([ids("12") + eos, ids("123")])
    assert dj.decode_answers(model, tokenizer, batch) == ["12", "123"]
    refuses("must be a batch of token ids", dj.decode_answers, model, tokenizer, ids("12"))
