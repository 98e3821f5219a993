"""The samplers' rules a second time: plain numpy, float64, one sequence at a time, loops instead of masks.

Written from the papers and from descriptions of the reference code, never from `dllm_jax.samplers`.
"""

import dataclasses
import fractions
import itertools
import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from dllm_jax import samplers

Scores = dict[int, float]  # by canvas position


# -- one position -----------------------------------------------------------------------------------


def softmax(logits: np.ndarray) -> np.ndarray:
    """Probabilities; -inf gives exactly 0."""
    logits = np.asarray(logits, np.float64)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def nucleus(logits: np.ndarray, top_p: float) -> set[int]:
    """Tokens from the most likely down, until their mass exceeds top_p; the one that crosses stays."""
    p, mass, kept = softmax(logits), 0.0, set()
    for token in np.argsort(-p, kind="stable"):
        kept.add(int(token))
        mass += p[token]
        if mass > top_p:
            break
    return kept


def survivors(logits: np.ndarray, top_p: float | None, top_k: int | None) -> set[int]:
    """The nucleus, then those of it that are at least as large as its k-th largest."""
    kept = set(range(len(logits))) if top_p is None else nucleus(logits, top_p)
    if top_k is not None and top_k < len(kept):
        kth = sorted((logits[t] for t in kept), reverse=True)[top_k - 1]
        kept = {t for t in kept if logits[t] >= kth}
    return kept


def restricted(logits: np.ndarray, kept) -> np.ndarray:
    """Logits with every token outside `kept` ruled out."""
    out = np.full(len(logits), -np.inf)
    for token in kept:
        out[token] = logits[token]
    return out


def entropy(p: np.ndarray) -> float:
    """Shannon entropy in nats."""
    return -float(sum(x * math.log(x) for x in p if x > 0))


def candidate(sampler, spec, logits: np.ndarray, gumbel=None, uniform=None) -> tuple[int, float]:
    """The token one position would get and how sure it is.

    Args:
      sampler: a sampler of the library; only its fields are read.
      spec: for the ids of mask, end-of-text and end-of-turn.
      logits: of this position, guided.
      gumbel: Gumbel noise per token, needed with temperature.
      uniform: the position's confidence under random order.
    """
    logits = np.asarray(logits, np.float64).copy()
    everything = set(range(len(logits)))
    if sampler.logits_eos_inf:
        logits[spec.eos_id] = -np.inf
    tempered = logits / sampler.temperature if sampler.temperature else logits
    kept = survivors(tempered, sampler.top_p, sampler.top_k)
    drawn = logits if gumbel is None or not sampler.temperature else logits + sampler.temperature * gumbel
    allowed = everything if sampler.allow_mask_token else everything - {spec.mask_id}
    token = int(np.argmax(restricted(drawn, (kept & allowed) or allowed)))
    if isinstance(sampler, samplers.RandomOrder):
        return token, float(uniform)
    base = tempered if isinstance(sampler, samplers.DreamSchedule) else logits
    return token, _confidence(sampler, spec, base, kept, allowed, token)


def _confidence(sampler, spec, logits, kept, allowed, token) -> float:
    alg = {"maskgit_plus": "prob", "origin": "prob", "topk_margin": "margin"}.get(
        alg := getattr(sampler, "alg", "prob"), alg
    )
    ends = {spec.eos_id, spec.eot_id}
    if sampler.confidence_eos_eot_inf:
        if token in ends:  # the least confidence there is
            return -math.log(len(logits)) if alg == "entropy" else 0.0
        kept = kept - ends
    p = softmax(restricted(logits, kept))
    if isinstance(sampler, samplers.PCSampler):
        return min(-p[token] * math.log(sampler.frequencies.values[token] + 1e-10), sampler.clip)
    if alg == "entropy":
        return -entropy(p)
    if alg == "margin":
        best, second = sorted((p[t] for t in allowed), reverse=True)[:2]
        return best - second
    return p[token]


def distribution(sampler, spec, logits: np.ndarray) -> np.ndarray:
    """Probabilities of one position after the filters, which see the temperature, and the switches."""
    logits = np.asarray(logits, np.float64)
    tempered = logits / sampler.temperature if sampler.temperature else logits
    ruled_out = {spec.eos_id} if sampler.logits_eos_inf else set()
    if sampler.confidence_eos_eot_inf:
        ruled_out |= {spec.eos_id, spec.eot_id}
    kept = survivors(tempered, sampler.top_p, sampler.top_k) - ruled_out
    return softmax(restricted(logits, kept))


# -- how many and which -----------------------------------------------------------------------------


def even_counts(masks: int, steps: int) -> list[int]:
    """Positions per step: as equal as can be, the larger shares first."""
    counts = [0] * steps
    for i in range(masks):
        counts[i % steps] += 1
    return counts


def dream_fraction(step: int, steps: int, eps: float) -> Fraction:
    """1 - s/t on the grid from 1 down to eps, exactly; all that is left at the last step."""
    if step == steps - 1:
        return Fraction(1)
    time = lambda i: 1 - (1 - Fraction(eps)) * Fraction(i, steps)
    return 1 - time(step + 1) / time(step)


def largest(scores: Scores, count: int) -> set[int]:
    """The `count` positions of highest score; among equals the leftmost."""
    return set(sorted(scores, key=lambda i: (-scores[i], i))[:count])


def at_least_one(scores: Scores, threshold: float) -> set[int]:
    """All that reach the threshold, and the surest in any case."""
    return {i for i in scores if scores[i] >= threshold} | largest(scores, 1)


def factor_count(scores, factor: float) -> int:
    """The largest n for which the n-th best confidence c has (n + 1)(1 - c) < factor; 1 if there is none."""
    ranked = sorted(scores, reverse=True)
    passing = [n for n, c in enumerate(ranked, start=1) if (n + 1) * (1 - c) < factor]
    return max(passing, default=1)


def bounded_count(scores: Scores, entropies: Scores, gamma: float) -> int:
    """The largest n whose n surest positions have entropies of sum - maximum <= gamma; at least 1."""
    ranked = [entropies[i] for i in sorted(scores, key=lambda i: (-scores[i], i))]
    passing = [n for n in range(1, len(ranked) + 1) if sum(ranked[:n]) - max(ranked[:n]) <= gamma]
    return max(passing, default=1)


def divergence(p: np.ndarray, before: np.ndarray) -> float:
    """KL(p || before) in nats, with the reference's offset."""
    return float(sum(a * (math.log(a + 1e-12) - math.log(b + 1e-12)) for a, b in zip(p, before, strict=True)))


def stable(predicted: list[np.ndarray], threshold: float, history: int) -> bool:
    """Whether each of the last `history` predictions differs little from the one before it."""
    pairs = list(zip(predicted[1:], predicted[:-1], strict=True))[-history:]
    return len(pairs) == history and all(divergence(p, before) < threshold for p, before in pairs)


def wide_in(scores: Scores, sampler) -> set[int]:
    """All that reach the threshold, the surest in any case; of too many, the best."""
    limit = min(max(math.floor(sampler.fraction * len(scores)), sampler.fewest), sampler.most)
    reached = at_least_one(scores, sampler.wide_in)
    return reached if len(reached) <= limit else largest(scores, limit)


def narrow_out(beliefs: Scores, threshold: float, decoded: int) -> set[int]:
    """The least likely of the tokens below the threshold, fewer than are newly decoded."""
    failing = sorted((belief, i) for i, belief in beliefs.items() if belief < threshold)
    return {i for _, i in failing[: max(decoded - 1, 0)]}


def density(known: np.ndarray, sigma: float) -> np.ndarray:
    """Share of known tokens around each response position, by direct summation.

    The G response positions continue on both sides by G more: all known on the left, and on the right known
    if the last response position is.
    """
    g = len(known)
    extended = dict.fromkeys(range(-g, 0), 1.0)
    extended |= {j: float(known[j]) for j in range(g)} | {j: float(known[-1]) for j in range(g, 2 * g)}
    phi = lambda d: math.exp(-d * d / (2 * sigma**2))
    total = sum(phi(d) for d in range(-3 * g, 3 * g))
    return np.array([sum(phi(i - j) * extended[j] for j in extended) / total for i in range(g)])


# -- a whole sequence -------------------------------------------------------------------------------


@dataclasses.dataclass
class Row:
    """One sequence on its way: where the block is, and how often it went through the network."""

    tokens: np.ndarray
    spec: object
    layout: object
    start: int
    step: int = 0
    block_step: int = 0
    block_masks: int = 0
    predicted: dict[int, list[np.ndarray]] = dataclasses.field(default_factory=dict)

    @property
    def masks(self) -> list[int]:
        """Undecided positions up to the end of the block."""
        end = min(self.start + self.layout.block, len(self.tokens))
        return [i for i in range(end) if self.tokens[i] == self.spec.mask_id]  # padding never holds it here


def decode(
    sampler, spec, layout, tokens: np.ndarray, logits_of: Callable[[np.ndarray, int], np.ndarray], noise=None
) -> list[np.ndarray]:
    """The sequence before the first step and after every one.

    Args:
      sampler: a sampler of the library.
      spec: the model's.
      layout: prompt, response, block and steps.
      tokens: one sequence [l].
      logits_of: (tokens, step) -> [l, v], row i predicting position i.
      noise: (token [t, l, v], order [t, l]) or None.
    """
    row, states = Row(tokens.copy(), spec, layout, layout.prompt), [tokens.copy()]
    while row.start < layout.length:
        block = row.tokens[row.start : row.start + layout.block]
        row.block_step, row.block_masks = 0, int((block == spec.mask_id).sum())
        while not _finished(sampler, row):
            logits = logits_of(row.tokens, row.step)
            found = {i: _candidate_at(sampler, row, i, logits, noise) for i in row.masks}
            order = None if noise is None else noise[1][row.step]
            beliefs = {
                int(i): distribution(sampler, spec, logits[i])
                for i in np.flatnonzero(row.tokens == spec.mask_id)
            }
            for i, belief in beliefs.items():
                row.predicted.setdefault(i, []).append(belief)
            chosen = transfer(sampler, row, {i: score for i, (_, score) in found.items()}, order, beliefs)
            for i in chosen:
                row.tokens[i] = found[i][0]
            row.step, row.block_step = row.step + 1, row.block_step + 1
            states.append(row.tokens.copy())
        row.start += layout.block
    return states


def _candidate_at(sampler, row: Row, i: int, logits: np.ndarray, noise) -> tuple[int, float]:
    if noise is None:
        return candidate(sampler, row.spec, logits[i])
    return candidate(sampler, row.spec, logits[i], noise[0][row.step, i], noise[1][row.step, i])


def _until_done(sampler) -> bool:
    several = samplers.Threshold | samplers.LocalLeap | samplers.Factor | samplers.EBSampler
    several |= samplers.KLASS | samplers.WINO
    return isinstance(sampler, several) or (
        isinstance(sampler, samplers.CertaintyPrior) and sampler.threshold is not None
    )


def _finished(sampler, row: Row) -> bool:
    until_done = _until_done(sampler) or getattr(sampler, "schedule", "even") != "even"
    return not row.masks if until_done else row.block_step >= row.layout.steps_per_block


def transfer(sampler, row: Row, scores: Scores, order=None, beliefs=None) -> set[int]:
    """Which of the scored positions are decoded in this step; `beliefs` are their distributions."""
    if isinstance(sampler, samplers.Threshold):
        return at_least_one(scores, sampler.threshold * (-1 if sampler.alg == "entropy" else 1))
    if isinstance(sampler, samplers.LocalLeap):
        anchors = [i for i in scores if scores[i] >= sampler.threshold]
        near = [i for i in scores if any(abs(i - j) <= sampler.radius for j in anchors)]
        return largest(scores, 1) | {*anchors} | {i for i in near if scores[i] >= sampler.relaxed}
    if isinstance(sampler, samplers.Factor):
        return largest(scores, factor_count(scores.values(), sampler.factor))
    if isinstance(sampler, samplers.WINO):
        return wide_in(scores, sampler)
    if isinstance(sampler, samplers.KLASS):
        sure = {i for i in scores if scores[i] >= sampler.confidence_threshold}
        settled = {i for i in sure if stable(row.predicted[i], sampler.divergence, sampler.history)}
        return settled or largest(scores, 1)
    if isinstance(sampler, samplers.EBSampler):
        entropies = {i: entropy(beliefs[i]) for i in scores}
        return largest(scores, bounded_count(scores, entropies, sampler.gamma))
    if isinstance(sampler, samplers.DreamSchedule):
        return _dream(sampler, row, scores, order)
    if isinstance(sampler, samplers.CertaintyPrior):
        prompt = row.layout.prompt
        weight = density(row.tokens[prompt:] != row.spec.mask_id, sampler.sigma)
        scores = {i: score * weight[i - prompt] for i, score in scores.items()}
        if sampler.threshold is not None:
            return at_least_one(scores, sampler.threshold)
    if isinstance(sampler, samplers.PCSampler):
        start = row.layout.prompt
        scores = {i: score * math.exp(-sampler.decay * (i - start)) for i, score in scores.items()}
    counts = {"even": even_counts, "rounded": rounded_counts, "linear": linear_counts}
    of = counts[getattr(sampler, "schedule", "even")](row.block_masks, row.layout.steps_per_block)
    return largest(scores, of[row.block_step])


def rounded_counts(masks: int, steps: int) -> list[int]:
    """Masks left / steps left, rounded half to even, without the steps that decode none."""
    counts = []
    for left in range(steps, 0, -1):
        counts.append(round(fractions.Fraction(masks, left)))
        masks -= counts[-1]
    return [n for n in counts if n]


def linear_counts(masks: int, steps: int) -> list[int]:
    """From floor(masks (steps - k) / steps) to the next k's, without the steps that decode none."""
    stay = [masks * (steps - k) // steps for k in range(steps + 1)]
    return [a - b for a, b in itertools.pairwise(stay) if a > b]


def _dream(sampler, row: Row, scores: Scores, order) -> set[int]:
    fraction = dream_fraction(row.block_step, row.layout.steps_per_block, sampler.eps)
    if sampler.alg == "origin":
        return {i for i in scores if order[i] < fraction}
    if sampler.alg_temp:
        scores = {i: score / sampler.alg_temp + order[i] for i, score in scores.items()}
    return largest(scores, math.floor(len(scores) * fraction))
