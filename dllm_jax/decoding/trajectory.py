"""Log-probabilities of the tokens of a trajectory, each at the denoising step that decoded it."""

import functools
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int

from dllm_jax.decoding.output import Output
from dllm_jax.decoding.placement import numbers
from dllm_jax.engine.features.trace import Trace
from dllm_jax.engine.stats import Stats
from dllm_jax.nn.answers import passes_at_once
from dllm_jax.nn.arithmetic import of_token
from dllm_jax.nn.layer import unembed
from dllm_jax.nn.mesh import current_mesh, number_modes, over_mesh
from dllm_jax.nn.model import Model, encode
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import NoneMeans, PositiveInt, TracedPositiveFloat, check_argument, shown
from dllm_jax.state import host, inputs
from dllm_jax.state.contexts import new_canvas
from dllm_jax.state.host import AnyArray
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import compact, gather, scatter
from dllm_jax.traced import Number, argument
from dllm_jax.xla.products import divided


class Trajectory(NamedTuple):
    """Log-probabilities of the tokens that a run unmasked.

    Attributes:
      log_prob: float32, in nats; 0 where no step of the run decoded the token (prompt, padding, masks that
        are left, end-of-text filled in by `stop_at_eos` or, as an `Output` tells, in place of a stop).
      decoded_at: the denoising step that decoded it, by the sequence's own count from 0; -1 where none did.
        Of a token that was remasked and decoded again, or replaced, it is the last such step.
    """

    log_prob: Float[Array, "b l"]
    decoded_at: Int[Array, "b l"]


def trajectory_log_probs(
    model: Model,
    run: Output | Trace,
    *,
    prompt_mask: ArrayLike | None = None,
    temperature: Number = 1.0,
    most_per_step: int | None = None,
    chunk: int = 1,
    remat: bool = False,
) -> Trajectory:
    """Log-probability of each decoded token, given the canvas of the step that decoded it.

    With x^s the canvas before step s and D_s the positions that step s decoded,

        log_prob[i] = log softmax(f(x^s)[i] / temperature)[token i]   for i in D_s.

    The sum over positions is the log-probability of the trajectory's tokens given its order: of
    prod_s prod_{i in D_s} p(x_i | x^s), the transitions of the reverse process (LLaDA, arXiv:2502.09992,
    section 2.4), whose positions of one step are independent. f is the exact model over the whole canvas,
    whatever cache policy made the run, and may have other parameters than the one that did; the result is
    differentiable in them. [MASK] counts in the softmax, as it does in confidences.

    Memory grows with `chunk`, not with the number of steps, under `jax.grad` too: each chunk is computed
    again in the backward pass. Logits are computed at decoded positions only.

    Args:
      model: Model of the log-probabilities.
      run: Output of `generate` or `infill` with `trace=True`, or its trace.
      prompt_mask: Bool[b p], or `infill`'s token_mask, False at padding. None: as the trace says.
      temperature: that of the sampler, to score the distribution it drew from; 1 is the model's own.
      most_per_step: upper bound of the tokens that a step decodes in one sequence, static. None counts them;
        in a traced program or over several processes, where that is not known, it means the whole canvas. A
        sequence of which a step decoded more has NaN.
      chunk: steps evaluated at once; memory grows with b * chunk. Models with experts take one at a time.
      remat: recompute each layer in the backward pass instead of keeping its activations.

    Returns:
      log-probabilities and steps, see `Trajectory`.

    Raises:
      ValueError: a run without a trace, with ids outside of the vocabulary, with answers that grew
        (`max_length`), with drafts (`FreeDave`), or whose canvases do not show what was attended to; an
        argument out of range.
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    trace = _trace_of(run)
    temperature = check_argument("temperature", temperature, TracedPositiveFloat)
    check_argument("chunk", chunk, PositiveInt)
    check_argument("remat", remat, bool)
    bound = Annotated[PositiveInt | None, NoneMeans("the number that was decoded")]
    check_argument("most_per_step", most_per_step, bound)
    padding = padding_of(trace, prompt_mask)
    check_replay(model, trace, padding, "Use generate(..., logprobs=0)")
    inputs.token_ids(trace.tokens.reshape(-1, trace.tokens.shape[-1]), model.spec, "run.tokens")
    mesh = current_mesh((model.params, trace.tokens))
    with number_modes():
        answer = run.tokens if isinstance(run, Output) else None
        at = _decoded_at(trace.tokens, trace.steps, model.spec, answer)
        width = trace.tokens.shape[-1] if most_per_step is None else most_per_step

        # Fewer rows meet the vocabulary where the most that any step decoded is known beforehand.
        if most_per_step is None and not host.stays_on_devices(at):
            width = max(1, int(host.values(_most_per_step(at, len(trace.tokens) - 1))))
    number = numbers(argument(temperature, float), mesh)
    log_prob = _log_probs(model, trace.tokens, at, padding, number, width, chunk, remat)
    return Trajectory(log_prob, at)


def _trace_of(run: Any) -> Trace:
    trace = run.trace if isinstance(run, Output) else run
    counted = run.stats if isinstance(run, Output) else run
    if isinstance(counted, Stats | Trace) and counted.sampler_steps is not None:
        raise ValueError(
            "run has drafted steps (FreeDave), of which a pass verified several: a trace holds the canvas of "
            "the first of them alone. Use generate(..., logprobs=0), or FreeDave's sampler without it"
        )
    if trace is None:
        raise ValueError("the run has no trace: its steps are not known; use generate(..., trace=True)")
    if not isinstance(trace, Trace):
        raise ValueError(f"run={shown(run)} must be what generate(..., trace=True) returned, or its trace")
    if trace.length is not None:
        raise ValueError(
            "run has answers that grew, whose tokens moved from step to step. Use generate(..., logprobs=0)"
        )
    return trace


def padding_of(trace: Trace, prompt_mask: ArrayLike | None) -> Bool[AnyArray, "b l"] | None:
    """Marks positions of a trace's canvases that are no padding, by a mask or the trace; None if all are."""
    batch, length = trace.tokens.shape[1:]
    if prompt_mask is not None or trace.start is None:
        return inputs.canvas_padding(prompt_mask, batch, length)
    known = host.readable(trace.start)
    if known is not None and not known.any():
        return None
    return np.arange(length, dtype=np.int32)[None] >= trace.start[:, None]


def check_replay(model: Model, trace: Trace, padding: Bool[AnyArray, "b l"] | None, instead: str):
    """Raises ValueError for a trace whose canvases do not show what their positions attended to.

    Args:
      model: Model that is to compute the canvases again.
      trace: Trace of a run.
      padding: False at padding; None where nothing is.
      instead: Advice, where a trace says too little.
    """
    family, context = model.spec.family, model.spec.context
    if context.from_response:
        reason = f"{family} counts its blocks from the response, and a trace does not say where it is"
        raise ValueError(f"blocks_from='response' is not supported here: {reason}. {instead}")
    if trace.causal is not None:
        raise ValueError(
            f"run has causal passes, as of Autoregressive() or S2D2(), which {family} would compute "
            "otherwise. Use Dynamic()"
        )
    if not context.completed:
        return
    # The rest of a last block is in no trace.
    size, known = context.size, None if padding is None else host.readable(padding)
    lengths = [trace.tokens.shape[-1]] if known is None else known.sum(axis=1).tolist()
    if ends := [length % size for length in lengths if length % size]:
        raise ValueError(
            f"run ends within a block of {family}, block_size={size}: its last {ends[0]} "
            f"positions attended to masks that a trace does not hold. {instead}, or fill the block"
        )


@functools.partial(jax.jit, static_argnames="spec")
def _decoded_at(
    tokens: Int[Array, "t_plus_1 b l"],
    steps: Int[Array, ""],
    spec: ModelSpec,
    answer: Int[Array, "b l"] | None,
) -> Int[Array, "b l"]:
    # The last step that gave a position its token, in place of [MASK] or of another one. What was remasked
    # for good, or gave way to an end-of-text after a stop, was not decoded.
    masked = spec.undecided(tokens)
    step = jnp.arange(len(tokens) - 1, dtype=jnp.int32)[:, None, None]
    decoded = (tokens[:-1] != tokens[1:]) & ~masked[1:] & (step < steps)
    at = jnp.max(jnp.where(decoded, step, -1), axis=0, initial=-1)
    last = jax.lax.dynamic_index_in_dim(tokens, steps, keepdims=False)
    replaced = jnp.zeros_like(at, bool) if answer is None else answer != last
    return jnp.where(spec.undecided(last) | replaced, -1, at)


@functools.partial(jax.jit, static_argnames="steps")
def _most_per_step(at: Int[Array, "b l"], steps: int) -> Int[Array, ""]:
    # Tokens that no step decoded fall into a bin after the last step's, which is left out.
    counts = jax.vmap(lambda row: jnp.bincount(jnp.where(row < 0, steps, row), length=steps + 1))(at)
    return jnp.max(counts[:, :steps], initial=0)


@functools.partial(jax.jit, static_argnames=("width", "chunk", "remat"))
def _log_probs(model: Model, tokens, at, padding, temperature, width: int, chunk: int, remat: bool):
    every_step = functools.partial(_sum_over_steps, width=width, chunk=chunk, remat=remat)
    out = model.rules.of_results((model, tokens), "b", b=tokens.shape[1])
    return over_mesh(every_step, model, tokens, at, padding, temperature, out=out)


def _sum_over_steps(
    model: Model,
    tokens: Int[Array, "t_plus_1 b l"],
    at: Int[Array, "b l"],
    padding: Bool[Array, "b l"] | None,
    temperature: Float[Array, ""],
    width: int,
    chunk: int,
    remat: bool,
) -> Float[Array, "b l"]:
    final, (batch, length) = tokens[-1], tokens.shape[1:]
    valid = jnp.ones((batch, length), bool) if padding is None else padding
    layout = Layout.of(0, length, padded=padding is not None)
    predictor = new_canvas(final, valid, model.spec, layout).predictor

    # A step adds the log-probabilities of its own positions to zeros elsewhere. Its activations are computed
    # again in the backward pass, so that no more than a chunk's are in memory at once.
    @jax.checkpoint
    def one_step(step: tuple[Int[Array, "b l"], Int[Array, "b l"], Int[Array, ""]]) -> Float[Array, "b l"]:
        before, after, number = step
        marked = at == number
        index = compact(marked, width)

        # Logits of a token are those at its predictor: where the head is shifted (Dream), its left neighbor.
        hidden = encode(model, before, padding, remat)
        logits = unembed(model.params, model.spec, gather(hidden, gather(predictor, index)))
        logits = divided(logits.astype(jnp.float32), temperature)
        chosen = of_token(logits, gather(after, index))
        scores = scatter(jnp.zeros((batch, length)), index, chosen - jax.nn.logsumexp(logits, axis=-1))

        # Too small a bound would leave tokens out without a word.
        beyond = jnp.sum(marked, axis=1, keepdims=True) > width
        return jnp.where(marked & beyond, jnp.nan, scores)

    numbers = jnp.arange(len(tokens) - 1, dtype=jnp.int32)
    at_once = passes_at_once(model.spec, chunk)
    by_step = jax.lax.map(one_step, (tokens[:-1], tokens[1:], numbers), batch_size=at_once)
    return jnp.sum(by_step, axis=0)
