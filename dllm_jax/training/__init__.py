"""Training and fine-tuning with LLaDA's masked-diffusion loss; resumable."""

from dllm_jax.training.config import TrainConfig as TrainConfig
from dllm_jax.training.loop import Run as Run
from dllm_jax.training.loop import train as train
from dllm_jax.training.loss import Batch as Batch
from dllm_jax.training.loss import Metrics as Metrics
from dllm_jax.training.loss import masked_diffusion_loss as masked_diffusion_loss
from dllm_jax.training.setup import Setup as Setup
from dllm_jax.training.setup import prepare as prepare
from dllm_jax.training.source import Batches as Batches
from dllm_jax.training.source import Memory as Memory
from dllm_jax.training.source import Source as Source
from dllm_jax.training.state import TrainState as TrainState
from dllm_jax.training.state import abstract_state as abstract_state
from dllm_jax.training.state import begin as begin
from dllm_jax.training.state import model_of as model_of
from dllm_jax.training.state import train_step as train_step
from dllm_jax.training.trainable import Optimizer as Optimizer
from dllm_jax.training.trainable import Trainable as Trainable
