"""Samplers: which token each position gets, and which positions are decoded in a step."""

from dllm_jax.samplers.base import Sampler as Sampler
from dllm_jax.samplers.certainty_prior import CertaintyPrior as CertaintyPrior
from dllm_jax.samplers.confidence import Confidence as Confidence
from dllm_jax.samplers.confidence import RandomOrder as RandomOrder
from dllm_jax.samplers.dream import DreamSchedule as DreamSchedule
from dllm_jax.samplers.noise import KeyNoise as KeyNoise
from dllm_jax.samplers.noise import Noise as Noise
from dllm_jax.samplers.noise import RecordedNoise as RecordedNoise
from dllm_jax.samplers.parallel import Factor as Factor
from dllm_jax.samplers.parallel import Threshold as Threshold
