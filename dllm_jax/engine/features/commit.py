"""Early commitment (Prophet): a run that unmasks everything once its answer is settled."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from typing_extensions import override

from dllm_jax.engine.generation import Feature, Generation, Plan, Seen
from dllm_jax.samplers.candidates import Decision
from dllm_jax.samplers.early_commit import EarlyCommit
from dllm_jax.state.canvas import Canvas, end


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EarlyCommitment(Feature):
    """Unmasks all masks, and ends the sequence, in the step in which the sampler's rule says so."""

    name: ClassVar[str] = "commit"
    scores_response: ClassVar[bool] = True
    reads_tokens: ClassVar[bool] = True

    @override
    def scored(self, plan: Plan, canvas: Canvas) -> Bool[Array, "b l"]:
        """The positions whose gaps count."""
        return early_commit_of(plan).asked(canvas)

    @override
    def find(self, generation: Generation, canvas: Canvas, seen: Seen) -> Bool[Array, "b"]:
        """Sequences that commit to all of their masks now."""
        index = seen.candidates.index
        commits = early_commit_of(generation.plan).commits(seen.logits, index, canvas) & seen.finite
        return commits & ~jnp.any(seen.waits & seen.candidate & ~seen.holds_token, axis=1)

    @override
    def after_decision(
        self, decision: Decision, score: Float[Array, "b c"], finding: Bool[Array, "b"]
    ) -> Decision:
        """The decision, in which sequences that commit unmask everything, and revise nothing more."""
        commits = finding[:, None]
        revoked = jax.tree.map(lambda revoked: revoked & ~commits, decision.revoked)
        keeps_block = jax.tree.map(lambda stays: stays & ~finding, decision.keeps_block)
        chosen = decision.chosen | (commits & (score > -jnp.inf))
        return decision._replace(chosen=chosen, revoked=revoked, keeps_block=keeps_block)

    @override
    def after_writing(self, canvas: Canvas, finding: Bool[Array, "b"]) -> Canvas:
        """Ends the sequences that commit."""
        return end(canvas, finding)


def early_commit_of(plan: Plan) -> EarlyCommit:
    """Returns the rule of a plan whose sampler has one."""
    assert plan.sampler.early_commit is not None
    return plan.sampler.early_commit
