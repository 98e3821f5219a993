"""The logit lens: what the residual stream of a layer would predict if the network ended there."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from dllm_jax.nn.layer import unembed
from dllm_jax.nn.mesh import number_modes
from dllm_jax.nn.model import Model
from dllm_jax.options import check_argument
from dllm_jax.state import host


@number_modes()
def logit_lens(model: Model, residual: Float[Array, "*a m"]) -> Float[Array, "*a v"]:
    """Reads a residual stream by the final norm and the vocabulary head (nostalgebraist, 2020).

        seen = dj.capture(model, out, "residual")
        logits = dj.logit_lens(model, seen.residual)  # [t r b j v]

    Of the last layer's output these are the logits of the model. As `forward` returns them, they are
    unshifted: the output at a position predicts the token at `Capture.predicts`, the right neighbor where
    the head is shifted (Dream).

    Args:
      model: Model that the stream is of.
      residual: Residual stream of any places: the model's width is its last axis (`Capture.residual`).

    Returns:
      Logits in the model's dtype; differentiable.

    Raises:
      ValueError: an array of another width, or that is no residual stream.

    Examples:
      >>> model = dj.load(dj.bundled.path("tiny-llada"))
      >>> seen = dj.capture(model, [[40, 41, 42]], "residual")
      >>> lens = dj.logit_lens(model, seen.residual[0])
      >>> lens.shape == (model.spec.layers + 1, 1, 3, model.spec.vocab)
      True
    """
    check_argument("model", model, Model, ", such as dj.load(path)")
    array = residual if isinstance(residual, jax.Array) else host.array("residual", residual, "an array")
    width = model.spec.width
    if not array.ndim or array.shape[-1] != width or not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(
            f"residual has shape {array.shape} and dtype {array.dtype}; expected floats [.., {width}], such "
            "as capture(model, out, 'residual').residual"
        )
    return _lens(model, jnp.asarray(array))


@jax.jit
def _lens(model: Model, residual: Float[Array, "*a m"]) -> Float[Array, "*a v"]:
    flat = residual.reshape(1, -1, residual.shape[-1]).astype(model.dtype)
    logits = unembed(model.params, model.spec, flat)
    return logits.reshape(*residual.shape[:-1], logits.shape[-1])
