"""Every class of options, with the fields that it needs."""

import dataclasses
from typing import Any

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers, tasks, vision
from dllm_jax.decoding.buckets import Ladder
from dllm_jax.nn.spec import ModelSpec, VisionSpec
from dllm_jax.options import Options
from dllm_jax.roofline import HARDWARE, Assumed, Hardware
from dllm_jax.tasks import Stage
from dllm_jax.training import TrainConfig
from tests.models import frequencies, spec

WITHOUT_NEEDS: tuple[type[Options], ...] = (
    *map(type, policies.ALL), eviction.PyramidKV, eviction.BoundaryMiddle, eviction.OnlineLayers,
    eviction.PromptPreference, eviction.AdaKV, eviction.PositionVotes, eviction.SnapKV, samplers.Confidence,
    samplers.RandomOrder, samplers.CertaintyPrior, samplers.DreamSchedule, samplers.Threshold,
    samplers.Factor, samplers.EBSampler, samplers.KLASS, samplers.WINO, samplers.DAEDAL, Assumed,
    dj.MeshRules, tasks.Recall, tasks.Chain, tasks.FewShot, tasks.Sorting, policies.GaussianDropout,
    policies.UniformDropout, policies.NearAndLast, samplers.EarlyCommit, dj.Sliding,
)  # fmt: skip
OPTIONS: dict[type[Options], dict[str, Any]] = {kind: {} for kind in WITHOUT_NEEDS} | {
    eviction.SqueezeAttention: {"cosine": (0.5,)}, samplers.PCSampler: {"frequencies": frequencies()},
    samplers.LocalLeap: {"relaxed": 0.125},
    dj.Layout: {"prompt": 4, "response": 4, "block": 4, "steps": 4},
    ModelSpec: dataclasses.asdict(spec("llada")), VisionSpec: {}, vision.AnyRes: {}, vision.Pad: {},
    TrainConfig: {"steps": 400}, Hardware: dataclasses.asdict(HARDWARE["h100"]),
    Ladder: {"rungs": (64, 128)}, Stage: {"task": tasks.Recall(), "size": 2, "batch": 4, "length": 8},
}  # fmt: skip
