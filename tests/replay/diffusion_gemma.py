"""DiffusionGemma: single denoising passes, as transformers computes them."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.nn import gemma
from tests.replay.block import relatively
from tests.replay.case import Case


def forward(case: Case):
    """Three denoising passes, two of them with the logits of the one before, and encoding passes."""
    arrays, model = case.arrays, case.model()
    prompt, canvas, logits = arrays["prompt"], arrays["canvas"], arrays["logits"]
    case.settings.describes("seed")
    behind = np.concatenate([prompt, canvas[1:2]], axis=1)
    for step, context in enumerate((prompt, prompt, behind)):
        found = _denoised(model, context, canvas[step], logits[step - 1] if step else None)
        relatively(f"logits {step}", found, logits[step])
    last = dj.hidden_states(model, behind)[-1, 0]
    hidden = gemma.norm(last, model.params["norm"], model.spec.norm_eps)
    recorded = np.concatenate([arrays["encoder_hidden"], arrays["encoder_hidden_2"]])
    relatively("hidden", hidden, recorded)


def _denoised(model: dj.Model, context: np.ndarray, canvas: np.ndarray, before: np.ndarray | None):
    """Logits of a denoising pass behind a context, with those of the pass before."""
    begins = context.shape[1]
    soft = None
    if before is not None:
        expected = gemma.expected(model.params, jnp.asarray(before)[None])
        soft = jnp.pad(expected, ((0, 0), (begins, 0), (0, 0)))
    ids = np.concatenate([context, canvas[None]], axis=1)
    return dj.forward(model, ids, response=begins, soft=soft)[0, begins:]


METHODS = {"diffusion-gemma-forward": forward}
