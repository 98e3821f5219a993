"""The slots of a running generation: sequences enter and leave them between steps, and the others go on.

What a slot holds is one sequence's part of every array of the loop's state. A sequence that enters overwrites
all of it: canvas, cache, what the sampler remembers, random keys, statistics and trace.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, Shaped

from dllm_jax.decoding.output import Output
from dllm_jax.decoding.placement import collect, not_split, place, runs_on, with_auto_axes
from dllm_jax.decoding.request import Request, repeated
from dllm_jax.engine.beginning import initial_state, split_cache
from dllm_jax.engine.features.trace import Trace
from dllm_jax.engine.generation import Generation, Inputs, Plan, State
from dllm_jax.engine.group import (
    axes_of_sequences,
    full_step_batch,
    gather_sequences,
    map_arrays,
    scatter_sequences,
    stream_index,
)
from dllm_jax.engine.loop import final_outputs
from dllm_jax.engine.pieces import Piece, run_piece
from dllm_jax.nn.mesh import constrain, over_mesh
from dllm_jax.nn.model import Model
from dllm_jax.state import host
from dllm_jax.state.cache import Cache

NOTHING = Cache((), (), None)  # instead of a cache that is not looked at


class Slots:
    """Sequences of one shape and plan in the slots of one generation, which runs until one of them ends."""

    def __init__(self, model: Model, request: Request, count: int):
        """Slots without sequences.

        Args:
          model: the model.
          request: one of those that will enter; all have its shapes and its plan.
          count: Number of slots; a mesh that splits the batch may need some more.
        """
        self._run = with_auto_axes(place(model, repeated(request, count)))
        self._inputs = self._run.inputs
        self._state: State | None = None
        self._seen: Piece | None = None  # once the steps under way are done
        self.count, self.prompt = len(self._inputs.tokens), self._run.plan.layout.prompt

    def enter(self, slot: int, request: Request):
        """Puts a sequence into a slot."""
        model, plan, mesh = self._run.model, self._run.plan, self._run.mesh
        new, where = not_split(model, mesh, (request.inputs, np.asarray([slot], np.int32)))
        with runs_on(self._run):
            if self._state is None:
                self._state = vacant(model, self._inputs, plan)
            self._inputs, self._state = enter(model, self._inputs, plan, self._state, new, where)

    def run(self):
        """Has steps run until a sequence has ended; returns at once, while the devices work."""
        assert self._state is not None, "enter"
        model, plan = self._run.model, self._run.plan
        with runs_on(self._run):
            self._state, self._seen = until_one_ends(model, self._inputs, plan, self._state)

    def ended(self) -> Piece | None:
        """Waits for the running steps and returns their results on the host; None if nothing ran."""
        if self._seen is None:
            return None
        seen, self._seen = jax.tree.map(host.everywhere, self._seen), None
        return seen

    def output(self, slot: int, request: Request, seen: Piece) -> Output:
        """The output of a sequence that has ended, in arrays on the host."""
        row = lambda array: array[slot : slot + 1]
        tokens, stats, logprobs = jax.tree.map(row, (seen.tokens, seen.stats, seen.logprobs))
        trace = None
        if "trace" in self._run.plan.by_name:
            assert self._state is not None, "enter"
            model, plan = self._run.model, self._run.plan
            where = not_split(model, self._run.mesh, np.asarray([slot], np.int32))
            with runs_on(self._run):
                trace = jax.tree.map(host.everywhere, traced(model, plan, self._state, where))
        placed = self._run._replace(batch=1, extra=request.extra)
        return collect(placed, tokens, stats, trace, logprobs)

    def program(self) -> jax.stages.Compiled:
        """The program of the steps."""
        model, plan = self._run.model, self._run.plan
        return until_one_ends.lower(model, self._inputs, plan, self._state).compile()

    @property
    def at_once(self) -> int:
        """How many sequences a step runs: those of all slots, or a group where every step is a full one."""
        plan = self._run.plan
        return self.count if plan.widths else full_step_batch(plan, self.count)

    @property
    def lost(self) -> bool:
        """Whether a program was interrupted that had taken the state, and gave none back."""
        return any(array.is_deleted() for array in jax.tree.leaves((self._inputs, self._state)))


# -- programs ------------------------------------------------------------------------------------------


@jax.jit
def vacant(model: Model, inputs: Inputs, plan: Plan) -> State:
    """Slots for as many sequences as there are inputs: all are done, and everything they hold is zero."""

    def slots(model: Model, inputs: Inputs, plan: Plan) -> State:
        def zeros(copies: int, axis: int, array: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
            shape = list(array.shape)
            shape[axis] *= len(inputs.tokens)
            return jnp.zeros(shape, array.dtype)

        # A single sequence says how large everything is; nothing of it is computed.
        single = jax.tree.map(lambda array: array[:1], inputs)
        fresh = initial_state(Generation.of(model, single, plan), single)
        state = map_arrays(zeros, plan, _axes(model, inputs, plan), fresh)
        canvas = dataclasses.replace(state.canvas, done=jnp.ones_like(state.canvas.done))
        return _split(model, plan, state._replace(canvas=canvas))

    return over_mesh(slots, model, inputs, plan, out=None)


@functools.partial(jax.jit, donate_argnames=("inputs", "state"))
def enter(
    model: Model, inputs: Inputs, plan: Plan, state: State, new: Inputs, slot: Int[Array, "1"]
) -> tuple[Inputs, State]:
    """Inputs and state of all slots, of which one holds a new sequence and nothing else.

    Args:
      model: the model.
      inputs: Inputs of all slots, donated.
      plan: Options of the run.
      state: State of all slots, donated.
      new: inputs of the new sequence.
      slot: Index of the slot.
    """

    def entered(model, inputs, plan, state, new, slot):
        def into(copies: int, axis: int, array, row):
            return scatter_sequences(array, row, slot if copies == 1 else stream_index(slot, plan), axis)

        fresh = initial_state(Generation.of(model, new, plan), new)
        state = map_arrays(into, plan, _axes(model, inputs, plan), state, fresh)
        inputs = jax.tree.map(lambda array, row: scatter_sequences(array, row, slot, 0), inputs, new)
        inputs = jax.tree.map(lambda array: constrain(array, model.rules, "b"), inputs)
        return inputs, _split(model, plan, state)

    return over_mesh(entered, model, inputs, plan, state, new, slot, out=None)


@functools.partial(jax.jit, donate_argnames="state")
def until_one_ends(model: Model, inputs: Inputs, plan: Plan, state: State) -> tuple[State, Piece]:
    """Steps until one of the sequences that were active ends; a state without any stays as it is.

    Args:
      model: the model.
      inputs: Inputs of all slots.
      plan: Options of the run.
      state: State of all slots, donated.
    """

    def piece(model: Model, inputs: Inputs, plan: Plan, state: State) -> tuple[State, Piece]:
        before = state.canvas.active
        unchanged = lambda s: jnp.all(s.canvas.active == before)
        after, seen = run_piece(Generation.of(model, inputs, plan), state, unchanged, together=False)

        # Arrays of their own: the next piece overwrites the state's while the host still reads these.
        everywhere = lambda array: jnp.copy(constrain(array, model.rules, ""))
        return _split(model, plan, after), jax.tree.map(everywhere, seen)

    return over_mesh(piece, model, inputs, plan, state, out=None)


@jax.jit
def traced(model: Model, plan: Plan, state: State, slot: Int[Array, "1"]) -> Trace | None:
    """The trace of the sequence in a slot, the same on all devices."""

    def of_slot(model: Model, plan: Plan, state: State, slot: Int[Array, "1"]) -> Trace | None:
        of_one = lambda copies, axis, array: constrain(gather_sequences(array, slot, axis), model.rules, "")
        small = state._replace(cache=NOTHING, need=state.canvas.valid, memory=())  # which are not looked at
        sequence = map_arrays(of_one, plan, NOTHING, small)
        return final_outputs(plan, sequence, sequence.canvas.tokens).get("trace")

    return over_mesh(of_slot, model, plan, state, slot, out=None)


def _axes(model: Model, inputs: Inputs, plan: Plan):
    return axes_of_sequences(model, plan, len(inputs.tokens) * plan.streams)


def _split(model: Model, plan: Plan, state: State) -> State:
    """The state as a mesh splits it, whichever program made it, so that the next one is compiled once."""
    batch = len(state.need)
    split = lambda copies, axis, array: constrain(array, model.rules, "n" * axis + "b")
    rest = map_arrays(split, plan, NOTHING, state._replace(cache=NOTHING))
    return rest._replace(cache=split_cache(state.cache, model, batch))
