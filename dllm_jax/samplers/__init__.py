"""Samplers: which token each position gets, and which positions are decoded in a step."""

from dllm_jax.samplers.autoregressive import Autoregressive, SelfSpeculation
from dllm_jax.samplers.base import Procedure, Sampler
from dllm_jax.samplers.candidates import Candidates, Decision, KeyNoise, Noise, RecordedNoise
from dllm_jax.samplers.confidence import CertaintyPrior, Confidence, RandomOrder
from dllm_jax.samplers.constraint import Constraint, OneOf
from dllm_jax.samplers.dream import DreamSchedule
from dllm_jax.samplers.early_commit import EarlyCommit
from dllm_jax.samplers.free_dave import FreeDave
from dllm_jax.samplers.growing import DAEDAL, DreamOn, GrowingAnswers
from dllm_jax.samplers.klass import KLASS
from dllm_jax.samplers.noise import EntropyNoise
from dllm_jax.samplers.parallel import Dynamic, EBSampler, Factor, LocalLeap, Sequential, Threshold, UntilDone
from dllm_jax.samplers.pc import PCSampler, TokenFrequencies
from dllm_jax.samplers.regex import Automaton, Regex
from dllm_jax.samplers.revising import WINO, Edit
from dllm_jax.samplers.s2d2 import S2D2

__all__ = [
    "DAEDAL", "KLASS", "S2D2", "WINO", "Automaton", "Autoregressive", "Candidates", "CertaintyPrior",
    "Confidence", "Constraint", "Decision", "DreamOn", "DreamSchedule", "Dynamic", "EBSampler",
    "EarlyCommit", "Edit", "EntropyNoise", "Factor", "FreeDave", "GrowingAnswers", "KeyNoise",
    "LocalLeap", "Noise", "OneOf", "PCSampler", "Procedure", "RandomOrder", "RecordedNoise", "Regex",
    "Sampler", "SelfSpeculation", "Sequential", "Threshold", "TokenFrequencies", "UntilDone",
]  # fmt: skip
