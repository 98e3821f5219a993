"""LoRA (arXiv:2106.09685): low-rank updates of a model's matrices, trained in place of them.

adapted = lora.attach(model, lora.LoRA(rank=8, matrices=("q", "v")), jax.random.key(0))
run = train(adapted, source, config, trainable=lora.trainable)
lora.save(run.model, "adapter")  # as Hugging Face PEFT does
model = lora.merge(run.model)
"""

from dllm_jax.lora.adapter import LoRA, attach, detach, merge, options_of, trainable
from dllm_jax.lora.peft import load, save

__all__ = ["LoRA", "attach", "detach", "load", "merge", "options_of", "save", "trainable"]
