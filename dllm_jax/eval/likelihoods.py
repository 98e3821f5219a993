"""Log-likelihoods of many (context, answer) pairs, and whether decoding would give the answer."""

import dataclasses
import hashlib
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import rich.progress
from jaxtyping import Bool

from dllm_jax.chat import left_pad
from dllm_jax.eval.batches import batches, filled, rounded_up
from dllm_jax.eval.runner import Runner
from dllm_jax.generate import generate
from dllm_jax.likelihood import log_likelihood, stratified_masks

Pair = tuple[tuple[int, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """LLaDA's Monte-Carlo estimator over batches; a pair's masks do not depend on its batch.

    Attributes:
      runner: the model; its batch, bucket, seed and limit count, its policy and sampler do not.
      draws: see `log_likelihood`; one for answers of a single token, where it is exact.
      strata: see `log_likelihood`.
      cfg_scale: see `log_likelihood`.
    """

    runner: Runner
    draws: int = 128
    strata: int = 32
    cfg_scale: float = 0.0

    def run(
        self, pairs: Sequence[Pair], greedy_check: bool, progress: bool = False
    ) -> list[tuple[float, bool]]:
        """(nats, whether it is the greedy answer) of each pair, in order.

        Greedy is LLaDA's: one token per step, the surest first, exact decoding; False if not checked.

        Raises:
          ValueError: an empty answer or context, or a pair longer than the runner's limit.
        """
        for context, answer in pairs:
            self._check(context, answer)
        found: dict[int, tuple[float, bool]] = {}
        with rich.progress.Progress(disable=not progress, transient=True) as bar:
            task = bar.add_task("log-likelihoods", total=len(pairs))
            for chunk in batches(range(len(pairs)), self.runner.batch, lambda i: self._shape(pairs[i])):
                values = self._score([pairs[i] for i in chunk], greedy_check)
                found |= dict(zip(chunk, values, strict=True))
                bar.advance(task, len(chunk))
        return [found[i] for i in range(len(pairs))]

    def _check(self, context: tuple[int, ...], answer: tuple[int, ...]):
        limit = self.runner.max_length
        if not context or not answer:
            raise ValueError(f"context has {len(context)} tokens, answer {len(answer)}; both need one")
        if limit is not None and len(context) + len(answer) > limit:
            raise ValueError(
                f"context and answer take {len(context) + len(answer)} positions; max_length={limit}"
            )

    def _shape(self, pair: Pair) -> tuple[int, int]:
        return len(pair[1]), rounded_up(len(pair[0]), self.runner.bucket)

    def _score(self, pairs: list[Pair], greedy_check: bool) -> list[tuple[float, bool]]:
        model, (length, width) = self.runner.model, self._shape(pairs[0])
        full = filled(pairs, self.runner.batch)
        prompt, mask = left_pad([context for context, _ in full], model.spec.eos_id, width)
        answer = np.asarray([a for _, a in full], np.int32)
        masks = np.stack([self.masks(pair) for pair in full], axis=1)
        nats = log_likelihood(
            model, prompt, answer, prompt_mask=mask, masks=masks, cfg_scale=self.cfg_scale, chunk=self.strata
        )
        greedy = np.zeros(len(full), bool)
        if greedy_check:
            out = generate(model, prompt, prompt_mask=mask, length=length)
            greedy = (np.asarray(out.tokens)[:, width:] == answer).all(axis=1)
        return [(float(n), bool(g)) for n, g in zip(np.asarray(nats), greedy, strict=True)][: len(pairs)]

    def masks(self, pair: Pair) -> Bool[np.ndarray, "draws r"]:
        """The masks of a pair's draws, from the seed and the pair alone."""
        length = len(pair[1])
        if length == 1:
            return np.ones((1, 1), bool)
        text = json.dumps([self.runner.decoding.seed, *pair])
        seed = int(hashlib.sha256(text.encode()).hexdigest()[:8], 16)
        keys = jax.random.split(jax.random.key(jnp.uint32(seed)), self.draws // self.strata)
        drawn = jax.vmap(lambda key: stratified_masks(key, length, self.strata))(keys)
        return np.asarray(drawn).reshape(self.draws, length)
