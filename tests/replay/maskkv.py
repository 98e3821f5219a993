"""MaskKV: votes, budgets and kept sets of one forward pass, and complete runs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from typing_extensions import override

import dllm_jax as dj
from dllm_jax import eviction
from dllm_jax.nn.layer import embed, unembed, walk
from dllm_jax.nn.mask import key_mask
from dllm_jax.nn.rope import rope_table
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.rows import full_rows
from pallas_kernels.attention.xla import attention
from pallas_kernels.topk_evict import topk_evict
from tests.models import begun
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import log_of, logged, states, trace_of

VOTERS = {
    "mask_vote": eviction.MaskVotes(),
    "prompt_vote": eviction.PromptVotes(),
    "all_vote": eviction.AllVotes(),
}


class FlooredBoundaryMiddle(eviction.BoundaryMiddle):
    """Layer budgets rounded down as the paper prints them, which loses some."""

    def budgets(self, layers, budget, prompt):
        base, extra = self.allocate(np.asarray(self.importance, np.float64), budget)
        return np.minimum(base + np.floor(extra), prompt).astype(np.int32)


class FlooredSqueezeAttention(eviction.SqueezeAttention):
    """Layer budgets rounded down."""

    def budgets(self, layers, budget, prompt):
        return np.minimum(np.floor(self.allocate(budget).astype(float)), prompt).astype(np.int32)


class FlooredPromptPreference(eviction.PromptPreference):
    """Head budgets rounded down as the paper prints them, which loses some."""

    @override
    def budgets(self, seen, budget, prompt):
        floor = jnp.floor(self.allocate(seen.preference, budget)).astype(jnp.int32)
        return jnp.minimum(floor, prompt[:, None])


FLOORED = FlooredBoundaryMiddle, FlooredPromptPreference
ROUNDING = {
    "paper": FLOORED,
    "floor": FLOORED,
    "conserve": (eviction.BoundaryMiddle, eviction.PromptPreference),
}


def _budgets(rounding: str, importance: np.ndarray, s: dict):
    """Of layers and of heads, with the settings of a case or of a point of its grid."""
    layers, heads = ROUNDING[rounding]
    return layers(tuple(importance.tolist()), s["beta"], s["first"], s["last"]), heads(s["alpha"])


def maskkv(case: Case):
    """Tokens, confidences, refreshed positions, kept sets, budgets, and the last step's logits."""
    s, arrays = case.settings, case.arrays
    prompt, model = arrays["prompt"], case.model()
    layers, heads = _budgets(s["rounding"], arrays["importance"], s)
    policy = dj.policies.MaskKV(
        prompt_every=s["prompt_refresh"], response_every=s["response_refresh"], ratio=s["transfer_ratio"],
        budget=s["budget"], layers=layers, heads=heads, reselect=s["reselect"],
    )  # fmt: skip
    shape = dict(length=s["gen_length"], block=s["block_length"], steps=s["steps"])
    begun, *run = states(model, prompt, policy=logged(policy), trace=True, widths=case.widths, **shape)
    layout = begun.canvas.layout
    exactly("tokens", np.stack([state.canvas.tokens for state in (begun, *run)]), arrays["tokens"])
    logs = [log_of(state) for state in run]
    stale = np.stack([log.stale for log in logs])
    exactly("response_rows", stale[..., layout.prompt :], arrays["response_rows"])
    exactly("refresh_prompt", stale[:, 0, 0, 0], arrays["refresh_prompt"])
    score = trace_of([begun, *run]).score[..., layout.prompt :]
    eligible = np.isfinite(arrays["confidence"]) & np.isfinite(score)
    closely("confidence", score, arrays["confidence"], where=eligible)
    for which, at in enumerate(arrays["selection_steps"]):
        kept = run[at].cache.shared[0]
        exactly("head_budget", np.swapaxes(kept.length, 0, 1), arrays["head_budget"][which])
        exactly("keep", kept_sets(kept, layout.prompt), arrays["keep"][which])
        for sequence in range(len(prompt)) if at == 0 else ():
            canvas = at_the_start(model, arrays["tokens"][0][sequence : sequence + 1], layout.prompt)
            votes, preference = look(model, canvas, policy.votes)
            closely("score", votes, arrays["score"][which, sequence])
            closely("prompt_preference", preference, arrays["prompt_preference"][which, sequence])
    step = int(arrays["logits_steps"][-1])
    logits = unembed(model.params, model.spec, logs[step].hidden)
    source = slice(layout.prompt - model.spec.shifted, layout.length - model.spec.shifted)
    closely("logits", logits[:, source], arrays["logits"][-1])


def scores(case: Case):
    """Votes, importance and preference of one pass, and what every setting of the grid makes of them."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.describes("gen_length")
    canvas = at_the_start(model, arrays["input_ids"], s["prompt_length"])
    for name, voter in VOTERS.items():
        votes, preference = look(model, canvas, voter)
        closely(name, votes, arrays[name])
        even = functools.partial(keep, eviction.UniformLayers(), eviction.EvenHeads(), votes, preference)
        uniform = [even(budget)[2] for budget in s["uniform_budgets"]]
        exactly(f"uniform {name}", uniform, arrays[f"keep_uniform_{name}"])
    quarters = [look(model, canvas, eviction.PositionVotes(quarter))[0] for quarter in range(4)]
    closely("position_votes", quarters, arrays["position_votes"])
    votes, preference = look(model, canvas, eviction.MaskVotes())
    closely("prompt_preference", preference, arrays["prompt_preference"])
    closely("importance", profile(model, canvas, canvas.valid), arrays["importance"])
    closely("of the prompt", profile(model, canvas, canvas.prompt), arrays["importance_prompt_tokens"])
    offline = arrays["calibration_importance"].astype(np.float64).mean(axis=0)
    for when, importance in (("offline", offline), ("online", arrays["importance"])):
        for rounding in ("paper", "conserve"):
            made = lambda g, how=rounding, of=importance: (*_budgets(how, of, g), votes, preference)
            ours = zip(*(keep(*made(g), g["budget"]) for g in s["grid"]), strict=True)
            for kind, values in zip(("layer_budget", "head_budget", "keep"), ours, strict=True):
                name = f"{kind}_{rounding}_{when}"
                exactly(name, np.stack(values), arrays[name])


def baselines(case: Case):
    """SnapKV votes, and PyramidKV, SqueezeAttention and Ada-KV budgets over both kinds of votes."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.describes("gen_length")
    canvas = at_the_start(model, arrays["input_ids"], s["prompt_length"])
    snap = eviction.SnapKV(s["window"], s["kernel"])
    votes = {"snapkv": look(model, canvas, snap)[0], "mask": look(model, canvas, eviction.MaskVotes())[0]}
    closely("snapkv_scores", votes["snapkv"], arrays["snapkv_scores"])
    closely("mask_vote", votes["mask"], arrays["mask_vote"])
    among = {"prompt": canvas.prompt, "all": canvas.valid}
    cosine = {name: 1 - profile(model, canvas, positions) for name, positions in among.items()}
    for name in among:
        closely(f"cosine of {name}", cosine[name], arrays[f"layer_cosine_{name}_tokens"])
    n, p, budgets = model.spec.layers, s["prompt_length"], s["budgets"]
    for name, tokens in cosine.items():
        squeeze = eviction.SqueezeAttention(tuple(tokens.tolist()), s["squeeze_share"])
        exactly("squeeze groups", squeeze.groups(), arrays[f"squeeze_groups_{name}"])
        floored = FlooredSqueezeAttention(squeeze.cosine, squeeze.share)
        for rounding, made in (("floor", floored), ("conserve", squeeze)):
            ours = [made.budgets(n, b, p) for b in budgets]
            exactly(f"squeeze {rounding}", ours, arrays[f"squeeze_budget_{rounding}_{name}"])
    for name, outside in (("pyramid_kvpress", False), ("pyramid_window_outside", True)):
        ours = [[pyramid(s, beta, outside).budgets(n, b, p) for beta in s["pyramid_betas"]] for b in budgets]
        exactly(name, ours, arrays[name])
    squeeze = eviction.SqueezeAttention(tuple(cosine["prompt"].tolist()), s["squeeze_share"])
    even, uniform = eviction.EvenHeads(), eviction.UniformLayers()
    for name, given in votes.items():
        run = lambda layers, heads, b, given=given: keep(layers, heads, given, np.ones(given.shape[:2]), b)
        exactly("uniform", [run(uniform, even, b)[2] for b in budgets], arrays[f"keep_{name}_uniform"])
        exactly("squeeze", [run(squeeze, even, b)[2] for b in budgets], arrays[f"keep_{name}_squeeze"])
        pyramids = [[run(pyramid(s, beta), even, b)[2] for beta in s["pyramid_betas"]] for b in budgets]
        exactly("pyramid", pyramids, arrays[f"keep_{name}_pyramid"])
        ada = [run(uniform, eviction.AdaKV(s["adakv_floor"]), b) for b in budgets]
        exactly("adakv", [kept for _, _, kept in ada], arrays[f"keep_{name}_adakv"])
        exactly("adakv budgets", [count for _, count, _ in ada], arrays[f"adakv_head_budget_{name}"])


def pyramid(s: dict, beta: int, outside: bool = False) -> eviction.PyramidKV:
    """The case's pyramid."""
    return eviction.PyramidKV(beta, s["window"], outside)


def at_the_start(model: dj.Model, tokens: np.ndarray, prompt: int) -> Canvas:
    """A canvas over the recorded tokens."""
    batch, length = tokens.shape
    layout = dj.Layout(prompt, length - prompt, length - prompt, length - prompt)
    return begun(tokens, np.ones((batch, length), bool), model.spec, layout)


@functools.partial(jax.jit, static_argnames="voter")
def _look(model: dj.Model, canvas: Canvas, voter):
    spec, length, p = model.spec, canvas.layout.length, canvas.layout.prompt
    batch = canvas.tokens.shape[0]
    rows, mask = full_rows(canvas.everything), key_mask(canvas.valid)

    def run(layer, carry):
        x, votes, preference = carry
        q, k = layer.qk(x, rows.index)
        o, lse = attention(q, k, layer.value(x), mask)
        seen, prefers = eviction.evidence(voter, layer, q, k, lse, mask, rows, canvas)
        return layer.finish(x, o), votes.at[layer.index].set(seen), preference.at[layer.index].set(prefers)

    heads = (spec.layers, batch, spec.kv_heads)
    start = embed(model.params, canvas.tokens), jnp.zeros((*heads, p)), jnp.zeros(heads)
    return walk(model.params, spec, rope_table(length, spec.head_dim, spec.rope_base), run, start)[1:]


def look(model: dj.Model, canvas: Canvas, voter) -> tuple[np.ndarray, np.ndarray]:
    """Votes [n k p] and preference [n k] of an uncached pass over one sequence."""
    return tuple(np.asarray(a)[:, 0] for a in _look(model, canvas, voter))


def profile(model: dj.Model, canvas: Canvas, among) -> np.ndarray:
    """Importance of each layer in this pass."""
    x = embed(model.params, canvas.tokens)
    return np.asarray(eviction.importance(model, x, among, canvas.valid), np.float64)[:, 0]


def keep(layers, heads, votes: np.ndarray, preference: np.ndarray, budget: int):
    """Layer budgets [n], head budgets [n k] and kept sets [n k p]; the layers stand for a batch."""
    n, _, p = votes.shape
    each = layers.budgets(n, budget, p)
    given = votes, preference.astype(np.float32), np.asarray(each, np.int32), np.full(n, p, np.int32)
    positions = np.asarray(_positions(heads, *given))
    kept = np.any(positions[..., None] == np.arange(p), axis=2)
    return each, kept.sum(-1), kept


@functools.partial(jax.jit, static_argnums=0)
def _positions(heads, votes, preference, budget, prompt):
    """The kept positions of each head, most voted for first."""
    count = heads.budgets(eviction.Evidence(votes, preference), budget, prompt)
    return topk_evict(votes, count, votes.shape[-1])


def kept_sets(kept, prompt: int) -> np.ndarray:
    """The kept positions of every sequence, layer and head, as sets."""
    layers, batch, heads = kept.length.shape
    sets = np.zeros((batch, layers, heads, prompt), bool)
    for layer, sequence, head in np.ndindex(layers, batch, heads):
        start, length = int(kept.start[layer, sequence, head]), int(kept.length[layer, sequence, head])
        sets[sequence, layer, head, np.asarray(kept.position)[sequence, start : start + length]] = True
    return sets
