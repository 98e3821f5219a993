"""DiffusionGemma compared with google-deepmind/gemma (JAX, Flax): same weights, same device, run in turns.

    git clone https://github.com/google-deepmind/gemma CLONE     # it needs Python 3.12 and kauldron
    taskset -c 0 python -m bench.peer_gemma --path CLONE --json bench/results/peer_gemma_cpu.json

Theirs is a jitted function of the prompt's pass and `DiffusionSampler.sample_next_canvas`, ours `generate`
with `Policy()`, both in float32 (theirs keeps expected embeddings in bfloat16) with our random weights. As in
`bench.peer_torch.gemma`, logits of one pass are compared before anything is timed, and no canvas ends early.
"""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

import dllm_jax as dj
from bench.peer_torch.gemma import PERIOD, STD, Comparison, compare, config
from bench.shared import clone
from dllm_jax.check.weights import random_model
from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.families import config_to_spec
from dllm_jax.command_line import run
from dllm_jax.nn.modules import INIT_STD

HERE = Path("gemma/diffusion/_sampler.py")
# Their names of a layer's norms and scales, by ours.
NORMS = {
    "pre_attention_norm": "attn_norm", "post_attention_norm": "attn_post_norm", "pre_ffw2_norm": "mlp_norm",
    "post_ffw2_norm": "dense_post_norm", "pre_ffw_norm": "expert_norm", "post_ffw1_norm": "expert_post_norm",
    "post_ffw_norm": "mlp_post_norm",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class WithClone(Comparison):
    """Options of the comparison with a clone.

    Attributes:
      path: Clone of google-deepmind/gemma.
    """

    path: Path = Path("gemma")


@dataclasses.dataclass(frozen=True)
class DeepMind:
    """Their model with our weights."""

    model: Any
    params: Mapping[str, Any]
    sampler: Callable[[int], Any]  # by number of steps

    def logits(self, prompt: np.ndarray, canvas: np.ndarray) -> np.ndarray:
        """Those of a canvas's first denoising pass, which reads no expected embeddings."""

        def first(params, prompt, canvas):
            cache = self._encoded(params, prompt, canvas.shape[1])
            length, width = prompt.shape[1] + canvas.shape[1], self.model.config.embed_dim
            positions = prompt.shape[1] + jnp.arange(canvas.shape[1])[None]
            seen = jnp.ones((1, canvas.shape[1], length), bool)
            return self.model.apply(
                {"params": params}, canvas, sc_embeddings=jnp.zeros((*canvas.shape, width)), cache=cache,
                positions=positions, attention_mask=seen, sliding_attention_mask=seen,
                method="call_with_self_conditioning",
            ).logits  # fmt: skip

        return np.asarray(jax.jit(first)(self.params, jnp.asarray(prompt), jnp.asarray(canvas)))

    def generation(self, prompt: np.ndarray, steps: int) -> Callable[[], Any]:
        """A canvas after the prompt, in so many denoising steps."""
        sampler, tokens = self.sampler(steps), jnp.asarray(prompt)

        @jax.jit
        def whole(params, tokens, key):
            cache = self._encoded(params, tokens, sampler.canvas_length)
            return sampler.sample_next_canvas(
                canvas_length=sampler.canvas_length, max_denoising_steps=steps, batch_size=1, cache=cache,
                params=params, rng=key,
            )  # fmt: skip

        return lambda: whole(self.params, tokens, jax.random.key(0))

    def _encoded(self, params: Any, prompt: jax.Array, canvas: int) -> Any:
        """The cache after the prompt's causal pass, with room for a canvas."""
        length = prompt.shape[1] + canvas
        cache = self.model.init_cache(batch_size=1, dtype=jnp.float32, cache_length=length)
        return self.sampler(1).append_tokens_to_cache(tokens=prompt, cache=cache, params=params)


def theirs(path: Path, model: dj.Model) -> DeepMind:
    """Their model of the same shape, with the weights of ours."""
    names = "gm.nn.gemma4._gemma4", "gm.nn.gemma4._config", "diffusion._models", "diffusion._sampler"
    modules = clone.modules(path, "gemma", (f"gemma.{name}" for name in names))
    published, configs, networks, decoding = modules
    spec, gemma, experts = model.spec, model.spec.gemma, model.spec.experts
    assert gemma is not None, "of DiffusionGemma"
    assert experts is not None, "of DiffusionGemma"
    pattern = published.Gemma4_26B_A4B.attention_pattern
    described = dataclasses.replace(
        published.Gemma4_26B_A4B.config, num_embed=spec.vocab, embed_dim=spec.width,
        hidden_dim=spec.mlp_width, moe_dense_hidden_dim=spec.mlp_width, num_heads=spec.heads,
        head_dim=spec.head_dim, num_kv_heads=spec.kv_heads, num_global_kv_heads=gemma.kv_heads,
        global_key_size=gemma.head_dim, num_experts=experts.count, expert_dim=experts.mlp_width,
        top_k_experts=experts.per_token, sliding_window_size=gemma.window, vision_encoder=None,
        attention_types=configs.make_attention_layers_types(pattern, num_layers=spec.layers),
    )  # fmt: skip
    network = networks.DiffusionGemma_26B_A4B(config=described, dtype=jnp.float32)
    sampler = lambda steps: decoding.DiffusionSampler(
        model=network, end_tokens=(), forbidden_tokens=None, sampling=None, cache_length=0,
        special_tokens=None, canvas_length=spec.block_size, max_denoising_steps=steps,
        text_vocab_size=spec.vocab, sliding_window_size=gemma.window,
        sample_from_predictions=decoding.SampleFromPredictions(text_vocab_size=spec.vocab),
    )  # fmt: skip
    return DeepMind(network, weights(model), sampler)


def weights(model: dj.Model) -> dict[str, Any]:
    """Our parameters in their tree."""
    params, scale = model.params, lambda array: {"scale": array}
    gated = lambda of, gate, up: jnp.stack([of[gate], of[up]], axis=-3).swapaxes(-1, -2)
    tree = {
        "embedder": {"input_embedding": params["embed"]}, "final_norm": scale(params["norm"]),
        "self_conditioner": {
            "pre_norm": scale(params["soft_norm"]),
            "ffw": {"gating_einsum": gated(params, "soft_gate", "soft_up"), "linear": params["soft_down"]},
        },
    }  # fmt: skip
    for number, layer in enumerate(params["layers"]):
        attention = {
            "q_einsum": {"w": layer["q"].swapaxes(0, 1)}, "attn_vec_einsum": {"w": layer["o"]},
            "query_norm": scale(layer["q_norm"]), "key_norm": scale(layer["k_norm"]),
        }  # fmt: skip
        key = layer["k"].swapaxes(0, 1)
        both = {"kv_einsum": {"w": jnp.stack([key, layer["v"].swapaxes(0, 1)])}} if "v" in layer else {}
        tree[f"layer_{number}"] = {name: scale(layer[ours]) for name, ours in NORMS.items()} | {
            "attn": attention | (both or {"k_einsum": {"w": key}}),
            "mlp": {
                "gating_einsum": {"w": gated(layer, "expert_gate", "expert_up")},
                "linear": {"w": layer["expert_down"]}, "router_logits": {"w": layer["router"]},
                "per_expert_scale": layer["router_expert_scale"], "router_scale": layer["router_scale"],
            },
            "mlp2": {"gating_einsum": gated(layer, "gate", "up"), "linear": layer["down"]},
            "skip_scale": layer["scalar"],
        }  # fmt: skip
    return tree


def ours(asked: Comparison) -> dj.Model:
    """A model of the shape that is asked for, with random weights, those of norms too."""
    if asked.layers % PERIOD:
        raise ValueError(f"layers={asked.layers} must be a multiple of {PERIOD}: their pattern is whole")
    values = {**config(asked), "model_type": "diffusion_gemma"}
    model = random_model(config_to_spec(Config("the comparison", values)), jnp.float32, STD / INIT_STD)
    leaves, tree = jax.tree_util.tree_flatten_with_path(model.params)
    drawn = lambda n, leaf: leaf * jax.random.uniform(jax.random.key(n), leaf.shape, minval=0.5, maxval=1.5)
    is_scale = lambda path: "norm" in path[-1].key or path[-1].key.startswith("router_")
    new = [drawn(n, leaf) if is_scale(path) else leaf for n, (path, leaf) in enumerate(leaves)]
    return dataclasses.replace(model, params=jax.tree.unflatten(tree, new))


def main(asked: Annotated[WithClone, tyro.conf.arg(name="")]):
    """Compares with google-deepmind/gemma."""
    if not (asked.path / HERE).exists():
        raise ValueError(f"path={str(asked.path)!r} must be a clone of google-deepmind/gemma, with {HERE}")
    model = ours(asked)
    about = {"gemma": clone.commit(asked.path), "how": "jitted"}
    compare(theirs(asked.path, model), model, asked, about)


if __name__ == "__main__":
    run(lambda: tyro.cli(main))
