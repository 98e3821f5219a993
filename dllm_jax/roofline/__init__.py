"""Predicts the cost of a generation from shapes alone: bytes, FLOPs, milliseconds and memory.

    import dllm_jax as dj

    spec, h100 = dj.presets.model_spec("llada-8b"), dj.roofline.HARDWARE["h100"]
    layout = dj.Layout(prompt=1024, response=256, block=32, steps=64)
    plan = dj.roofline.work(spec, dj.policies.DualCache(), layout)  # steps of each kind, and their costs
    print(plan.on(h100).ms_per_token, plan.memory.fits(h100))

Prompts with images (LLaDA-V) have more positions, and a pass of the tower before the first step:

    spec = dj.presets.model_spec("llada-v-8b")
    found = dj.roofline.images(spec, [(1024, 768)])
    layout = dj.Layout(64 + found.positions, 32, 32, 32)
    dj.roofline.work(spec, dj.policies.DualCache(), layout, views=found.views)

A step takes the longer of moving its bytes and computing its FLOPs, both at the full rate of the hardware: a
lower bound. Counted as well: what policies move of K/V besides, copies that join and gather pairs included.
Not counted: activations between the operations of a layer, the re-reading of keys for every chunk of
queries, softmax, norms, sampling, launches, collectives. What a policy decides from data is assumed, see
`Assumed`.
"""

from dllm_jax.nn.hardware import HARDWARE, Hardware
from dllm_jax.roofline.predict import MemoryUse, Prediction, Throughput, Work, throughput, work
from dllm_jax.roofline.simulation import schedule
from dllm_jax.roofline.steps import Assumed, Cost, Images, Step, cost, images, tower_cost

__all__ = [
    "HARDWARE", "Assumed", "Cost", "Hardware", "Images", "MemoryUse", "Prediction", "Step", "Throughput",
    "Work", "cost", "images", "schedule", "throughput", "tower_cost", "work",
]  # fmt: skip
