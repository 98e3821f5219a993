"""Hugging Face transformers' networks in torch with our weights, opened at their attention.

GLM-4-MoE is LLaDA2's arithmetic under other names: its router, dense first layers, half rotated heads.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import transformers

import dllm_jax as dj
from dllm_jax.checkpoint.names import family
from dllm_jax.checkpoint.names.rope import written_scaling
from dllm_jax.checkpoint.names.table import tensors_of, to_hf, units
from dllm_jax.nn.parameters import layer_of

CONFIGS = {
    "llada": transformers.LlamaConfig,
    "dream": transformers.Qwen2Config,
    "fast-dllm-v2": transformers.Qwen2Config,
    "sdar": transformers.Qwen3Config,
    "llada2-moe": transformers.Glm4MoeConfig,
}
MISSING = "bench.peer_torch compares with torch: pip install torch (see the 'oracle' extra)"

Attend = Callable[[int, Any, Any, Any], Any]  # layer index, q [b h q d], k and v [b k q d] -> o [b h q d]


@dataclasses.dataclass(frozen=True)
class Twin:
    """Their causal language model. Tensors are torch's, which is a field since it need not be installed.

    `compiled` is the full forward through torch.compile, None where everything is eager; `how` says which, or
    why not.
    """

    torch: Any
    network: Any
    spec: dj.ModelSpec
    compiled: Callable[[Any], Any] | None = None
    how: str = "eager"

    def run(self, step: Callable[[], Any]) -> Any:
        """Runs a step without gradients, and waits for the device."""
        with self.torch.inference_mode():
            out = step()
        if self.network.device.type == "cuda":
            self.torch.cuda.synchronize()
        return out

    def hidden(self, tokens: Any, first: int, attend: Attend) -> Any:
        """Final hidden states [b q m], normed, of ids [b q] from a canvas position on, by their own modules.

        `attend` is the attention of a layer; it may store keys and values, and attend to stored ones.
        """
        body = self.network.model
        x = body.embed_tokens(tokens)
        position = self.torch.arange(first, first + tokens.shape[1], device=tokens.device)[None]
        cos, sin = body.rotary_emb(x, position)
        for index, layer in enumerate(body.layers):
            # Projections [b q hd] -> [b h q d]; queries and keys are rotated to their canvas positions.
            attn, normed = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                project(normed).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
                for project in (attn.q_proj, attn.k_proj, attn.v_proj)
            )
            if self.spec.qk_norm:
                q, k = attn.q_norm(q), attn.k_norm(k)
            o = attend(index, self._rotated(q, cos, sin), self._rotated(k, cos, sin), v)

            # Both branches are added to the residual stream.
            x = x + attn.o_proj(o.transpose(1, 2).flatten(2))
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        return body.norm(x)

    def attention(self, q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        """SDPA of all queries [b h q d] over all keys [b k s d], or those that the mask [q s] allows."""
        grouped = q.shape[1] != k.shape[1]
        return self.torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, enable_gqa=grouped)

    def full(self, tokens: Any) -> Any:
        """Final hidden states [b l m] of the whole canvas, where all positions attend to all."""
        return (self.compiled or self._full)(tokens)

    def logits(self, hidden: Any) -> Any:
        """The vocabulary head, float32 [b c v]."""
        return self.network.lm_head(hidden).float()

    def _full(self, tokens: Any) -> Any:
        return self.hidden(tokens, 0, lambda _, q, k, v: self.attention(q, k, v))

    def _rotated(self, x: Any, cos: Any, sin: Any) -> Any:
        turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
        first, second = turned.chunk(2, dim=-1)
        turned = turned * cos[:, None] + self.torch.cat((-second, first), dim=-1) * sin[:, None]
        return self.torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def network(spec: dj.ModelSpec, dtype: Any, **options: Any) -> Any:
    """A torch model of these shapes with random weights of this dtype; rotary frequencies are float32."""
    scaling = written_scaling(spec, "rope_type", "rope_scaling") or {"rope_type": "default"}
    rope: dict[str, Any] = scaling | {"rope_theta": spec.rope_base}
    described = CONFIGS[spec.family](
        vocab_size=spec.vocab, hidden_size=spec.width, intermediate_size=spec.mlp_width, use_cache=False,
        num_hidden_layers=spec.layers, num_attention_heads=spec.heads, num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim, rms_norm_eps=spec.norm_eps, tie_word_embeddings=spec.tied,
        rope_parameters=rope | {"partial_rotary_factor": spec.rotated / spec.head_dim}, **_experts(spec),
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(described, dtype=dtype, **options).eval()


def _experts(spec: dj.ModelSpec) -> dict[str, Any]:
    """Their keys of a mixture of experts."""
    if (experts := spec.experts) is None:
        return {}
    return {
        "n_routed_experts": experts.count, "num_experts_per_tok": experts.per_token, "use_qk_norm": True,
        "moe_intermediate_size": experts.mlp_width, "n_shared_experts": experts.shared // experts.mlp_width,
        "n_group": experts.groups, "topk_group": experts.groups_per_token,
        "norm_topk_prob": experts.renormalized, "routed_scaling_factor": experts.scale,
        "first_k_dense_replace": len(experts.dense),
    }  # fmt: skip


def twin(model: dj.Model, compiled: bool | None = None) -> Twin:
    """Their model with our weights and dtype, on the GPU if ours is.

    `compiled` tries torch.compile for full forwards; None does on GPUs.

    Raises:
      SystemExit: torch is not installed, or not for GPUs.
    """
    try:
        torch: Any = importlib.import_module("torch")
    except ModuleNotFoundError as error:
        raise SystemExit(MISSING) from error
    on_gpu = model.params["norm"].device.platform == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} has no GPU, where our weights are: take a CUDA build")
    with torch.device("cuda" if on_gpu else "cpu"):
        made = network(model.spec, getattr(torch, jnp.dtype(model.dtype).name), attn_implementation="sdpa")
    _load(made, model, torch)
    twin = Twin(torch, made, model.spec)
    return _through_compiler(twin) if (on_gpu if compiled is None else compiled) else twin


def _load(made: Any, model: dj.Model, torch: Any) -> None:
    """Overwrites every weight by ours, which stays on its device.

    Transformers' names are those of Dream and SDAR, but of experts.
    """
    theirs, loaded = made.state_dict(), {"lm_head.weight"} if model.spec.tied else set()
    for unit in units(model.spec, family.LLAMA_NAMES):
        arrays = model.params if unit.layer is None else layer_of(model.params, unit.layer)
        for tensor in tensors_of(model.spec, unit):
            array = jax.block_until_ready(jnp.asarray(to_hf(model.spec, tensor, arrays)))
            name, part = _place(tensor.name, model.spec)
            theirs[name][part].copy_(torch.from_dlpack(array))
            if made.device.type == "cuda":
                torch.cuda.synchronize()  # before jax may use the memory of `array` again
            loaded.add(name)
    if left := set(theirs) - loaded:
        raise ValueError(f"their network has weights that ours lacks: {', '.join(sorted(left))}")


def _place(name: str, spec: dj.ModelSpec) -> tuple[str, Any]:
    """Their tensor that holds one of ours, and its part: theirs is of all experts, gate and up in one."""
    name = name.replace("gate.expert_bias", "gate.e_score_correction_bias")
    match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(gate|up|down)_proj\.weight", name)
    if match is None or spec.experts is None:
        return name, ...
    layer, expert, which = match.groups()
    if which == "down":
        return f"{layer}.down_proj", int(expert)
    rows = slice(spec.experts.mlp_width) if which == "gate" else slice(spec.experts.mlp_width, None)
    return f"{layer}.gate_up_proj", (int(expert), rows)


def _through_compiler(eager: Twin) -> Twin:
    """Uses torch.compile for full forwards if it works; otherwise `how` says why not."""
    torch = eager.torch
    twin = dataclasses.replace(eager, compiled=torch.compile(eager.full), how="torch.compile")
    tokens = torch.zeros((1, 8), dtype=torch.long, device=eager.network.device)
    try:
        with torch.inference_mode():
            twin.full(tokens)
    except Exception as error:  # many causes: no compiler, an old GPU, unsupported operations
        return dataclasses.replace(eager, how=f"eager (torch.compile: {type(error).__name__})")
    return twin
