"""Block-causal models and mixtures of experts: single passes with every decision of a router, generations."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.nn.arithmetic import rms_norm
from dllm_jax.nn.layer import Layer, embed, walk
from dllm_jax.nn.mlp import route
from dllm_jax.nn.model import full_pass
from dllm_jax.nn.parameters import separate
from pallas_kernels.attention.xla import attention
from tests.replay.case import Case
from tests.replay.compare import closely, exactly

BLOCK_CAUSAL = ("sdar", "sdar-moe", "fast-dllm-v2", "llada2", "dream-reasoner", "stable-diffcoder")
FORWARD = [f"{name}-forward" for name in ("llada-moe", "illada", *BLOCK_CAUSAL)]
GENERATE = [f"{name}-generate" for name in BLOCK_CAUSAL]
SETTINGS = "moe_layers", "routing_margin", "rows_where_groups_change_the_choice"  # how a recording came out


def forward(case: Case):
    """Logits, the residual stream, and each token's experts with their weights."""
    arrays, block = case.arrays, case.settings.get("block_length", 0)
    case.settings.describes(*SETTINGS)
    model, ids = case.model(block_size=block), jnp.asarray(arrays["ids"])
    real = np.asarray(arrays.get("attention_mask", np.ones_like(arrays["ids"])), bool)
    valid = None if real.all() else jnp.asarray(real)
    relatively("logits", dj.forward(model, ids, valid), arrays["logits"], real[..., None])
    if "hidden" in arrays:
        *states, last = dj.hidden_states(model, ids, valid)
        normed = rms_norm(last, model.params["norm"], model.spec.norm_eps)
        relatively("hidden", np.stack([*states, normed]), arrays["hidden"], real[None, ..., None])
    if model.spec.experts is not None:
        _compare_routes(routes(model, ids), *_recorded_routes(case, model.spec.experts))


def relatively(name: str, ours, recorded, where=None):
    """To 1e-4 of the largest magnitude."""
    scale = np.abs(recorded).max()
    closely(name, np.asarray(ours) / scale, recorded / scale, where)


@jax.jit
def routes(model: dj.Model, ids: Int[Array, "b l"]) -> tuple[Int[Array, "n t c"], Float[Array, "n t c"]]:
    """Experts and weights of every token, in each of the layers that have some."""
    (position, mask, rope), found = full_pass(model.spec, ids, None), []

    def run(layer: Layer, x):
        q, k = layer.qk(x, position)
        o, _ = attention(q, k, layer.value(x), mask)
        if model.spec.has_experts(layer.index):
            normed = rms_norm(x + layer.out(o), layer.weights["mlp_norm"], model.spec.norm_eps)
            found.append(route(layer.weights, normed.reshape(-1, x.shape[-1]), model.spec.experts))
        return layer.finish(x, o)

    walk(separate(model.params), model.spec, rope, run, embed(model.params, ids))
    return jax.tree.map(lambda *layers: jnp.stack(layers), *found)


def _recorded_routes(case: Case, experts) -> tuple[np.ndarray, np.ndarray]:
    """As recorded; of SDAR-MoE, whose router's logits were, what its router makes of them."""
    if "experts" in case.arrays:
        return case.arrays["experts"], case.arrays["weights"]
    logits = case.arrays["router_logits"].astype(np.float64)
    score = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    chosen = np.argsort(-score, axis=-1)[..., : experts.per_token]
    weight = np.take_along_axis(score, chosen, axis=-1)
    return chosen, weight / weight.sum(axis=-1, keepdims=True) if experts.renormalized else weight


def _compare_routes(ours, chosen: np.ndarray, weight: np.ndarray):
    """The same experts as sets, and each one's weight."""

    def by_expert(chosen, weight):
        chosen, weight = (np.asarray(a).reshape(*ours[0].shape) for a in (chosen, weight))
        order = np.argsort(chosen, axis=-1)
        return (np.take_along_axis(a, order, axis=-1) for a in (chosen, weight))

    (found, with_weight), (wanted, recorded) = by_expert(*ours), by_expert(chosen, weight)
    exactly("experts", found, wanted)
    closely("weights of experts", with_weight, recorded, tolerance=1e-5)


def llada_moe(case: Case):
    """LLaDA's sampler over LLaDA-MoE: every step, and the last one's logits."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.only("temperature", 0.0)
    s.describes("tokens_per_step", "forwards", "robustness", "rows")
    shape = dict(length=s["gen_length"], block=s["block_length"], steps=s["steps"])
    trace = case.generate(model, sampler=_of_llada(s), **shape).trace
    exactly("tokens", trace.tokens, arrays["tokens"])
    score, proposed = (np.asarray(a)[:, 0] for a in (trace.score, trace.proposed))
    scored = np.isfinite(score)
    closely("confidence", score, arrays["confidence"], where=scored)
    exactly("proposed", proposed, arrays["proposed"], where=scored)
    logits = dj.forward(model, jnp.asarray(arrays["tokens"][-2]))[0]
    scale = max(1, np.abs(arrays["last_logits"]).max())
    closely("last logits", np.asarray(logits) / scale, arrays["last_logits"] / scale)


def generate(case: Case):
    """Every denoising step of a block-causal model; passes that only store are fused with one of ours."""
    s, arrays, recorded = case.settings, case.arrays, case.arrays["tokens"]
    prompt = arrays["prompt"].shape[1]
    size = s.get("block_size", s.get("block_length"))
    ends = s.get("eos_id", s.get("stop_token"))
    s.only("temperature", 0.0)
    s.describes("eos_early_stop", "block_cache_renewed", "gen_length", "max_new_tokens")
    s.describes("stop_ids", "forwards", "edits", "robustness")
    model = case.model(block_size=size, **({} if ends is None else {"eos_id": ends}))

    # As many positions as the recorded canvas, whose last block is whole; a stop cuts the recording off.
    options = dict(block=s.get("small_block_size", size), length=recorded.shape[2] - prompt)
    sampler, steps = _sampler(s, options["length"], size)
    policy = policies.SubBlockCache() if s.get("use_block_cache") else policies.Policy()
    trace = case.generate(model, policy=policy, sampler=sampler, steps=steps, **options).trace
    tokens, score, proposed = (np.asarray(a)[:, 0] for a in (trace.tokens, trace.score, trace.proposed))

    # The first token of a block, predicted by the one before it, takes a step of ours; its token is recorded.
    begins = lambda before, after: (np.flatnonzero(before != after) % size == 0).all()
    opens = [model.spec.shifted and begins(*pair) for pair in itertools.pairwise(tokens)]
    denoises = np.flatnonzero(~np.asarray(opens))[: len(recorded) - 1]
    exactly("tokens", tokens[denoises], recorded[:-1, 0])
    answer = s.get("answer", recorded[-1, 0, prompt:].tolist())
    end = slice(prompt, prompt + len(answer))
    last = denoises[-1] + 1
    last += last < len(opens) and opens[last]
    exactly("last tokens", tokens[last, end], recorded[-1, 0, end])
    exactly("answer", recorded[-1, 0, end], answer)

    # Confidences at the rows of each forward, of those that are masks.
    row = arrays["rows"][:, :1] + np.arange(arrays["confidence"].shape[1])
    places = np.minimum(row, recorded.shape[2] - 1)
    ours, token = (np.take_along_axis(array[denoises], places, axis=1) for array in (score, proposed))
    scored = np.isfinite(ours) & np.isfinite(arrays["confidence"])
    closely("confidence", ours, arrays["confidence"], where=scored)
    exactly("proposed", token, arrays["proposed"], where=scored)
    if ends in answer:
        compare_stopped(case, model, policy, sampler, steps, options, answer[: answer.index(ends) + 1])


def _sampler(s, length: int, size: int) -> tuple[samplers.Sampler, int | None]:
    """What decodes as recorded, and denoising steps in all; None where the sampler ignores them."""
    blocks = -(-length // size)
    if "small_block_size" in s:
        return samplers.Threshold(s["threshold"]), None
    if "remasking" in s:  # Stable-DiffCoder, whose steps are totals
        return _of_llada(s), s["steps"]
    if s.get("version") == "2.1":
        limits = {"most_steps": s["max_post_steps"]} if "max_post_steps" in s else {}
        limits |= {"at_least": s["num_to_transfer"]} if "num_to_transfer" in s else {}
        s.describes("steps")
        return samplers.Edit(s["threshold"], s["editing_threshold"], **limits), None
    if s.get("version") == "2.0":
        per_block = min(s["steps"], s["gen_length"] // s.get("minimal_topk", 1), size)
        return samplers.Dynamic(s["threshold"]), per_block * blocks
    kind, per_block = s["remasking_strategy"], s["denoising_steps"]
    sampler = {
        "low_confidence_dynamic": lambda: samplers.Dynamic(s["confidence_threshold"]),
        "low_confidence_static": lambda: samplers.Dynamic(1.0),
        "sequential": samplers.Sequential,
    }[kind]()
    s.describes("confidence_threshold")
    return sampler, per_block * blocks


def _of_llada(s) -> samplers.Sampler:
    """LLaDA's fixed schedule, or a threshold."""
    s.only("remasking", "low_confidence")
    threshold = s.get("threshold")
    return samplers.Confidence() if threshold is None else samplers.Threshold(threshold)


def illada_var(case: Case):
    """iLLaDA's variable length: a block of masks after another, each by a call of its own."""
    s, arrays, size = case.settings, case.arrays, case.settings["block_length"]
    s.only("temperature", 0.0)
    s.describes("gen_length", "stop_ids", "tokens_per_step", "forwards", "robustness")
    prompt, tokens, logits = arrays["prompt"], arrays["tokens"], arrays["last_logits"]
    model, last = case.model(), None
    # In one call: later blocks leave the network's input, and are masks on the canvas.
    whole = dict(policy=policies.SuffixDropout(policies.Policy(), policies.NearAndLast(0, 0)), block=size)
    whole |= dict(length=tokens.shape[2] - prompt.shape[1], steps=len(tokens) - 1, sampler=_of_llada(s))
    exactly("tokens in one call", case.generate(model, **whole).trace.tokens, tokens)
    for begin in range(prompt.shape[1], tokens.shape[2], size):
        canvas, steps = slice(0, begin + size), np.flatnonzero(arrays["rows"][:, 1] == begin + size)
        out = dj.generate(
            model, prompt, length=size, steps=s["steps_per_block"], sampler=_of_llada(s), trace=True
        )
        recorded = tokens[[*steps, steps[-1] + 1]]
        exactly("tokens", out.trace.tokens, recorded[..., canvas])
        score, proposed = (np.asarray(a)[:, 0] for a in (out.trace.score, out.trace.proposed))
        scored = np.isfinite(score)
        closely("confidence", score, arrays["confidence"][steps, canvas], where=scored)
        exactly("proposed", proposed, arrays["proposed"][steps, canvas], where=scored)
        last, prompt = recorded[-2, :, canvas], np.asarray(out.tokens)
    scale = max(1, np.abs(logits).max())
    ours = dj.forward(model, jnp.asarray(last))[0, -len(logits) :]
    closely("last logits", np.asarray(ours) / scale, logits / scale)


def compare_stopped(case: Case, model: dj.Model, policy, sampler, steps, options, answer: list[int]):
    """The answer of a run that stops at its end-of-text."""
    shape = options | dict(policy=policy, sampler=sampler, steps=steps, stop_at_eos=True)
    out = dj.generate(model, case.arrays["prompt"], **shape)
    prompt = case.arrays["prompt"].shape[1]
    exactly("stopped answer", out.tokens[0, prompt : prompt + len(answer)], answer)
