"""ES-dLLM's recordings: the rows of every layer, and the scores by which they were chosen."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from typing_extensions import override

import dllm_jax as dj
from dllm_jax.policies.es_dllm import compared, importance
from dllm_jax.state.rows import scatter
from tests.replay.case import Case
from tests.replay.compare import Skipped, closely, exactly
from tests.replay.stepping import states, trace_of


class Log(NamedTuple):
    """What the exits of one step did.

    Attributes:
      layers: Rows that run in each layer.
      importance: Score of each row at the exit before each layer or, after the last one, the end.
      remembered: Confidences that the scores used.
      delayed: Candidates that `Sampler.delay_eos` delays.
      kept: Positions that the rows of each layer attend to, with it.
    """

    layers: Bool[Array, "b n l"]
    importance: Float[Array, "b n_1 l"]
    remembered: Float[Array, "b l"]
    delayed: Bool[Array, "b l"]
    kept: Bool[Array, "b n l"]


class Logged(dj.policies.ESDLLM):
    """Tells what its exits did: `Cache.shared` becomes (the policy's own, the log)."""

    @override
    def init(self, spec, layout, batch, dtype):
        cache, places = super().init(spec, layout, batch, dtype), (batch, spec.layers, layout.length)
        importance = jnp.zeros((batch, spec.layers + 1, layout.length))
        nothing = jnp.zeros(places, bool)
        log = Log(nothing, importance, importance[:, 0], nothing[:, 0], nothing)
        return cache._replace(shared=(cache.shared, log))

    @override
    def before_layers(self, cache, canvas, rows):
        own, log = cache.shared
        cache = super().before_layers(cache._replace(shared=own), canvas, rows)
        layers = jnp.broadcast_to(rows.mask()[:, None], log.layers.shape)
        log = log._replace(layers=layers, remembered=cache.shared.confidence)
        return cache._replace(shared=(cache.shared, log))

    @override
    def _exit(self, layer, x, cache, rows, canvas):
        own, log = cache.shared
        at = canvas.spec.layers if layer is None else layer.index
        number = self._exits(canvas.spec).index(at)
        new, old = compared(self.compare, number, layer, x, cache._replace(shared=own), rows)
        score = importance(new, old, own.confidence, rows, canvas, self.alpha)
        score = scatter(jnp.full(log.remembered.shape, jnp.nan), rows.index, score)
        x, cache, rows = super()._exit(layer, x, cache._replace(shared=own), rows, canvas)
        layers = log.layers.at[:, at:].set(rows.mask()[:, None])
        log = log._replace(layers=layers, importance=log.importance.at[:, at].set(score))
        return x, cache._replace(shared=(cache.shared, log)), rows

    @override
    def observe(self, cache, canvas, rows, proposal):
        own, log = cache.shared
        cache = super().observe(cache._replace(shared=own), canvas, rows, proposal)
        delayed = jnp.zeros_like(log.delayed) if proposal.delayed is None else proposal.delayed
        log = log._replace(delayed=delayed)
        if self.evict is not None:
            later = (canvas.block_step > self.evict.delay)[:, None, None]
            log = log._replace(kept=canvas.valid[:, None] & (cache.shared.retained | ~later))
        return cache._replace(shared=(cache.shared, log))

    @override
    def reads(self, cache, canvas):
        return super().reads(cache._replace(shared=cache.shared[0]), canvas)

    @override
    def layer(self, layer, x, cache, rows, canvas):
        own, log = cache.shared
        x, cache = super().layer(layer, x, cache._replace(shared=own), rows, canvas)
        return x, cache._replace(shared=(cache.shared, log))


COMPARED = {"HiddenState": "hidden", "Key": "key", "Value": "value", "Query": "query"}


def es_dllm(case: Case):
    """Every step: tokens, rows of every layer, scores, what was remembered, candidates, and delayed ones."""
    s, arrays = case.settings, case.arrays
    s.only("temperature", 0.0)
    s.describes("top_p", "top_k", "answer")  # greedy: filters change nothing
    s["smallest_gap"].describes("importance", "confidence")
    numbers = tuple(map(float, s["proportions"])), tuple(map(float, s["positions"]))
    compare: Any = COMPARED[s["mode"]]
    settings = s["prompt_update_freq"], s["block_update_freq"], s["alpha"], *numbers, compare
    evict = None
    if s["retention_ratio"] is None:
        s.describes("kernel_size", "delay_steps")
    else:
        rule = dict(keep=s["retention_ratio"], kernel=s["kernel_size"], delay=s["delay_steps"])
        evict = dj.policies.SparseDLLM(**rule)
    policy = Logged(*settings, evict=evict)
    per_step = s["num_transfer_tokens"]
    sampler = dj.samplers.Confidence(delay_eos=s["delay_eos"])
    if s["threshold"] is not None:
        s.only("num_transfer_tokens", 1)  # the least number, which is one here
        sampler = dj.samplers.Threshold(s["threshold"], delay_eos=s["delay_eos"])
    if s["block_length"] % per_step:
        raise Skipped(f"num_transfer_tokens={per_step} does not divide the block: schedules are even here")
    model, shape = case.model(eos_id=s["eos_token_id"]), dict(length=s["gen_length"], block=s["block_length"])
    shape |= dict(steps=s["gen_length"] // per_step)
    options = dict(widths=case.widths, trace=True) | shape
    ran = list(states(model, arrays["prompt"], policy=policy, sampler=sampler, **options))
    trace = trace_of(ran)
    exactly("tokens", trace.tokens, arrays["tokens"])
    exactly("computed", trace.computed[:, 0], arrays["computed"])
    logs = [state.cache.shared[1] for state in ran[1:]]
    of_steps = {name: np.stack([getattr(log, name)[0] for log in logs]) for name in Log._fields}
    exactly("layers", of_steps["layers"], arrays["layers"])
    closely("remembered", of_steps["remembered"], arrays["remembered"])
    at = slice(1, None) if compare == "hidden" else slice(-1)
    scored = np.isfinite(arrays["importance"])
    closely("importance", of_steps["importance"][:, at], arrays["importance"], where=scored)

    # Candidates, and which of them wait for the masks in front of them.
    candidate = np.isfinite(arrays["confidence"])
    score = trace.score[:, 0]
    exactly("candidates", np.isfinite(score), candidate)
    candidate &= arrays["proposed"] != case.mask_id  # ours is the best other token
    closely("confidence", score, arrays["confidence"], where=candidate)
    exactly("proposed", trace.proposed[:, 0], arrays["proposed"], where=candidate)
    exactly("suppressed", of_steps["delayed"], arrays["suppressed"])
    if "kept" in arrays:
        exactly("kept", of_steps["kept"], arrays["kept"])
    if s["equals_exact_decoder"]:
        exact = dj.generate(model, arrays["prompt"], sampler=dj.samplers.Confidence(), **shape)
        exactly("exact decoder", exact.tokens, arrays["tokens"][-1])


METHODS = {"es-dllm": es_dllm}
