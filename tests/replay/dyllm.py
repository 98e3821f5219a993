"""DyLLM's recordings: the salient rows of every layer, and the cosines by which they were found."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from typing_extensions import override

import dllm_jax as dj
from dllm_jax.nn.arithmetic import cosine
from dllm_jax.state.rows import scatter
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import State, states, trace_of


class Log(NamedTuple):
    """What the layers of one step did.

    Attributes:
      layers: Rows whose keys, values and exact attention a layer computes.
      salient: Rows whose MLP it computes.
      cosine: New attention outputs and stored ones compared.
    """

    layers: Bool[Array, "b n l"]
    salient: Bool[Array, "b n l"]
    cosine: Float[Array, "b n l"]


class Logged(dj.policies.DyLLM):
    """Tells what its layers did: `Cache.shared` becomes (the policy's own, the log)."""

    @override
    def init(self, spec, layout, batch, dtype):
        cache, nothing = (
            super().init(spec, layout, batch, dtype),
            jnp.zeros((batch, spec.layers, layout.length)),
        )
        return cache._replace(shared=(cache.shared, Log(nothing > 0, nothing > 0, nothing)))

    @override
    def before_layers(self, cache, canvas, rows):
        own, log = cache.shared
        cache = super().before_layers(cache._replace(shared=own), canvas, rows)
        return cache._replace(shared=(cache.shared, log))

    @override
    def layer(self, layer, x, cache, rows, canvas):
        given, log = cache.shared
        before = rows.take(cache.read().attention)
        x, cache = super().layer(layer, x, cache._replace(shared=given), rows, canvas)
        similarity = cosine(rows.take(cache.read().attention), before)
        similarity = scatter(jnp.zeros(given.shape), rows.index, similarity)
        found = given & rows.mask(), cache.shared, similarity
        log = Log(*(a.at[:, layer.index].set(new) for a, new in zip(log, found, strict=True)))
        return x, cache._replace(shared=(cache.shared, log))


def dyllm(case: Case):
    """Every step: tokens, rows, salient rows of every layer before and after it, cosines, and candidates."""
    s, arrays = case.settings, case.arrays
    s.only("temperature", 0.0)
    s.describes("answer")
    s["smallest_gap"].describes("cosine", "confidence")
    policy = Logged(s["saliency_threshold"], s["num_full_steps"], s["prompt_every"])
    alg = "entropy" if s.only("algorithm", "confidence", "entropy") == "entropy" else "prob"
    sampler = dj.samplers.Confidence(alg=alg)
    if s["threshold"] is not None:
        sampler = dj.samplers.Threshold(s["threshold"])
    model = case.model(eos_id=s["eos_token_id"])
    shape = dict(length=s["gen_length"], block=s["block_length"], steps=s["steps"], sampler=sampler)
    options = dict(policy=policy, widths=case.widths, trace=True) | shape
    ran = list(states(model, arrays["prompt"], **options))
    if not s["ignore_eos"]:
        ran = _until_end(ran, case, model, options)
    trace = trace_of(ran)
    exactly("tokens", trace.tokens, arrays["tokens"])
    exactly("computed", trace.computed[:, 0], arrays["computed"])
    logs = [state.cache.shared[1] for state in ran[1:]]
    layers, salient, similarity = (np.stack([log[i][0] for log in logs]) for i in range(3))
    exactly("layers", layers, arrays["layers"])
    exactly("salient", salient, arrays["salient"])
    closely("cosine", similarity, arrays["cosine"], where=np.isfinite(arrays["cosine"]))

    # Where the reference's candidate is [MASK], ours is the best other token.
    score, candidate = trace.score[:, 0], np.isfinite(arrays["confidence"])
    exactly("candidates", np.isfinite(score), candidate)
    candidate &= arrays["proposed"] != case.mask_id
    closely("confidence", score, arrays["confidence"], where=candidate)
    exactly("proposed", trace.proposed[:, 0], arrays["proposed"], where=candidate)
    if s["equals_exact_decoder"]:
        exact = dj.generate(model, arrays["prompt"], **shape)
        exactly("exact decoder", exact.tokens, arrays["tokens"][-1])


def _until_end(ran: list[State], case: Case, model: dj.Model, options: dict) -> list[State]:
    """The steps until the reference ends: it asks about the end only in steps that decode one.

    The answer up to it is ours with `stop_at_eos`, which may end in an earlier step.
    """
    recorded = case.arrays["tokens"][-1, 0]
    end = int(np.argmax(recorded[case.arrays["prompt"].shape[1] :] == model.spec.eos_id))
    answer = slice(None, case.arrays["prompt"].shape[1] + end + 1)
    out = case.generate(model, **options | {"stop_at_eos": True})
    exactly("the answer that ends early", out.tokens[0, answer], recorded[answer])
    return ran[: len(case.arrays["tokens"])]
