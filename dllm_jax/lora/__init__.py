"""LoRA (arXiv:2106.09685): low-rank updates of a model's matrices, trained in place of them.

adapted = lora.attach(model, lora.LoRA(rank=8, matrices=("q", "v")), jax.random.key(0))
run = train(adapted, source, config, trainable=lora.trainable)
lora.save(run.model, "adapter")  # as Hugging Face PEFT does
model = lora.merge(run.model)
"""

from dllm_jax.lora.adapter import LoRA as LoRA
from dllm_jax.lora.adapter import attach as attach
from dllm_jax.lora.adapter import detach as detach
from dllm_jax.lora.adapter import merge as merge
from dllm_jax.lora.adapter import options_of as options_of
from dllm_jax.lora.adapter import trainable as trainable
from dllm_jax.lora.peft import load as load
from dllm_jax.lora.peft import save as save
