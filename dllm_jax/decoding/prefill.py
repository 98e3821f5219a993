"""`prefill`: computes what several prompts begin with once, for block-causal models."""

import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dllm_jax.decoding.buckets import Ladder, check_ladder
from dllm_jax.decoding.options import RequestOptions
from dllm_jax.engine.features.prefix import (
    Prefix,
    StoredPrefix,
    compute_prefix,
    empty,
    model_refusal,
    reads_causally,
    refusal,
    resized,
)
from dllm_jax.interrupts import uninterrupted
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument
from dllm_jax.state import host, inputs
from dllm_jax.state.inputs import Prompts


def prefill(
    model: Model,
    prompt: inputs.Ids,
    *,
    prefix: Prefix | None = None,
    causal: bool = False,
    buckets: Ladder | None = None,
) -> Prefix:
    """Computes the keys and values of a text that several prompts begin with.

        prefix = dj.prefill(model, examples)
        out = dj.generate(model, question, prefix=prefix)  # tokens of generate(model, examples + question)

    Models with blocks only: their finished blocks attend to nothing after them. Where every position attends
    to all others, as in LLaDA and Dream, keys and values change with what follows.

    Args:
      model: Model returned by `load`. A prefix serves the weights that computed it, and no others.
      prompt: Token ids of one sequence.
      prefix: Earlier prefix; the whole blocks that `prompt` shares with its tokens are not computed again.
        The next turn of a chat begins with the last one.
      causal: Whether each token attends only to itself and those before it, as `Autoregressive` and
        `S2D2(causal_storage=True)` read prompts. In a causal context (Nemotron-Labs-Diffusion) each does.
      buckets: Bucket lengths to which the storage is padded, so that prefixes of all lengths share few
        programs. Default: a program per length.

    Raises:
      ValueError: The model has no blocks, counts them from the response and its tokens do not attend
        causally, has no mask token, lies on a mesh or is traced; or an argument breaks a rule.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    causal = check_argument("causal", causal, bool) or model.spec.context.has_causal_passes
    if (reason := model_refusal(model, causal)) is not None:
        raise ValueError(reason)
    if prefix is not None:
        check_prefix(prefix, model, causal)
    if buckets is not None:
        check_ladder("buckets", buckets)
    ids, padding = inputs.padded_ids(prompt, None, model.spec, "prompt")
    if host.stays_on_devices(ids) or len(ids) != 1 or padding is not None:
        raise ValueError(f"prompt has shape {ids.shape}: a prefix is one sequence of known tokens")
    inputs.no_masks(ids, model.spec)
    # Attention by token is that of blocks of one.
    runs = model.replace_spec(block_size=1) if causal else model
    tokens, size = tuple(ids[0].tolist()), runs.spec.context.size
    end = len(tokens) // size * size
    start = 0 if prefix is None else min(common(tokens, prefix.tokens), end) // size * size

    # Room for whole blocks; of a bucket length it is known that the next shorter one was too short.
    slots, least, width = end, end, end - start
    if buckets is not None:
        rungs = (0, *buckets.rungs)
        slots, width = buckets.fit(max(end, 1)), buckets.fit(max(width, 1))
        least = rungs[rungs.index(slots) - 1]
    slots = max(slots, 1)
    kv = empty(model, slots) if prefix is None or not start else resized(prefix.stored.kv, slots)
    if end > start:
        new = np.zeros((1, width), np.int32)
        new[0, : end - start] = tokens[start:end]
        with uninterrupted():
            kv = compute_prefix(runs, kv, jnp.asarray(new), np.int32(start), np.int32(end), not start)
    stored = StoredPrefix(kv, jnp.asarray(end, jnp.int32), least, causal)
    weights = jax.tree.map(weakref.ref, model.params)
    return Prefix(tokens, end - start, stored, model.spec, weights)


def common(ids: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Number of tokens with which both begin."""
    pairs = zip(ids, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(ids), len(other)))


def check_prefix(prefix: Any, model: Model, causal: bool):
    """Raises ValueError for what is no prefix, or one of another model or attention."""
    check_argument("prefix", prefix, Prefix, ", which dj.prefill returns")
    stored = jax.tree.leaves(prefix.stored.kv)[0]
    form = isinstance(prefix.stored.kv, list) == model.layers_are_separate
    if prefix.spec != model.spec or stored.dtype != model.dtype or not form:
        raise ValueError(
            "prefix was computed by another model: its keys and values fit the weights that made them"
        )
    if not prefix.is_of(model):
        raise ValueError(
            "prefix was computed by other arrays than the model has now: training, adapters or another load "
            "change its keys and values. Call prefill again"
        )
    if prefix.stored.causal != causal:
        raise ValueError(
            f"prefix was computed with causal={not causal}, but its tokens attend to "
            f"{'those in front of them alone' if causal else 'all of their block'} here. "
            f"Use prefill(.., causal={causal})"
        )


def with_prefix(prefix: Prefix, asked: RequestOptions, prompts: Prompts, model: Model) -> Prompts:
    """The prompts with a prefix in front of each.

    Raises:
      ValueError: an option that a prefix does not go with, a prefix of another model or attention, or prompts
        that are not known.
    """
    if (reason := refusal(model, asked.policy, asked.sampler)) is not None:
        raise ValueError(reason)
    check_prefix(prefix, model, reads_causally(model.spec, asked.sampler))
    for name, given, reason in (
        ("interventions", len(asked.interventions), "the prefix was computed without them"),
        ("prompt_embeds", prompts.embeds is not None, "its inputs are token ids"),
    ):
        if given:
            raise ValueError(f"{name}= is not supported with prefix=: {reason}. Pass the whole prompt")
    ids = prompts.ids
    mask = np.ones(ids.shape, bool) if prompts.mask is None else prompts.mask
    if host.stays_on_devices(ids) or host.stays_on_devices(mask):
        raise ValueError("prompt is traced or global, which is not supported with prefix=")
    rows = [[*prefix.tokens, *row[real].tolist()] for row, real in zip(ids, mask.astype(bool), strict=True)]
    padded, valid = inputs.padded_together(rows, model.spec.eos_id)
    return Prompts(padded.astype(np.int32), None if valid.all() else valid, None)
