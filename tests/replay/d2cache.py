"""d2Cache with its slips repaired: the decoding, and every set of its selection."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

import dllm_jax as dj
from dllm_jax.engine.generation import State
from dllm_jax.policies import d2cache as method
from dllm_jax.state.canvas import Canvas
from dllm_jax.state.selection import best, certainty_density
from tests.replay.case import Case
from tests.replay.compare import closely, compare_steps, exactly
from tests.replay.research import research_sampler
from tests.replay.stepping import states, trace_of


def d2cache(case: Case):
    """A run step by step, with its internals."""
    s, d = case.settings, case.settings["decoding"]
    model, policy = case.model(), _policy(case)
    # [MASK] may win, as in the reference: one case has a position that it wins for many steps.
    sampler = research_sampler(d, until_done=True)
    s.only("left_pad")
    s["cache"].only("type", "d2cache")
    s.describes("pad_id", "steps")
    options = dict(policy=policy, sampler=sampler, length=d["gen_length"], block=d["block_length"])
    options |= dict(prompt_mask=case.prompt_mask, widths=case.widths, trace=True)
    # In steps of the whole batch: what tops up one sequence depends on the others.
    ran = list(states(model, case.arrays["prompt"], **options))
    compare_steps(case, trace_of(ran), predicted="predicted", computed="recomputed")
    _compare_selection(case, policy, ran[1:])


def _policy(case: Case) -> dj.policies.D2Cache:
    """Batches are topped up, as in the reference."""
    a = case.settings["cache"]["args"]
    kind = ToppedUp if len(case.arrays["prompt"]) > 1 else dj.policies.D2Cache
    return kind(k=a["current_k"], sigma=a["sigma"], p=a["rollout_p"], inflate=a["inflate_w"])


class ToppedUp(dj.policies.D2Cache):
    """Fills all sequences of a batch up to the same number of positions, as the reference has to."""

    def select(self, cache, canvas):
        chosen, known = super().select(cache, canvas), cache.shared
        score = method.prior(known.confidence, canvas, self.sigma)
        return canvas.first_step | topped_up(chosen, known.influence, score, canvas)


def topped_up(
    chosen: Bool[Array, "b l"], influence: Float[Array, "b l"], score: Float[Array, "b l"], canvas: Canvas
) -> Bool[Array, "b l"]:
    """The reference's batches: all active sequences are filled up to the number of positions of the longest.

    Response positions come first, by their (for decoded ones, last known) score, the block's raised above
    all others; then the rest by influence. The maxima are over all sequences, as in the reference.
    """
    size = jnp.sum(chosen, axis=1)
    missing = jnp.max(jnp.where(canvas.active, size, 0)) - size
    score = jnp.where(jnp.isfinite(score), score, 0.0)
    score = score + jnp.where(canvas.block, jnp.max(score), 0.0)
    free = jnp.where(chosen, 0.0, influence)
    priority = free + jnp.where(canvas.response, jnp.max(free) + score, 0.0)
    return chosen | best(jnp.where(chosen | ~canvas.valid, -jnp.inf, priority), missing)


def _compare_selection(case: Case, policy: dj.policies.D2Cache, seen: list[State]):
    """Influence, scores and sets after every step, in sequences that go on."""
    selected = jax.jit(lambda state: _selection(policy, state))
    ours = jax.tree.map(lambda *a: np.stack(a), *[selected(state) for state in seen])
    going_on = np.stack([state.canvas.active for state in seen])[..., None]
    for name in ("influence", "sel_density", "sel_scores"):
        closely(name, ours[name], case.arrays[name], going_on)
    sets_before = "next_before_inflate", "next_before_topup"
    for name in ("sel_candidates", "masked_selected", "rollout_selected", *sets_before):
        exactly(name, ours[name], case.arrays[name], going_on)


def _selection(policy: dj.policies.D2Cache, state: State) -> dict[str, jax.Array]:
    """The policy's own functions on one state, under the names of the recording."""
    canvas, known = state.canvas, state.cache.shared
    prompt, batch = canvas.layout.prompt, canvas.tokens.shape[0]
    score = method.prior(known.confidence, canvas, policy.sigma)
    upcoming_masks = method.expected_masks(score, canvas, policy.k)
    upcoming = canvas.predicting_positions(upcoming_masks) | canvas.just_decoded
    nucleus = method.nucleus(known.influence, ~(upcoming & canvas.response), policy.p)
    index = jnp.broadcast_to(canvas.position[prompt:], (batch, canvas.layout.response))
    return dict(
        influence=known.influence,
        sel_density=certainty_density(canvas, index, policy.sigma),
        sel_scores=score[:, prompt:],
        sel_candidates=(canvas.masked & method.search_range(canvas, jnp.full(batch, policy.k)))[:, prompt:],
        masked_selected=upcoming_masks[:, prompt:],
        rollout_selected=nucleus,
        next_before_inflate=upcoming | nucleus,
        next_before_topup=method.inflated(upcoming | nucleus, policy.inflate),
    )
