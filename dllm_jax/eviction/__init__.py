"""Prompt eviction: layer budgets, head budgets and votes, which `policies.MaskKV` combines."""

from dllm_jax.eviction.head_budgets import AdaKV as AdaKV
from dllm_jax.eviction.head_budgets import EvenHeads as EvenHeads
from dllm_jax.eviction.head_budgets import Evidence as Evidence
from dllm_jax.eviction.head_budgets import HeadBudgets as HeadBudgets
from dllm_jax.eviction.head_budgets import PromptPreference as PromptPreference
from dllm_jax.eviction.layer_baselines import PyramidKV as PyramidKV
from dllm_jax.eviction.layer_baselines import SqueezeAttention as SqueezeAttention
from dllm_jax.eviction.layer_budgets import BoundaryMiddle as BoundaryMiddle
from dllm_jax.eviction.layer_budgets import LayerBudgets as LayerBudgets
from dllm_jax.eviction.layer_budgets import UniformLayers as UniformLayers
from dllm_jax.eviction.layer_budgets import table as table
from dllm_jax.eviction.online_layers import OnlineLayers as OnlineLayers
from dllm_jax.eviction.profile import calibrate as calibrate
from dllm_jax.eviction.profile import importance as importance
from dllm_jax.eviction.profile import load_profile as load_profile
from dllm_jax.eviction.profile import save_profile as save_profile
from dllm_jax.eviction.voters import AllVotes as AllVotes
from dllm_jax.eviction.voters import MaskVotes as MaskVotes
from dllm_jax.eviction.voters import PositionVotes as PositionVotes
from dllm_jax.eviction.voters import PredictingVotes as PredictingVotes
from dllm_jax.eviction.voters import PromptVotes as PromptVotes
from dllm_jax.eviction.voters import SnapKV as SnapKV
from dllm_jax.eviction.voters import Voters as Voters
from dllm_jax.eviction.voters import evidence as evidence
