"""Candidate tokens and scores of each position in one step."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class Proposal(NamedTuple):
    """Candidate token of every position, and the sampler's score of it.

    Attributes:
      token: the candidate; mask_id where nothing was computed.
      score: the sampler's confidence, float32; -inf where the position is not scored
        (`Policy.scored`) or could not be predicted in this step.
      delayed: Candidates that the step's decision counts as least sure, whatever their score
        (`Sampler.delay_eos`); None if the sampler delays none.
    """

    token: Int[Array, "b l"]
    score: Float[Array, "b l"]
    delayed: Bool[Array, "b l"] | None = None
