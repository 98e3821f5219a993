"""Samplers: which token each position gets, and which positions are decoded in a step."""

from dllm_jax.samplers.base import Sampler as Sampler
from dllm_jax.samplers.candidates import Candidates as Candidates
from dllm_jax.samplers.candidates import Decision as Decision
from dllm_jax.samplers.certainty_prior import CertaintyPrior as CertaintyPrior
from dllm_jax.samplers.confidence import Confidence as Confidence
from dllm_jax.samplers.confidence import RandomOrder as RandomOrder
from dllm_jax.samplers.dream import DreamSchedule as DreamSchedule
from dllm_jax.samplers.dynamic import Dynamic as Dynamic
from dllm_jax.samplers.dynamic import Sequential as Sequential
from dllm_jax.samplers.early_commit import EarlyCommit as EarlyCommit
from dllm_jax.samplers.eb import EBSampler as EBSampler
from dllm_jax.samplers.edit import Edit as Edit
from dllm_jax.samplers.klass import KLASS as KLASS
from dllm_jax.samplers.noise import KeyNoise as KeyNoise
from dllm_jax.samplers.noise import Noise as Noise
from dllm_jax.samplers.noise import RecordedNoise as RecordedNoise
from dllm_jax.samplers.parallel import Factor as Factor
from dllm_jax.samplers.parallel import Threshold as Threshold
from dllm_jax.samplers.parallel import UntilDone as UntilDone
from dllm_jax.samplers.pc import PCSampler as PCSampler
from dllm_jax.samplers.pc import TokenFrequencies as TokenFrequencies
from dllm_jax.samplers.wino import WINO as WINO
