"""Prompt eviction: layer budgets, head budgets and votes, which `policies.MaskKV` combines."""

from dllm_jax.eviction.head_budgets import AdaKV, EvenHeads, Evidence, HeadBudgets, PromptPreference
from dllm_jax.eviction.layer_baselines import PyramidKV, SqueezeAttention
from dllm_jax.eviction.layer_budgets import BoundaryMiddle, LayerBudgets, UniformLayers, table
from dllm_jax.eviction.online_layers import OnlineLayers
from dllm_jax.eviction.profile import calibrate, importance, load_profile, save_profile
from dllm_jax.eviction.voters import (
    AllVotes,
    MaskVotes,
    MiddleVote,
    PositionVotes,
    PredictingVotes,
    PromptVotes,
    SnapKV,
    Voters,
    evidence,
)

__all__ = [
    "AdaKV", "AllVotes", "BoundaryMiddle", "EvenHeads", "Evidence", "HeadBudgets", "LayerBudgets",
    "MaskVotes", "MiddleVote", "OnlineLayers", "PositionVotes", "PredictingVotes", "PromptPreference",
    "PromptVotes", "PyramidKV", "SnapKV", "SqueezeAttention", "UniformLayers", "Voters", "calibrate",
    "evidence", "importance", "load_profile", "save_profile", "table",
]  # fmt: skip
