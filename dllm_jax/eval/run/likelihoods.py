"""Log-likelihoods of many (context, answer) pairs, and whether each answer is the greedy one."""

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import time
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int
from typing_extensions import override

import dllm_jax as dj
from dllm_jax.decoding.likelihood import Order, log_likelihood, stratified_masks
from dllm_jax.eval.results.schema import Entry
from dllm_jax.eval.run.answering import NOT_FINITE, Answering
from dllm_jax.eval.run.settings import rounded_up
from dllm_jax.nn.keys import seeded
from dllm_jax.state.inputs import IdleStepsWarning, padded_together

# Answers are padded to these lengths, and share programs; longer ones to multiples of the last.
LENGTHS = dj.buckets.Ladder((1, 4, 8, 16, 32, 64))
Pair = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class OnePerStep(dj.samplers.UntilDone):
    """Decodes the most confident position in each step, as many steps as there are masks."""

    @override
    def transfer(
        self, candidates: dj.samplers.Candidates, canvas: dj.state.Canvas, noise: dj.samplers.Noise | None
    ) -> Bool[Array, "b c"]:
        return dj.state.best(candidates.score, 1)


@dataclasses.dataclass(frozen=True)
class Likelihood(Answering[Pair]):
    """LLaDA's Monte-Carlo estimator over batches; a pair's masks do not depend on its batch.

    Of `decoding`, batch, bucket, seed and `max_positions` are used: not its policy and sampler. The answer of
    a pair is [nats, is the greedy answer]. The greedy answer is LLaDA's: exact decoding, one token per step,
    the most confident first. A pair with an empty part or more than `max_positions` positions fails.

    Attributes:
      draws: Number of Monte-Carlo draws (`log_likelihood`); one for answers of a single token, where it is
        exact.
      strata: Number of draws among which the number of masks is stratified (`log_likelihood`).
      cfg_scale: Scale of classifier-free guidance (`log_likelihood`).
      greedy_check: Whether to decode the greedy answer for comparison; False reports that no answer is
        greedy.
      order: "confidence" reveals the answer's most probable tokens first instead of drawing masks
        (`log_likelihood`).
    """

    draws: int = 128
    strata: int = 32
    cfg_scale: float = 0.0
    greedy_check: bool = True
    order: Order = "random"

    @override
    def key(self, item: Pair) -> str:
        chosen: list[Any] = [self.draws, self.strata, self.cfg_scale, self.greedy_check, self.decoding.seed]
        chosen += [] if self.order == "random" else [self.order]
        # Bucket lengths count: masks are drawn at them.
        asked = ["log-likelihood", LENGTHS.rungs, self.lm.identity, self.decoding.max_positions]
        parts = [*asked, *chosen, *item]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @override
    def _shape(self, item: Pair) -> tuple[int, int]:
        """Padded answer and padded context; the masks of an answer of one token are another program's."""
        # Longer answers always have padding: programs with and without a mask of it are two.
        length = len(item[1]) if len(item[1]) < 2 else len(item[1]) + 1
        rung = LENGTHS.fit(length) if length <= LENGTHS.rungs[-1] else rounded_up(length, LENGTHS.rungs[-1])
        return rung, rounded_up(len(item[0]), self.decoding.bucket)

    @override
    def _batches(self, pairs: list[tuple[str, Pair]]) -> list[list[tuple[str, Pair]]]:
        # Requests of one shape share a batch. A batch that fails takes no other along.
        alike = [list(group) for _, group in itertools.groupby(pairs, key=lambda pair: self._shape(pair[1]))]
        size = self.decoding.batch
        return [each[i : i + size] for each in alike for i in range(0, len(each), size)]

    @override
    def _answers(self, pairs: list[tuple[str, Pair]], at_once: int) -> Iterator[list[Entry]]:
        limit = self.decoding.max_positions
        for _, (context, response) in pairs:
            if not context or not response:
                raise ValueError(f"context has {len(context)} tokens, answer {len(response)}; both need one")
            if limit is not None and (taken := len(context) + len(response)) > limit:
                raise ValueError(f"context and answer take {taken} positions; max_positions={limit}")
        start, model, (rung, width) = time.perf_counter(), self.lm.model, self._shape(pairs[0][1])
        items = [pair for _, pair in pairs]
        items += items[:1] * (self.decoding.batch - len(items))
        prompt, mask = padded_together([context for context, _ in items], model.spec.eos_id, width)
        answer, real = padded_together([ids for _, ids in items], model.spec.eos_id, rung, "right")
        # Every pair has masks of its own, in every batch.
        drawn = self.order == "random"
        masks = np.stack([self.masks(pair) for pair in items], axis=1) if drawn else None
        how: dict[str, Any] = dict(cfg_scale=self.cfg_scale, chunk=self.strata, order=self.order)
        nats = log_likelihood(model, prompt, answer, prompt_mask=mask, answer_mask=real, masks=masks, **how)
        forwards = np.full(len(items), rung if masks is None else len(masks))
        computed = forwards * (np.asarray(mask).sum(axis=1) + real.sum(axis=1))
        greedy = np.zeros(len(items), bool)
        # LLaDA's check: is the answer what exact decoding gives, one token per step?
        if self.greedy_check:
            stats, decoded = self._greedy(items, prompt, mask, rung)
            greedy = ((decoded == answer) | ~real).all(axis=1)
            forwards, computed = forwards + stats[:, 0], computed + stats[:, 1]
        if self.cfg_scale > 0:  # guidance is a second pass
            forwards, computed = 2 * forwards, 2 * computed

        # Without what fills up the batch; padding is not counted among the positions computed.
        seconds, entries = (time.perf_counter() - start) / len(pairs), list[Any]()
        columns = [np.asarray(column).tolist() for column in (nats, greedy, forwards, computed)]
        for (key, _), nat, same, n, c in zip(pairs, *columns, strict=False):
            costs = {"forwards": n, "computed": c, "seconds": seconds} if math.isfinite(nat) else {}
            answer, error = ([nat, same], None) if costs else (None, NOT_FINITE)
            entries.append({"key": key, "answer": answer, "error": error, **costs})
        yield entries

    def _greedy(
        self, pairs: list[Pair], prompt: np.ndarray, mask: np.ndarray, rung: int
    ) -> tuple[Int[np.ndarray, "b 2"], Int[np.ndarray, "b r"]]:
        """Decodes as many tokens after each context as its answer has, one per step, and pads them.

        Returns:
          forward passes and computed positions of each answer, and the answers.
        """
        model, spec = self.lm.model, self.lm.model.spec
        decode = functools.partial(dj.generate, model, prompt, prompt_mask=mask, nonfinite="ignore")
        sampler = OnePerStep(cfg_scale=self.cfg_scale)
        if spec.context.has_blocks:
            # Later blocks do not change the earlier ones, and a block is always decoded whole.
            out = decode(length=spec.context.whole(rung), sampler=sampler)
            return _costs(out), np.asarray(out.tokens)[:, prompt.shape[1] :][:, :rung]

        # Elsewhere masks beyond the answer would change it: it ends the template. Guidance needs to know the
        # prompt, so that answers of each length are decoded by themselves.
        lengths = np.asarray([len(ids) for _, ids in pairs])
        if self.cfg_scale > 0:
            costs, answers = np.zeros((len(pairs), 2), int), np.full((len(pairs), rung), spec.eos_id)
            for length in np.unique(lengths).tolist():
                out, ours = decode(length=length, sampler=sampler), lengths == length
                costs[ours] = _costs(out)[ours]
                answers[ours, :length] = np.asarray(out.tokens)[ours, prompt.shape[1] :]
            return costs, answers
        width = prompt.shape[1] + rung
        template = [(*context, *[spec.mask_id] * len(ids)) for context, ids in pairs]
        tokens, padding = padded_together(template, spec.eos_id, width)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", IdleStepsWarning)  # short answers have fewer masks than steps
            out = dj.infill(
                model, tokens, token_mask=padding, steps=rung, sampler=sampler, nonfinite="ignore"
            )
        ends = [row[-n:] for row, n in zip(np.asarray(out.tokens), lengths, strict=True)]
        return _costs(out), padded_together(ends, spec.eos_id, rung, "right")[0]

    def masks(self, pair: Pair) -> Bool[np.ndarray, "draws r"]:
        """Returns the masks of a pair's draws, which depend on the seed and the pair; False at padding."""
        # A single token is masked in every draw: one is exact.
        rung, _ = self._shape(pair)
        if rung == 1:
            return np.ones((1, 1), bool)
        text = json.dumps([self.decoding.seed, *pair])
        seed = np.uint32(int(hashlib.sha256(text.encode()).hexdigest()[:8], 16))
        return np.asarray(_masks(seed, len(pair[1]), rung, self.strata, self.draws // self.strata))


def _costs(out: dj.Output) -> Int[np.ndarray, "b 2"]:
    """Forward passes and computed positions of each sequence."""
    return np.stack([np.asarray(out.stats.nfe), np.asarray(out.stats.computed_tokens)], axis=1)


@functools.partial(jax.jit, static_argnames=("rung", "strata", "groups"))
def _masks(seed: Array, length: Array, rung: int, strata: int, groups: int) -> Bool[Array, "draws r"]:
    """Draws masks of the first `length` of `rung` tokens."""
    keys, real = jax.random.split(seeded(seed), groups), jnp.arange(rung) < length
    drawn = jax.vmap(lambda key: stratified_masks(key, rung, strata, real))(keys)
    return drawn.reshape(groups * strata, rung)
