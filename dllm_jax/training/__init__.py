"""Training and fine-tuning with LLaDA's masked-diffusion loss; resumable."""

from dllm_jax.training.advantages import group_advantages
from dllm_jax.training.batch import Batch, Batches, Memory, Source
from dllm_jax.training.config import TrainConfig
from dllm_jax.training.estimators import Masks, elbo_masks, one_step_masks, response_log_probs, until_end
from dllm_jax.training.loop import Run, train
from dllm_jax.training.loss import Metrics, masked_diffusion_loss
from dllm_jax.training.objectives import (
    PolicyMetrics,
    PreferenceMetrics,
    dpo_loss,
    grpo_loss,
    vrpo_loss,
)
from dllm_jax.training.setup import Optimizer, Setup, Trainable, joined, prepare, split
from dllm_jax.training.state import TrainState, abstract_state, begin, model_of, train_step

__all__ = [
    "Batch", "Batches", "Masks", "Memory", "Metrics", "Optimizer", "PolicyMetrics", "PreferenceMetrics",
    "Run", "Setup", "Source", "TrainConfig", "TrainState", "Trainable", "abstract_state", "begin",
    "dpo_loss", "elbo_masks", "group_advantages", "grpo_loss", "joined", "masked_diffusion_loss",
    "model_of", "one_step_masks", "prepare", "response_log_probs", "split", "train", "train_step",
    "until_end", "vrpo_loss",
]  # fmt: skip
