"""Masked diffusion in tunix' `PeftTrainer`: batches, logits and loss of its diffusion contract.

    view = dj.nnx.ModelView(model)
    adapter = tunix.BatchAdapter(model.spec)
    trainer = PeftTrainer(view, optax.adamw(1e-4), TrainingConfig(...))
    trainer = trainer.with_gen_model_input_fn(tunix.loss_inputs).with_loss_fn(tunix.loss)
    trainer.train([adapter((batch, key)) for batch, key in ...])

The contract is that of `tunix/diffusion` in google/tunix at c7d8950, which google-tunix 0.1.7 does not have
yet. tunix is imported where it is needed. Its loss is `training.masked_diffusion_loss`, divided by the number
of sequences; accumulation sums over several batches before it divides.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Key

from dllm_jax.nn.answers import answer_logits
from dllm_jax.nn.keys import one_key
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.nnx.view import ModelView
from dllm_jax.options import check_argument
from dllm_jax.training.batch import Batch, checked
from dllm_jax.training.loss import cross_entropy, draw, expected_inputs


@dataclasses.dataclass(frozen=True)
class BatchAdapter:
    """Turns a batch and a key into tunix' `DiffusionTokenBatch`: it draws noise levels and masks.

    Call it outside of the compiled step: tunix takes no typed keys into it.

    Attributes:
      spec: Description of the model, which has the mask's id, the blocks and the vocabulary.
    """

    spec: ModelSpec

    def __post_init__(self):
        check_argument("spec", self.spec, ModelSpec, ", such as model.spec")

    def __call__(self, raw: tuple[Batch, Key[Array, ""]]) -> Any:
        """Returns the drawn batch; weights are masked / (t * tokens that count), 0 at other tokens.

        Args:
          raw: A batch (`dllm_jax.training.Batch`) and the key of its draw.

        Raises:
          ValueError: a batch that does not fit the model, or one with images.
        """
        from tunix.diffusion.types import DiffusionTokenBatch  # pyright: ignore[reportMissingImports]

        batch, key = raw
        drawn = draw(checked(batch, self.spec), one_key(key), self.spec)
        if drawn.images is not None:
            raise ValueError("batch.images is not supported in tunix' batches. Use dj.training.train")
        count = jnp.maximum(jnp.sum(drawn.learnt, axis=1, keepdims=True), 1)
        weights = jnp.where(drawn.masked, 1.0 / (drawn.t * count), 0.0)
        model_inputs = {"tokens": drawn.tokens, "answer": drawn.answer}
        model_inputs |= {
            name: array for name in ("valid", "conditioned") if (array := getattr(drawn, name)) is not None
        }
        return DiffusionTokenBatch.create(
            model_inputs=model_inputs, target_ids=drawn.answer, loss_weights=weights.astype(jnp.float32)
        )


def logits_fn(view: ModelView, model_inputs: dict[str, Array]) -> Float[Array, "b r v"]:
    """Computes the logits of a batch's answers, float32: row j scores target j (`DiffusionLogitsFn`).

    Args:
      view: Module of the model.
      model_inputs: Those of `BatchAdapter`.
    """
    model, inputs = view.model(), {"valid": None, **model_inputs}
    arrays, soft = (model, inputs["tokens"], inputs["answer"], inputs["valid"]), None
    if "conditioned" in inputs:
        soft = expected_inputs(model, answer_logits(*arrays), inputs["conditioned"])
    return answer_logits(*arrays, soft=soft)


def loss_inputs(batch: Any) -> dict[str, Any]:
    """Returns the arguments of `loss` besides the module, for `with_gen_model_input_fn`."""
    return {"batch": batch}


def loss(model: ModelView, batch: Any) -> Any:
    """Computes tunix' `LossOutput` of a drawn batch, for `with_loss_fn`.

    Args:
      model: Module of the model.
      batch: `DiffusionTokenBatch` of `BatchAdapter`.
    """
    from tunix.diffusion.interfaces import compute_diffusion_logits  # pyright: ignore[reportMissingImports]
    from tunix.sft.utils import LossOutput, WeightedMetric  # pyright: ignore[reportMissingImports]

    logits = compute_diffusion_logits(model, batch, logits_fn).astype(jnp.float32)
    weights = jnp.asarray(batch.loss_weights, jnp.float32)
    total = jnp.sum(weights * cross_entropy(logits, batch.target_ids, weights > 0))
    count = jnp.asarray(weights.shape[0], jnp.float32)
    return LossOutput(primary_loss=WeightedMetric(total, count), aux_metrics={})
