"""Log-likelihoods of many (context, answer) pairs, and whether each answer is the greedy one."""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool

from dllm_jax.decoding.generate import generate
from dllm_jax.decoding.likelihood import log_likelihood, stratified_masks
from dllm_jax.eval.results.schema import Entry, Estimated
from dllm_jax.eval.run.answering import NOT_FINITE, answers, filled
from dllm_jax.eval.run.checkpoint import LanguageModel
from dllm_jax.eval.run.journal import Ledger
from dllm_jax.eval.run.settings import Decoding, rounded_up
from dllm_jax.state.inputs import padded_together

Pair = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """LLaDA's Monte-Carlo estimator over batches; a pair's masks do not depend on its batch.

    Attributes:
      lm: the model.
      decoding: batch, bucket, seed and `max_positions`; policy and sampler are not used.
      draws: see `log_likelihood`; one for answers of a single token, where it is exact.
      strata: see `log_likelihood`.
      cfg_scale: see `log_likelihood`.
    """

    lm: LanguageModel
    decoding: Decoding
    draws: int = 128
    strata: int = 32
    cfg_scale: float = 0.0

    def key(self, pair: Pair, greedy_check: bool) -> str:
        """Hash of everything that determines a pair's entry."""
        chosen = [self.draws, self.strata, self.cfg_scale, greedy_check, self.decoding.seed]
        parts = ["log-likelihood", self.lm.identity, self.decoding.max_positions, *chosen, *pair]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def run(
        self,
        pairs: Sequence[Pair],
        greedy_check: bool,
        journal: Ledger | None = None,
        progress: bool = False,
    ) -> list[Entry]:
        """An entry per pair, in order; see `answers`. Its answer is [nats, is the greedy answer].

        The greedy answer is LLaDA's: exact decoding, one token per step, the most confident first; without
        `greedy_check` it is False. A pair with an empty part or more than `max_positions` positions fails.
        """
        return answers(
            [(self.key(pair, greedy_check), pair) for pair in pairs],
            lambda chunk: self._score(chunk, greedy_check),
            self.decoding.batch,
            self._shape,
            journal,
            "log-likelihoods" if progress else None,
        )

    def _check(self, context: tuple[int, ...], answer: tuple[int, ...]):
        limit = self.decoding.max_positions
        if not context or not answer:
            raise ValueError(f"context has {len(context)} tokens, answer {len(answer)}; both need one")
        if limit is not None and len(context) + len(answer) > limit:
            raise ValueError(
                f"context and answer take {len(context) + len(answer)} positions; max_positions={limit}"
            )

    def _shape(self, pair: Pair) -> tuple[int, int]:
        return len(pair[1]), rounded_up(len(pair[0]), self.decoding.bucket)

    def _score(self, chunk: list[tuple[str, Pair]], greedy_check: bool) -> list[Entry]:
        for _, pair in chunk:
            self._check(*pair)
        start = time.perf_counter()
        found = self._estimated(filled([pair for _, pair in chunk], self.decoding.batch), greedy_check)
        seconds = (time.perf_counter() - start) / len(chunk)
        return [
            Estimated(key=key, answer=one, error=None, forwards=forwards, computed=computed, seconds=seconds)
            if math.isfinite(one[0])
            else Entry(key=key, answer=None, error=NOT_FINITE)
            for (key, _), (one, forwards, computed) in zip(chunk, found, strict=False)
        ]

    def _estimated(self, pairs: list[Pair], greedy_check: bool) -> list[tuple[list[float | bool], int, int]]:
        """Answer, forwards and positions computed of each pair; padding is not counted."""
        model, (length, width) = self.lm.model, self._shape(pairs[0])
        prompt, mask = padded_together([context for context, _ in pairs], model.spec.eos_id, width)
        answer = np.asarray([a for _, a in pairs], np.int32)
        masks = np.stack([self.masks(pair) for pair in pairs], axis=1)
        nats = log_likelihood(
            model, prompt, answer, prompt_mask=mask, masks=masks, cfg_scale=self.cfg_scale, chunk=self.strata
        )
        passes = len(masks) * (2 if self.cfg_scale > 0 else 1)
        forwards, computed = np.full(len(pairs), passes), passes * (np.asarray(mask).sum(axis=1) + length)
        greedy = np.zeros(len(pairs), bool)
        if greedy_check:
            out = generate(model, prompt, prompt_mask=mask, length=length, nonfinite="ignore")
            greedy = (np.asarray(out.tokens)[:, width:] == answer).all(axis=1)
            forwards, computed = (
                forwards + np.asarray(out.stats.nfe),
                computed + np.asarray(out.stats.computed),
            )
        scores = map(list, zip(np.asarray(nats).tolist(), greedy.tolist(), strict=True))
        return list(zip(scores, forwards.tolist(), computed.tolist(), strict=True))

    def masks(self, pair: Pair) -> Bool[np.ndarray, "draws r"]:
        """The masks of a pair's draws; they depend on the seed and the pair only."""
        length = len(pair[1])
        if length == 1:
            return np.ones((1, 1), bool)
        text = json.dumps([self.decoding.seed, *pair])
        seed = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
        keys = jax.random.split(jax.random.key(jnp.uint32(seed)), self.draws // self.strata)
        drawn = jax.vmap(lambda key: stratified_masks(key, length, self.strata))(keys)
        return np.asarray(drawn).reshape(self.draws, length)
