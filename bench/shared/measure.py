"""Generations to measure: a grid of them, and the request of each."""

import dataclasses
from collections.abc import Iterator
from typing import Annotated, Any

import jax
import numpy as np

import dllm_jax as dj
from bench.shared.models import policies_named
from dllm_jax.decoding.request import Request, prepare
from dllm_jax.eval.run.settings import FROM_TEXT
from dllm_jax.samplers import Sampler
from dllm_jax.samplers.parallel import UntilDone
from dllm_jax.state.sliding import Blocks


@dataclasses.dataclass(frozen=True)
class Grid:
    """Policies by prompt lengths by batches.

    Attributes:
      policies: Class names of policies, with default options. Default: all that support the model.
      prompts: Prompt lengths.
      batches: Batch sizes.
      length: Number of tokens to generate.
      block: Block length, or a sliding block, "Sliding(32)".
      steps: Number of denoising steps. Default: one per token.
    """

    policies: tuple[str, ...] = ()
    prompts: tuple[int, ...] = (1024, 4096, 16384, 32768)
    batches: tuple[int, ...] = (1, 8, 32)
    length: int = 256
    block: Annotated[Blocks, FROM_TEXT] = 32
    steps: int | None = None

    def __post_init__(self):
        policies_named(self.policies)

    def chosen(self, spec: dj.ModelSpec) -> list[dj.policies.Policy]:
        """The policies for a model."""
        return policies_named(self.policies, spec)

    @property
    def denoising_steps(self) -> int:
        """Steps of a fixed schedule."""
        return self.steps or self.length

    def shapes(self) -> Iterator[tuple[int, int]]:
        """Every prompt length with every batch."""
        yield from ((prompt, batch) for prompt in self.prompts for batch in self.batches)

    def layout(self, prompt: int) -> dj.Layout:
        """The geometry of one prompt length."""
        return dj.Layout.of(prompt, self.length, self.block, self.denoising_steps)


@dataclasses.dataclass(frozen=True)
class Run:
    """Generation to measure, from random ids; the sampler is `RandomOrder` where a policy needs the order.

    Block and steps count where the model has a mask token; a model of noise and its sampler have their own.
    So many `embedded` positions at the prompt's beginning have inputs that are no embeddings, as images.
    """

    prompt: int
    batch: int
    length: int
    block: Any  # positions, or `dj.Sliding`
    steps: int
    policy: dj.policies.Policy
    sampler: Sampler
    embedded: int = 0
    widths: tuple[int, ...] | None = None

    @property
    def chosen(self) -> Sampler:
        """The sampler that decodes."""
        return dj.samplers.RandomOrder() if isinstance(self.policy, dj.policies.DKVGreedy) else self.sampler

    @property
    def fixed_steps(self) -> bool:
        """The number of steps is known beforehand: every step decodes the same number of tokens."""
        return not isinstance(self.chosen, UntilDone)

    def request(self, model: dj.Model) -> Request:
        """The request as `dj.generate` prepares it; of the model only shapes and dtypes count."""
        sampler = self.chosen
        lowest = min(model.spec.mask_id, model.spec.eos_id, model.spec.vocab)
        tokens, embeds = np.random.default_rng(0).integers(0, lowest, (self.batch, self.prompt)), None
        if self.embedded:
            tokens[:, : self.embedded] = dj.EMBEDS_PLACEHOLDER
            embeds = np.zeros((*tokens.shape, model.spec.width), model.dtype)
        key = jax.random.key(0) if sampler.draws else None
        fixed = {"block": self.block, "steps": self.steps} if model.spec.has_mask_token else {}
        return prepare(
            model, tokens, prompt_embeds=embeds, length=self.length, policy=self.policy, sampler=sampler,
            key=key, widths=self.widths, **fixed,
        )  # fmt: skip
