"""Random training batches: invalid ones are refused by name, valid ones give what each example alone gives.

A valid batch has lists or arrays, padding, masks of several dtypes, and labels of -100 anywhere. All its
tokens that count are masked; their log-probabilities must be those of a plain forward of the example alone.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.training import (
    Batch,
    TrainConfig,
    masked_diffusion_loss,
    one_step_masks,
    prepare,
    response_log_probs,
    vrpo_loss,
)
from tests.campaigns.verdicts import Case, judge
from tests.models import FAMILIES, tiny

NAME = "training batches"
SAMPLE = 60
PROMPT, ANSWER, ROWS = 3, 4, (1, 3)  # the longest ones, so that few programs are compiled
KEY, NAMED = jax.random.key(0), ("prompt", "answer", "t_min", "images", "batch")
MASK_ID, VOCAB, WORDS = tiny("llada").spec.mask_id, tiny("llada").spec.vocab, 40
Fields = dict[str, Any]


def cases(seed: int) -> Iterator[Case]:
    """Endless; case n of a seed is the same in every run."""
    for number in itertools.count():
        rng = np.random.default_rng((seed, number))
        family, prompts, answers = FAMILIES[rng.integers(len(FAMILIES))], *drawn(rng)
        if rng.random() < 0.5:
            fields = written(rng, prompts, answers)
            run = functools.partial(right, family, fields, prompts, answers)
        else:
            damage = DAMAGES[rng.integers(len(DAMAGES))]
            fields = damage(rng, {"prompt": prompts, "answer": answers}) | {"damage": damage.__name__}
            run = functools.partial(wrong, family, fields, int(rng.integers(len(DOORS))))
        shown = " ".join(repr(fields).split())
        yield Case(f"seed {seed}, case {number}: {family}, {shown}"[:600], run)


def drawn(rng: np.random.Generator) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and answers of unequal lengths, the longest of the widths of programs; some tokens are -100."""
    rows = int(rng.choice(ROWS))
    lengths = lambda least, most: [most, *rng.integers(least, most + 1, rows - 1)]
    prompts = [rng.integers(0, WORDS, n).tolist() for n in lengths(0, PROMPT)]
    answers = [
        np.where(rng.random(n) < 0.2, -100, rng.integers(0, WORDS, n)).tolist() for n in lengths(1, ANSWER)
    ]
    return prompts, answers


def written(rng: np.random.Generator, prompts: list[list[int]], answers: list[list[int]]) -> Fields:
    """The same batch in one of the forms that are taken: lists, or padded arrays with masks."""
    fields: Fields = {}
    for name, rows, left in (("prompt", prompts, True), ("answer", answers, False)):
        if rng.random() < 0.3:
            fields[name] = [np.asarray(row, int) if rng.random() < 0.3 else row for row in rows]
            continue
        ids, mask = padded(rows, left, int(rng.choice([0, 7, MASK_ID * (not left), -100 * (not left)])))
        wide = rng.choice(["int32", "int64", "int16"])
        fields[name] = jnp.asarray(ids) if rng.random() < 0.3 else ids.astype(wide)
        if not mask.all() or rng.random() < 0.3:
            kinds = (bool, np.int32, np.uint8)
            form = mask.astype(kinds[rng.integers(len(kinds))])
            fields[f"{name}_mask"] = form.tolist() if rng.random() < 0.3 else form
    return fields


def padded(rows: list[list[int]], left: bool, value: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows side by side with padding of a value, and where they are no padding."""
    width = max(map(len, rows))
    ids, mask = np.full((len(rows), width), value), np.zeros((len(rows), width), bool)
    for row, own in enumerate(rows):
        at = slice(width - len(own), width) if left else slice(0, len(own))
        ids[row, at], mask[row, at] = own, True
    return ids, mask


def right(family: str, fields: Fields, prompts: list[list[int]], answers: list[list[int]]):
    """Judges a valid batch."""
    model, batch = tiny(family), Batch(**fields)

    def check(found: Any) -> str:
        expected = np.stack([alone(model, *pair) for pair in zip(prompts, answers, strict=True)])
        same = np.allclose(found, expected, rtol=1e-4, atol=1e-4)
        return "" if same else f"{np.asarray(found).tolist()} are not {expected.tolist()}"

    call = lambda: response_log_probs(model, batch, one_step_masks(KEY, batch, 0.0))
    return judge(call, NAMED, valid=True, check=check)


@functools.cache
def forward(family: str) -> Callable[..., jax.Array]:
    """Logits in one program for all examples."""
    return jax.jit(lambda tokens, valid: dj.forward(tiny(family), tokens, valid))


def alone(model: dj.Model, prompt: list[int], answer: list[int]) -> np.ndarray:
    """Log-probabilities of the tokens of an example, all of them masked, by a plain forward of it alone."""
    tokens, valid = np.full(PROMPT + ANSWER, 1, np.int32), np.zeros(PROMPT + ANSWER, bool)
    tokens[PROMPT - len(prompt) : PROMPT], valid[PROMPT - len(prompt) : PROMPT] = prompt, True
    counts = [PROMPT + i for i, id in enumerate(answer) if id != -100]
    tokens[counts], valid[counts] = model.spec.mask_id, True
    logits = np.asarray(forward(model.spec.family)(tokens[None], valid[None])[0], np.float64)
    out = np.zeros(ANSWER)
    for i in counts:
        row = logits[i - 1 if model.spec.shifted and valid[i - 1] else i]
        out[i - PROMPT] = row[answer[i - PROMPT]] - row.max() - np.log(np.exp(row - row.max()).sum())
    return out


def wrong(family: str, fields: Fields, door: int):
    """Judges an invalid batch at one of the doors, or what is none."""
    fields = {name: value for name, value in fields.items() if name != "damage"}
    batch = fields["batch"] if "batch" in fields else Batch(**fields)
    return judge(lambda: DOORS[door](tiny(family), batch), NAMED, valid=False)


def fine() -> Batch:
    return Batch([[1, 2]], [[3, 4]])


DOORS: tuple[Callable[[dj.Model, Any], Any], ...] = (
    lambda model, batch: masked_diffusion_loss(model, batch, KEY),
    lambda model, batch: response_log_probs(model, batch, one_step_masks(KEY, fine())),
    lambda model, batch: prepare(model, TrainConfig(steps=1)).batch(batch),
    lambda model, batch: vrpo_loss(model, model, batch, fine(), KEY),
    lambda model, batch: vrpo_loss(model, model, fine(), batch, KEY),
)


# How a batch is damaged: each gives the fields of one that is invalid.


def one_id(rng: np.random.Generator, fields: Fields) -> Fields:
    """An id that no prompt or no answer may hold."""
    name = str(rng.choice(["prompt", "answer"]))
    bad = [VOCAB, VOCAB + int(rng.integers(2**30)), -1, -(2**31), -int(rng.integers(2, 90)), MASK_ID]
    bad += [-100] if name == "prompt" else []
    row = fields[name][0]
    row[rng.integers(len(row))] = bad[rng.integers(len(bad))]
    return fields if rng.random() < 0.5 else fields | {name: [row], **_others(fields, name, 1)}


def _others(fields: Fields, name: str, rows: int) -> Fields:
    other = "answer" if name == "prompt" else "prompt"
    return {other: fields[other][:rows]}


def dtype(rng: np.random.Generator, fields: Fields) -> Fields:
    """What is no array of whole numbers."""
    name = str(rng.choice(["prompt", "answer"]))
    ids = padded(fields[name], name == "prompt", 5)[0]
    forms = [
        ids.astype(float), ids.astype(bool), ids.astype(object), ids.astype(str), ids * 1j, ids[..., None],
        jnp.asarray(ids, jnp.bfloat16), None, "text", 3, 2.5, {}, len, ids[:0], [["a"]] * len(ids), [[[1]]],
        [[None]] * len(ids), np.array([[1], [1, 2]], dtype=object), [[np.nan]] * len(ids),
    ]  # fmt: skip
    return fields | {name: forms[rng.integers(len(forms))]}


def rows(rng: np.random.Generator, fields: Fields) -> Fields:
    """Another number of prompts than of answers, or answers without tokens."""
    name = str(rng.choice(["prompt", "answer"]))
    empty = {"answer": [[], *fields["answer"][1:]]}
    forms = [{name: [*fields[name], [1]]}, {name: []}, empty, {"prompt": [], "answer": []}]
    return fields | forms[rng.integers(len(forms))]


def mask(rng: np.random.Generator, fields: Fields) -> Fields:
    """A mask that is none, of another shape, or whose padding is on the wrong side or within."""
    name, whole = str(rng.choice(["prompt", "answer"])), len(fields["answer"])
    width = PROMPT if name == "prompt" else ANSWER
    ids, one = rng.integers(0, WORDS, (whole, width)), np.ones((whole, width), int)
    wrong_side, hole = one.copy(), one.copy()
    wrong_side[:, -1 if name == "prompt" else 0], hole[:, 1] = 0, 0
    forms = [
        one * 2, -one, one.astype(float), one[:, 1:], one[..., None], one.astype(str), one.astype(object),
        wrong_side, hole, "x", 1, 0.5, {}, np.full(one.shape, np.nan), [*one.tolist(), [1] * width], [],
    ]  # fmt: skip
    ragged = {name: [[1], [1, 2]], **_others(fields | {"answer": [[1]] * 2, "prompt": [[1]] * 2}, name, 2)}
    if rng.random() < 0.1:
        return ragged | {f"{name}_mask": [[1, 1]] * 2}
    return fields | {name: ids, f"{name}_mask": forms[rng.integers(len(forms))]}


def option(rng: np.random.Generator, fields: Fields) -> Fields:
    """A noise level or images that are none."""
    levels = (0.0, -0.1, 1.5, np.nan, np.inf, "0.5", None, True, [0.1], np.ones(2), 1j)
    images = (3, "x", [], {}, np.ones((1, 2)), True)
    name, values = (("t_min", levels), ("images", images))[rng.integers(2)]
    return fields | {name: values[rng.integers(len(values))]}


def nothing(rng: np.random.Generator, fields: Fields) -> Fields:
    """What is no batch at all."""
    values = (None, 3, "x", [], {}, (1, 2), fields, Batch, (fields["prompt"], fields["answer"]))
    return {"batch": values[rng.integers(len(values))]}


DAMAGES: tuple[Callable[[np.random.Generator, Fields], Fields], ...] = (
    one_id, one_id, dtype, rows, mask, mask, option, nothing
)  # fmt: skip
