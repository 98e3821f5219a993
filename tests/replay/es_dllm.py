"""ES-dLLM's recordings: the rows of every layer, and the scores by which they were chosen."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float
from typing_extensions import override

import dllm_jax as dj
from dllm_jax.policies.parts import es_dllm_rows
from dllm_jax.state.cache import KV
from dllm_jax.state.rows import scatter
from dllm_jax.state.selection import best, fraction_of, max_pool, mean_query_score
from dllm_jax.xla.reductions import count_marked
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import states, trace_of


class Log(NamedTuple):
    """What the exits of one step did.

    Attributes:
      layers: Rows that run in each layer.
      importance: Score of each row at the exit before each layer or, after the last one, the end.
      remembered: Confidences that the scores used.
      delayed: Candidates that `Sampler.delay_eos` delays.
      chosen: Positions that the block's later steps attend to in each layer, with Sparse-dLLM.
      kept: Positions that the rows of each layer attend to, with it.
    """

    layers: Bool[Array, "b n l"]
    importance: Float[Array, "b n_1 l"]
    remembered: Float[Array, "b l"]
    delayed: Bool[Array, "b l"]
    chosen: Bool[Array, "b n l"]
    kept: Bool[Array, "b n l"]


class Logged(dj.policies.ESDLLM):
    """Tells what its exits did: `Cache.shared` becomes (the policy's own, the log)."""

    @override
    def init(self, spec, layout, batch, dtype):
        cache, places = super().init(spec, layout, batch, dtype), (batch, spec.layers, layout.length)
        importance = jnp.zeros((batch, spec.layers + 1, layout.length))
        nothing = jnp.zeros(places, bool)
        log = Log(nothing, importance, importance[:, 0], nothing[:, 0], nothing, nothing)
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
        new, old = es_dllm_rows.compared(self.compare, number, layer, x, cache._replace(shared=own), rows)
        score = es_dllm_rows.importance(new, old, own.confidence, rows, canvas, self.alpha)
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
        return cache._replace(shared=(cache.shared, log._replace(delayed=delayed)))


class WithSparseDLLM(Logged):
    """The released combination: the second step of a block evicts, later ones attend to what it kept.

    Nothing is freed: the dense pairs are masked. So it is no policy of the library.
    """

    keep, kernel, delay = 0.5, 3, 1

    @override
    def _whole(self, canvas):
        return super()._whole(canvas) | (canvas.block_step == self.delay)[:, None]

    @override
    def layer(self, layer, x, cache, rows, canvas):
        q, k = layer.qk(x, rows.positions)
        cache, now = cache.update(rows, KV(k, layer.value(x)))
        own, log = cache.shared

        # The step that evicts reads everything; it scores keys by the mean query of the block.
        block = canvas.predicting_positions(canvas.block)
        outside, step = canvas.valid & ~block, canvas.block_step[:, None]
        score = mean_query_score(q, now.k, rows.take(block) & rows.real)
        count = fraction_of(count_marked(outside), self.keep, canvas.layout.length)
        chosen = block | best(max_pool(score, outside, self.kernel), count)
        chosen = jnp.where(step == self.delay, chosen, log.chosen[:, layer.index])
        kept = jnp.where(step > self.delay, chosen, canvas.valid)
        o, _ = layer.attention(q, now.k, now.v, canvas.attends(rows, kept))
        put = lambda array, new: array.at[:, layer.index].set(new)
        log = log._replace(chosen=put(log.chosen, chosen), kept=put(log.kept, kept))
        return layer.finish(x, o), cache._replace(shared=(own, log))


COMPARED = {"HiddenState": "hidden", "Key": "key", "Value": "value", "Query": "query"}


def es_dllm(case: Case):
    """Every step: tokens, rows of every layer, scores, what was remembered, candidates, and delayed ones."""
    s, arrays = case.settings, case.arrays
    s.only("temperature", 0.0)
    s.only("delay_eos", True)
    s.only("num_transfer_tokens", 1)
    s.describes("top_p", "top_k", "answer")  # greedy: filters change nothing
    s["smallest_gap"].describes("importance", "confidence")
    numbers = tuple(map(float, s["proportions"])), tuple(map(float, s["positions"]))
    compare: Any = COMPARED[s["mode"]]
    settings = s["prompt_update_freq"], s["block_update_freq"], s["alpha"], *numbers, compare
    if s["retention_ratio"] is None:
        s.describes("kernel_size", "delay_steps")
        policy = Logged(*settings)
    else:
        assert (s["retention_ratio"], s["kernel_size"], s["delay_steps"]) == (0.5, 3, 1)
        policy = WithSparseDLLM(*settings)
    sampler = dj.samplers.Confidence(delay_eos=True)
    if s["threshold"] is not None:
        sampler = dj.samplers.Threshold(s["threshold"], delay_eos=True)
    model, shape = case.model(eos_id=s["eos_token_id"]), dict(length=s["gen_length"], block=s["block_length"])
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
