"""DiffusionGemma checkpoints (google/diffusiongemma-*): tensor names and config.json.

Gemma 4's decoder with experts, once as a causal encoder and once as a denoiser of uniform noise, which share
all weights but a scalar per layer (transformers, models/diffusion_gemma). Sizes stand in `text_config`, those
of full layers in `global_head_dim` and `num_global_key_value_heads` or in `per_layer_config`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from dllm_jax.checkpoint.config import Config, Requirement
from dllm_jax.checkpoint.names.family import LLAMA_KEYS, NORMED, Family, Tokens, foreign
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import GemmaSpec, ModelSpec
from dllm_jax.options import PositiveFloat, PositiveInt, shown

LAYER = "model.decoder.layers.{n}."
ATTENTION, EXPERT, SOFT = LAYER + "self_attn.", LAYER + "experts.{e}.", "model.decoder.self_conditioning."
NORMS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm", "pre_feedforward_layernorm_2": "expert_norm",
    "post_feedforward_layernorm_1": "dense_post_norm", "post_feedforward_layernorm_2": "expert_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}  # fmt: skip
NAMES = (
    TensorName("model.decoder.embed_tokens.weight", "embed", "v m"),
    *(TensorName(f"{LAYER}{name}.weight", leaf, "m") for name, leaf in NORMS.items()),
    TensorName(ATTENTION + "q_proj.weight", "q", "hd m"),
    TensorName(ATTENTION + "k_proj.weight", "k", "kd m"),
    TensorName(ATTENTION + "v_proj.weight", "v", "kd m"),
    TensorName(ATTENTION + "q_norm.weight", "q_norm", "d"),
    TensorName(ATTENTION + "k_norm.weight", "k_norm", "d"),
    TensorName(ATTENTION + "o_proj.weight", "o", "m hd"),
    TensorName(LAYER + "mlp.gate_proj.weight", "gate", "f m"),
    TensorName(LAYER + "mlp.up_proj.weight", "up", "f m"),
    TensorName(LAYER + "mlp.down_proj.weight", "down", "m f"),
    TensorName(LAYER + "router.proj.weight", "router", "e m"),
    TensorName(LAYER + "router.scale", "router_scale", "m"),
    TensorName(LAYER + "router.per_expert_scale", "router_expert_scale", "e"),
    TensorName(EXPERT + "gate_proj.weight", "expert_gate", "i m"),
    TensorName(EXPERT + "up_proj.weight", "expert_up", "i m"),
    TensorName(EXPERT + "down_proj.weight", "expert_down", "m i"),
    TensorName(LAYER + "layer_scalar", "scalar", "u"),
    TensorName("model.encoder.language_model.layers.{n}.layer_scalar", "causal_scalar", "u"),
    TensorName(SOFT + "pre_norm.weight", "soft_norm", "m"),
    TensorName(SOFT + "gate_proj.weight", "soft_gate", "f m"),
    TensorName(SOFT + "up_proj.weight", "soft_up", "f m"),
    TensorName(SOFT + "down_proj.weight", "soft_down", "m f"),
    TensorName("model.decoder.norm.weight", "norm", "m"),
)
KEYS = {
    field: key
    for field, key in (LLAMA_KEYS | {"head_dim": "head_dim"}).items()
    if field not in ("rope_base", "mask_id", "tied")
}
EXPERT_KEYS = {"count": "num_experts", "per_token": "top_k_experts", "mlp_width": "moe_intermediate_size"}
# Values of the class where a file has no such key.
ABSENT = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6, "eos_token_id": 1, "sliding_window": 512, "final_logit_softcapping": 30.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
        },
    },
}  # fmt: skip
SLIDING, FULL = "sliding_attention", "full_attention"
GLOBAL = {"head_dim": "global_head_dim", "num_key_value_heads": "num_global_key_value_heads"}
REQUIREMENTS = (
    Requirement("model_type", ("diffusion_gemma_text", None)),
    Requirement("hidden_activation", ("gelu_pytorch_tanh",)),
    Requirement("attention_bias", (False, None)),
    Requirement("use_bidirectional_attention", ("vision", None)),
    Requirement("tie_word_embeddings", (True,)),
    Requirement("attention_k_eq_v", (True, None)),
    Requirement("enable_moe_block", (True, None)),
    Requirement("use_double_wide_mlp", (False, None)),
    Requirement("num_kv_shared_layers", (0, None)),
    Requirement("hidden_size_per_layer_input", (0, None)),
)
TIED = (Requirement("tie_word_embeddings", (True,)),)
OTHERS = {"layer_types", "sliding_window", "final_logit_softcapping", "rope_parameters", "per_layer_config"}


class DiffusionGemma(Family):
    """The family, whose config.json has the decoder's keys one level down."""

    @override
    def read(self, config: Config) -> ModelSpec:
        config.check(TIED)
        given = config.values.get("text_config")
        if not isinstance(given, dict):
            raise ValueError(f"{config.where}: text_config={shown(given)} must be an object")
        values = ABSENT | {key: value for key, value in given.items() if value is not None}
        text = dataclasses.replace(config, where=f"{config.where}: text_config", values=values)
        text.check(REQUIREMENTS)
        if text.get("num_experts") is None:
            raise ValueError(f"{text.where}: num_experts=null is not supported: layers without experts")

        text, known, others = self._with_tokens(text, Tokens())
        fields = text.fields({**KEYS, "eot_id": "eot_token_id"}, **known)
        fields["block_size"] = config.read("canvas_length", PositiveInt, 256)
        of_window, gemma = _layers(text, fields)
        fields |= {"rope_base": of_window, "gemma": gemma, "mask_id": fields["vocab"]}
        experts = dataclasses.replace(text.experts(EXPERT_KEYS), renormalized=True)
        spec = ModelSpec(**fields, **self.fixed, experts=experts, stop_ids=others or None, family=self.name)
        judged = {requirement.key for requirement in REQUIREMENTS}
        text.check(foreign(text, spec, {*KEYS.values(), *EXPERT_KEYS.values(), *judged, *OTHERS}))
        return spec

    @override
    def written(self, spec: ModelSpec) -> dict[str, Any]:
        gemma, experts = spec.gemma, spec.experts
        if gemma is None or experts is None:
            raise ValueError(
                f"gemma={shown(gemma)} is not supported by {self.model_type}: its layers are Gemma 4's"
            )
        kinds = [FULL if layer in gemma.full else SLIDING for layer in range(spec.layers)]
        full = {"head_dim": gemma.head_dim, "num_key_value_heads": gemma.kv_heads}
        text = {key: getattr(spec, name) for name, key in KEYS.items() if getattr(spec, name) is not None}
        text |= {key: getattr(experts, name) for name, key in EXPERT_KEYS.items()} | {
            "model_type": "diffusion_gemma_text",
            "eos_token_id": [*spec.ends] if spec.stop_ids else spec.eos_id,
            "eot_token_id": spec.eot_id,
            "layer_types": kinds,
            "per_layer_config": {str(layer): full for layer in gemma.full},
            "sliding_window": gemma.window,
            "final_logit_softcapping": gemma.softcap,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": spec.rope_base},
                FULL: {
                    "rope_type": "proportional",
                    "partial_rotary_factor": gemma.rope_width / gemma.head_dim,
                    "rope_theta": gemma.rope_base,
                },
            },
        }
        return {
            "model_type": self.model_type, "canvas_length": spec.block_size, "tie_word_embeddings": True,
            "text_config": text,
        }  # fmt: skip

    @override
    def made(self, spec: ModelSpec) -> dict[str, Any]:
        return self.template(spec) | self.written(spec)


def _layers(text: Config, fields: Mapping[str, Any]) -> tuple[float, GemmaSpec]:
    """The rotary base of layers with a window, and what a config.json says of both kinds."""
    layers = fields["layers"]
    kinds = text.get("layer_types") or [FULL if (n + 1) % 6 == 0 else SLIDING for n in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or {*map(str, kinds)} - {SLIDING, FULL}:
        rule = f"must be a list of {layers} of {SLIDING!r} and {FULL!r}"
        raise ValueError(f"{text.where}: layer_types={shown(kinds)} {rule}")
    full = tuple(n for n, kind in enumerate(kinds) if kind == FULL)
    if full[-1:] != (layers - 1,):
        raise ValueError(
            f"{text.where}: layer_types={shown(kinds)} must end with {FULL!r}, as the class has it"
        )
    shape = _of_full_layers(text, full, fields)
    rope = text.values["rope_parameters"]
    inner = {
        kind: _rope(text, rope, kind, name)
        for kind, name in {SLIDING: "default", FULL: "proportional"}.items()
    }
    part = inner[FULL].read("partial_rotary_factor", PositiveFloat, 1.0)
    if inner[SLIDING].read("partial_rotary_factor", PositiveFloat, 1.0) != 1:
        raise ValueError(f"{inner[SLIDING].where}: partial_rotary_factor must be 1 in layers with a window")
    return inner[SLIDING].read("rope_theta", PositiveFloat), GemmaSpec(
        full=full,
        window=text.read("sliding_window", PositiveInt),
        head_dim=shape["head_dim"],
        kv_heads=shape["num_key_value_heads"],
        rope_base=inner[FULL].read("rope_theta", PositiveFloat),
        rope_width=2 * int(part * shape["head_dim"] // 2),
        softcap=text.read("final_logit_softcapping", PositiveFloat),
    )


def _rope(text: Config, rope: Any, kind: str, supported: str) -> Config:
    """One kind's object in `rope_parameters`, as a config of its own."""
    values = rope.get(kind) if isinstance(rope, dict) else None
    where = f"{text.where}: rope_parameters.{kind}"
    if not isinstance(values, dict):
        raise ValueError(f"{where}={shown(values)} must be an object")
    inner = Config(where, values)
    unknown = [Requirement(key, (None,)) for key in sorted(values.keys() - {
        "rope_type", "rope_theta", "partial_rotary_factor",
    })]  # fmt: skip
    inner.check((Requirement("rope_type", (supported,), needed=True), *unknown))
    return inner


def _of_full_layers(text: Config, full: tuple[int, ...], fields: Mapping[str, Any]) -> dict[str, int]:
    """Head width and number of KV heads of full layers, in either spelling.

    Raises:
      ValueError: the spellings contradict each other, or full layers differ, by key.
    """
    listed = text.get("per_layer_config") or {}
    if not isinstance(listed, dict) or not all(isinstance(layer, dict) for layer in listed.values()):
        raise ValueError(f"{text.where}: per_layer_config={shown(listed)} must be an object of objects")
    # transformers 5.24 pads numbers with zeros, as in "05".
    if others := [n for n in listed if not (str(n).isdecimal() and int(n) in full)]:
        raise ValueError(
            f"{text.where}: per_layer_config names layer {others[0]}, which is no layer with full attention"
        )
    if unknown := sorted({key for layer in listed.values() for key in layer} - GLOBAL.keys()):
        raise ValueError(f"{text.where}: per_layer_config has {unknown[0]}, which is not supported")
    differing = {}
    for key, field, absent in (("head_dim", "head_dim", 512), ("num_key_value_heads", "kv_heads", None)):
        named = {f"per_layer_config.{n}.{key}": layer[key] for n, layer in listed.items() if key in layer}
        if text.get(GLOBAL[key]) is not None:
            named[GLOBAL[key]] = text.get(GLOBAL[key])
        absent = fields[field] if absent is None or listed else absent
        if len({*named.values()}) > 1 or (0 < len(named) < len(full) and GLOBAL[key] not in named):
            raise ValueError(f"{text.where}: {named} must be equal and name all full layers, of one shape")
        inner = dataclasses.replace(text, values={key: next(iter(named.values()), absent)})
        differing[key] = inner.read(key, PositiveInt)
    return differing


FAMILY = DiffusionGemma(
    name="diffusion-gemma",
    model_type="diffusion_gemma",
    names=NAMES,
    keys=KEYS,
    expert_keys=EXPERT_KEYS,
    fixed=NORMED | {"tied": True, "blocks_from": "response", "causal_context": True},
    carried=r"model\.encoder\.(vision_tower|embed_vision)\..*",
    fuses_experts=True,
    template=lambda spec: {"architectures": ["DiffusionGemmaForBlockDiffusion"], "vision_config": None},
)
