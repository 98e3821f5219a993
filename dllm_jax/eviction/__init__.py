"""Eviction: budgets of layers and heads, for `MaskKV` and `EvictPrompt`; votes, for `MAGE` too."""

from dllm_jax.eviction.heads import AdaKV, EvenHeads, Evidence, HeadBudgets, PromptPreference
from dllm_jax.eviction.layers import (
    BoundaryMiddle,
    LayerBudgets,
    OnlineLayers,
    PyramidKV,
    SqueezeAttention,
    UniformLayers,
    calibrate,
    importance,
    load_profile,
    save_profile,
    table,
)
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
