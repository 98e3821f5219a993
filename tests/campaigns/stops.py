"""Random stop texts against random tokenizers: an answer ends where its text has the first stop.

Tokenizers have random merges, bytes for letters, or spaces that only later tokens have. An answer is forced
on a model token by token. The text that `chat` would return must be that of the whole answer, cut; decoding
must end with the token that decides where the first stop begins, and neither earlier nor later.
"""

import functools
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models

import dllm_jax as dj
from dllm_jax import bundled, samplers
from dllm_jax.engine.features.stops import BEGIN, FOUND
from tests.campaigns.verdicts import Case, Outcome, Verdict
from tests.models import tiny
from tests.test_stops import decided, made, truth

NAME = "stops"
SAMPLE = 60

LENGTH = 12
LETTERS = "ab#\n é"
KINDS = "bpe", "bytes", "spaces"
USED = 57  # ids below the special ones of tiny models
SAMPLERS = samplers.Sequential(), samplers.Threshold(0.2), samplers.WINO(wide_in=0.1, narrow_out=0.3)


def tokenizer(kind: str, rng: np.random.Generator) -> Any:
    """A tokenizer with random tokens of several letters, all of which a tiny model has."""
    words = {"".join(rng.choice(list(LETTERS), rng.integers(2, 5))) for _ in range(30)}
    if kind == "bpe":  # of a bundled model's tokenizer
        read = json.loads((bundled.path("tiny-llada") / "tokenizer.json").read_text())
        vocab, merges = read["model"]["vocab"], []
        for _ in range(15):
            pair = tuple(rng.choice([*LETTERS[:5], *map("".join, merges)], 2).tolist())
            merges += [pair] * (len("".join(pair)) < 6 and pair not in merges)
            vocab.setdefault("".join(pair), len(vocab))
        read["model"] = {"type": "BPE", "vocab": vocab, "merges": merges, "unk_token": "<|unk|>"}
        read["pre_tokenizer"] = None
        base = tokenizers.Tokenizer.from_str(json.dumps(read))
        found = made({"": 0})
        return type(found)(tokenizer_object=base)
    if kind == "bytes":
        letters = dict(zip(range(256), _byte_letters(), strict=True))
        of_bytes = lambda word: "".join(letters[byte] for byte in word.encode())
        tokens = [*(letters[byte] for byte in "".join(LETTERS).encode()), *map(of_bytes, sorted(words))]
        return made(_numbered(tokens), decoders.ByteLevel(), special=("<|x|>",))
    tokens = [*LETTERS.replace(" ", "▁"), *(word.replace(" ", "▁") for word in sorted(words))]
    chain = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return made(_numbered(tokens), chain, special=("<|x|>",))


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: i for i, token in enumerate(dict.fromkeys(tokens))}


def _byte_letters() -> list[str]:
    """The letter that stands for each byte."""
    level = tokenizers.Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    level.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = (256 + n for n in itertools.count())
    return [chr(byte) if byte in shown else chr(next(hidden)) for byte in range(256)]


def read_by(stop: dj.StopTexts, ids: list[int]) -> int:
    """How many tokens the automaton reads until it is certain; all of them if it never is."""
    table = stop.table(max(len(stop.tokenizer), max(ids) + 1))
    assert table is not None, "these tokenizers join their tokens"
    state = BEGIN
    for count, i in enumerate(ids):
        if state == FOUND:
            return count
        state = table.follows[state, table.kind[i]]
    return len(ids)


def check(kind: str, seed: tuple[int, int], model: bool) -> Verdict:
    """Draws a tokenizer, an answer and stops, and looks at all of them."""
    rng = np.random.default_rng(seed)
    one = tokenizer(kind, rng)
    usable = (
        [*range(11, 13), *range(16, 17), *range(78, 80), *range(108, len(one))] if kind == "bpe" else None
    )
    ids = rng.choice(range(len(one)) if usable is None else usable, LENGTH).tolist()
    whole = one.decode(ids, skip_special_tokens=True)
    letters = lambda: "".join(rng.choice(list(LETTERS), rng.integers(1, 5)))
    inside = lambda: (
        whole[(at := int(rng.integers(len(whole)))) : at + int(rng.integers(1, 6))] if whole else ""
    )
    spaced = lambda: " " + whole[: int(rng.integers(1, 4))]  # what stands first has no space before it
    drawn = ((letters, inside, spaced)[rng.integers(3)]() for _ in range(rng.integers(1, 5)))
    stop = dj.StopTexts(one, [each for each in drawn if each and "\ufffd" not in each] or ["a"])
    right = truth(whole, stop.texts)
    case = f"ids {ids} = {whole!r}, stops {stop.texts}"
    if stop.decode(ids) != right:
        return Verdict(Outcome.WRONG, f"{case}: decoded {stop.decode(ids)!r}, right is {right!r}")
    count = read_by(stop, ids)
    if stop.decode(ids[:count]) != right:
        return Verdict(Outcome.WRONG, f"{case}: ends after {count} tokens, too early for {right!r}")
    texts = (one.decode(ids[:n], skip_special_tokens=True) for n in range(1, count))
    if any(decided(each, stop.texts) for each in texts if "\ufffd" not in each):
        return Verdict(Outcome.WRONG, f"{case}: ends after {count} tokens, too late")
    return generated(stop, ids, count, rng) if model and max(ids) < USED else Verdict(Outcome.RIGHT)


def generated(stop: dj.StopTexts, ids: list[int], count: int, rng: np.random.Generator) -> Verdict:
    """Forces the answer on a model, in blocks, under samplers that fill masks in any order."""
    sampler, block = SAMPLERS[rng.integers(len(SAMPLERS))], int(rng.choice([3, 6, 12]))
    options: Any = dict(length=LENGTH, block=block, sampler=sampler, allow=[[i] for i in ids])
    out = dj.generate(tiny("llada"), [[1, 2, 3]], stop=stop, **options)
    answer = np.asarray(out.tokens)[0, -LENGTH:]
    right = [*ids[:count], *[tiny("llada").spec.eos_id] * (LENGTH - count)]
    if answer.tolist() != right:
        return Verdict(Outcome.WRONG, f"{options}: {answer.tolist()}, right is {right}")
    blocks = -(-count // block) * block
    if int(out.stats.nfe[0]) > (count if sampler == SAMPLERS[0] else blocks):
        return Verdict(Outcome.WRONG, f"{options}: {out.stats.nfe[0]} passes for {count} tokens")
    return Verdict(Outcome.RIGHT)


def cases(seed: int) -> Iterator[Case]:
    """Draws without end; every fourth is decoded by a model."""
    for number in itertools.count():
        kind = KINDS[number % len(KINDS)]
        run = functools.partial(check, kind, (seed, number), number % 4 == 0)
        yield Case(f"seed {seed}, case {number}: {kind}", run)
