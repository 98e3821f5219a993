"""Tiny random models of both families, and canvases in the middle of a run."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.nn.int8 import quantize
from dllm_jax.nn.sharding import AXES, OUTPUTS
from dllm_jax.samplers import Candidates
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.contexts import new_canvas
from dllm_jax.state.layout import Layout
from dllm_jax.testing.models import FAMILIES as KINDS
from dllm_jax.testing.models import cast as cast
from dllm_jax.testing.models import random_prompts as prompts
from dllm_jax.testing.models import random_tokens as random_tokens
from dllm_jax.testing.models import separate_layers as separate  # noqa: F401
from dllm_jax.testing.models import spec as spec
from dllm_jax.testing.models import tiny as tiny

FAMILIES = KINDS[:2]  # which most tests take

EXHAUSTIVE = hypothesis.settings.get_current_profile_name() == "exhaustive"  # by the option of that name

# Instead of a policy's widths: none is below the canvas, so programs hold the fewest kinds of steps and
# compile in about half the time. For tests of what does not depend on widths; with --exhaustive they run with
# the policy's own widths.
WIDE = None if EXHAUSTIVE else (10**6,)


def generated(
    model: dj.Model | str = "llada",
    policy: dj.policies.Policy = dj.policies.Policy(),
    lengths: tuple[int, ...] = (9, 6),
    seed: int = 0,
    **options,
) -> dj.Output:
    """A generation of left-padded prompts, with its trace and without narrow steps unless told otherwise."""
    model = tiny(model) if isinstance(model, str) else model
    prompt, mask = prompts(model, lengths, seed)
    options = dict(prompt_mask=mask, length=8, block=4, trace=True, widths=WIDE) | options
    return dj.generate(model, prompt, policy=policy, **options)


def families(every_day: str) -> pytest.MarkDecorator:
    """A test of one family every day, of all with --exhaustive."""
    return pytest.mark.parametrize("family", FAMILIES if EXHAUSTIVE else [every_day])


def frequencies(vocab: int = spec("llada").vocab) -> dj.samplers.TokenFrequencies:
    """A corpus in which the n-th token is as common as 1 / n, in a random order of tokens."""
    rank = 1 + np.random.default_rng(5).permutation(vocab)
    return dj.samplers.TokenFrequencies(1 / rank / (1 / rank).sum())


def in_int8(model: dj.Model) -> dj.Model:
    """The same model with its matrices in int8."""

    def held(path, array):
        name = path[-1].key
        if name not in OUTPUTS:
            return array
        # Every layer has channels of its own, in stacked ones too.
        stacked = "n" * (path[0].key == "layers" and not model.layers_are_separate)
        axes = stacked + AXES[name].removeprefix("n")
        return jax.tree.map(jnp.asarray, quantize(np.asarray(array), axes, stacked + OUTPUTS[name]))

    return dataclasses.replace(model, params=jax.tree_util.tree_map_with_path(held, model.params))


def candidates(score, index) -> Candidates:
    """Positions with confidences alone, as a rule that reads nothing else is given them."""
    score = jnp.asarray(score)
    token, logits = np.zeros(index.shape, np.int32), np.zeros((*score.shape, 1), np.float32)
    return Candidates(index, *jax.device_put((token, score, logits)))


begun = jax.jit(new_canvas, static_argnums=(2, 3))


def canvas(
    masked,
    prompt: int = 0,
    block: int | None = None,
    steps: int | None = None,
    family: str = "llada",
    **state,
) -> Canvas:
    """A canvas that is masked exactly where told, other fields as at the start unless given in `state`."""
    described = state.pop("spec", None) or spec(family)
    masked = np.asarray(masked, bool)
    batch, length = masked.shape
    response = length - prompt
    layout = Layout(prompt, response, block or response, steps or response, padded="valid" in state)
    tokens = np.where(masked, described.mask_id, random_tokens(described, batch, length))
    valid = np.asarray(state.pop("valid", np.ones((batch, length), bool)))
    new = begun(tokens, valid, described, layout)
    if (start := state.pop("block_start", None)) is not None:
        new = new.at_block(jnp.broadcast_to(start, batch).astype(jnp.int32))
    return dataclasses.replace(new, **jax.tree.map(jnp.asarray, state))


def members(chosen) -> list[list[int]]:
    """The positions of each sequence's set."""
    return [np.flatnonzero(row).tolist() for row in np.asarray(chosen)]
