"""Description of a family of checkpoints: how its config.json is read and written; by default, as Llama's."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dllm_jax.checkpoint.config import BlockSizeWarning, Config, Requirement
from dllm_jax.checkpoint.names.rope import Key, read_rope, written_scaling
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ExpertSpec, ModelSpec
from dllm_jax.options import PositiveInt, shown
from dllm_jax.options.hints import warn

# -- names and keys that most families share with Llama ---------------------------------------------
# The table has all that any of them has: which lines a checkpoint has, its spec says.

LLAMA_LAYER = "model.layers.{n}."
LLAMA_EXPERT = LLAMA_LAYER + "mlp.experts.{e}."
# Torch's linear layers are [outputs, inputs], with heads and their width merged.
LLAMA_MLP = (
    TensorName(LLAMA_LAYER + "mlp.gate_proj.weight", "gate", "f m"),
    TensorName(LLAMA_LAYER + "mlp.up_proj.weight", "up", "f m"),
    TensorName(LLAMA_LAYER + "mlp.down_proj.weight", "down", "m f"),
    TensorName(LLAMA_LAYER + "mlp.gate.weight", "router", "e m"),
    TensorName(LLAMA_LAYER + "mlp.gate.expert_bias", "router_bias", "e"),
    TensorName(LLAMA_EXPERT + "gate_proj.weight", "expert_gate", "i m"),
    TensorName(LLAMA_EXPERT + "up_proj.weight", "expert_up", "i m"),
    TensorName(LLAMA_EXPERT + "down_proj.weight", "expert_down", "m i"),
    TensorName(LLAMA_LAYER + "mlp.shared_experts.gate_proj.weight", "shared_gate", "j m"),
    TensorName(LLAMA_LAYER + "mlp.shared_experts.up_proj.weight", "shared_up", "j m"),
    TensorName(LLAMA_LAYER + "mlp.shared_experts.down_proj.weight", "shared_down", "m j"),
)
LLAMA_NAMES = (
    TensorName("model.embed_tokens.weight", "embed", "v m"),
    TensorName(LLAMA_LAYER + "input_layernorm.weight", "attn_norm", "m"),
    TensorName(LLAMA_LAYER + "self_attn.q_proj.weight", "q", "hd m"),
    TensorName(LLAMA_LAYER + "self_attn.k_proj.weight", "k", "kd m"),
    TensorName(LLAMA_LAYER + "self_attn.v_proj.weight", "v", "kd m"),
    TensorName(LLAMA_LAYER + "self_attn.q_proj.bias", "q_bias", "hd"),
    TensorName(LLAMA_LAYER + "self_attn.k_proj.bias", "k_bias", "kd"),
    TensorName(LLAMA_LAYER + "self_attn.v_proj.bias", "v_bias", "kd"),
    TensorName(LLAMA_LAYER + "self_attn.q_norm.weight", "q_norm", "d"),
    TensorName(LLAMA_LAYER + "self_attn.k_norm.weight", "k_norm", "d"),
    TensorName(LLAMA_LAYER + "self_attn.o_proj.weight", "o", "m hd"),
    TensorName(LLAMA_LAYER + "post_attention_layernorm.weight", "mlp_norm", "m"),
    *LLAMA_MLP,
    TensorName("model.norm.weight", "norm", "m"),
    TensorName("lm_head.weight", "head", "v m"),
)
LLAMA_KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "mlp_width": "intermediate_size",
    "vocab": "vocab_size",
    "rope_base": "rope_theta",
    "norm_eps": "rms_norm_eps",
    "mask_id": "mask_token_id",
    "eos_id": "eos_token_id",
    "tied": "tie_word_embeddings",
    "positions": "max_position_embeddings",
}
LLAMA_BLOCK_KEYS = LLAMA_KEYS | {"head_dim": "head_dim", "block_size": "block_size"}
SILU = Requirement("hidden_act", ("silu",))  # the default of every class
LLAMA_REQUIREMENTS = (SILU, Requirement("partial_rotary_factor", (None, 1)))
UNTIED = {"tied": False}  # of every class

# Fields of most: row i predicts token i; cos and sin are cast to the activations' dtype before they rotate;
# padding is masked as keys only.
PLAIN = {"qkv_bias": False, "shifted": False, "rope_in_f32": False, "pad_rows_attend": True}
NORMED = PLAIN | {"qk_norm": True}  # of those that norm queries and keys, as Qwen3


def with_a_head(config: Config) -> Config:
    """A config.json that names a head's width, by default the model's divided by the number of heads."""
    if config.get("head_dim") is not None:
        return config
    head = config.divided_head("hidden_size", "num_attention_heads", " where no head_dim is given")
    return dataclasses.replace(config, values=config.values | {"head_dim": head})


def llama_template(architecture: str) -> Callable[[ModelSpec], dict[str, Any]]:
    """Returns the `Family.template` of a class of this name."""
    return lambda spec: {
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": spec.eos_id,
        "pad_token_id": spec.eos_id,
        "use_sliding_window": False,
        "use_cache": False,
    }


# -- keys of config.json that change the network, in families that do not read them ------------------
# A relative's file may be a family's in all that the family reads, and describe another network, as
# DreamReasoner's files do to a reader of Dream's. So each key below has values under which a family's network
# is what it is anyway, and any other value is refused by name. The keys are those of Llama, Qwen2, Qwen3 and
# their mixtures of experts in transformers, of their relatives there, and of the families of this library.

Implied = Callable[[ModelSpec], tuple[Any, ...] | None]  # the values; None allows all


def _same(keys: str, implied: Implied) -> dict[str, Implied]:
    return dict.fromkeys(keys.split(), implied)


def _only(*values: Any) -> Implied:
    return lambda spec: values


def _of_experts(value: Callable[[ExpertSpec], Any]) -> Implied:
    """A value of models with experts; 0 of others."""
    return lambda spec: (0,) if spec.experts is None else (value(spec.experts),)


def _with_experts(value: Callable[[ExpertSpec], Any]) -> Implied:
    """A value of models with experts; of others any, as the key means nothing without them."""
    return lambda spec: None if spec.experts is None else (value(spec.experts),)


IMPLIED: Mapping[str, Implied] = {
    # Sizes, where a family has other keys for them.
    "num_hidden_layers": lambda spec: (spec.layers,),
    "hidden_size": lambda spec: (spec.width,),
    "num_attention_heads": lambda spec: (spec.heads,),
    "num_key_value_heads": lambda spec: (spec.kv_heads,),
    "head_dim": lambda spec: (spec.head_dim,),
    # Biases, norms, activations.
    **_same("attention_bias qkv_bias use_qkv_bias include_qkv_bias", lambda spec: (spec.qkv_bias,)),
    **_same("mlp_bias use_bias include_bias lm_head_bias", _only(False)),
    **_same("qk_norm use_qk_norm qk_layernorm use_qk_layernorm", lambda spec: (spec.qk_norm,)),
    "layer_norm_eps": _only(None),
    **_same("hidden_act hidden_activation activation_type", _only("silu")),
    # Rotary embedding and attention.
    "rotary_pct": lambda spec: (spec.rotated / spec.head_dim,),
    "rotary_dim": lambda spec: (spec.rotated,),
    "no_rope_layers": lambda spec: ([], [1] * spec.layers),  # 1 rotates
    **_same("no_rope_layer_interval attention_chunk_size", _only(0)),
    **_same("alibi use_mrope is_encoder_decoder add_cross_attention", _only(False)),
    **_same("block_size block_length bd_size", lambda spec: (spec.block_size,)),
    # Factors and bounds of relatives.
    **_same("residual_multiplier embedding_multiplier logits_scaling", _only(1)),
    "attention_multiplier": lambda spec: (spec.head_dim**-0.5,),
    "query_pre_attn_scalar": lambda spec: (spec.head_dim,),
    **_same("attn_logit_softcapping final_logit_softcapping clip_qkv", _only(None)),
    # Experts.
    **_same("num_experts num_local_experts n_routed_experts", _of_experts(lambda e: e.count)),
    "num_experts_per_tok": _of_experts(lambda e: e.per_token),
    **_same("moe_intermediate_size expert_intermediate_size", _of_experts(lambda e: e.mlp_width)),
    "shared_expert_intermediate_size": _of_experts(lambda e: e.shared),
    **_same("num_shared_experts n_shared_experts", _of_experts(lambda e: e.shared // e.mlp_width)),
    "first_k_dense_replace": _of_experts(lambda e: len(e.dense)),
    "mlp_only_layers": _with_experts(lambda e: [*e.dense]),
    "decoder_sparse_step": _with_experts(lambda e: 1),
    "norm_topk_prob": _with_experts(lambda e: e.renormalized),
    "routed_scaling_factor": _with_experts(lambda e: e.scale),
    "n_group": _with_experts(lambda e: e.groups),
    "topk_group": _with_experts(lambda e: e.groups_per_token),
    **_same("scoring_func score_function", _with_experts(lambda e: "sigmoid" if e.sigmoid else "softmax")),
    **_same("num_nextn_predict_layers mtp_num_layers", _only(0)),
}


def foreign(config: Config, spec: ModelSpec, read: set[str]) -> tuple[Requirement, ...]:
    """Lists the supported values of the given keys that a family does not read; null says nothing.

    Args:
      config: A config.json.
      spec: What the family reads in it.
      read: Keys that the family reads, or judges by rules of its own.
    """
    required = []
    for key in IMPLIED.keys() & config.values.keys() - read:
        allowed, value = IMPLIED[key](spec), config.values[key]
        absent = value is None or (value is False and not any(isinstance(v, bool) for v in allowed or ()))
        if allowed is not None and not absent:
            required.append(Requirement(key, allowed))
    return tuple(sorted(required, key=lambda requirement: requirement.key))


# -- families ---------------------------------------------------------------------------------------

DENSE = Requirement("num_experts", (None,))  # a relative with experts would be read as if it had none
BLOCK_SIZE = ("block_size", "block_length", "bd_size")  # spellings of one number


class Tokens(NamedTuple):
    """Ids of special tokens where config.json does not name them; None: not known."""

    mask: int | None = None
    eos: int | None = None
    eot: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A checkpoint layout.

    Attributes:
      name: `ModelSpec.family`.
      model_type: config.json's `model_type`.
      classes: Patterns of the classes in `architectures` and `auto_map` of its files, as of `fnmatch`; a file
        that names them under another model type is refused.
      signs: config.json -> other keys that tell its files from those of families of the same model type.
      unsigned: Whether files of its model type without such classes and signs are its own.
      names: its tensors. Default: Llama's, and so of `keys` and `requirements`.
      keys: Keys of config.json, by the field of `ModelSpec` that they hold, for reading and writing.
      expert_keys: Keys of config.json, by the field of `ExpertSpec`, for writing; `further_fields` reads
        them. Dense models have none.
      requirements: keys that hold no field, and what this library supports of them.
      fixed: fields of `ModelSpec` that all its models share.
      defaults: Values of keys that published files leave out, by field.
      tokens: ids of special tokens, by the vocabulary size of published models whose config.json does not
        name them.
      blocks: Block size where config.json names none; None takes that of `defaults`, with a warning.
      scaling_type: key of the type of scaling in the object at `rope_key`.
      rope_key: Key of the object that holds rotary embedding in published files. In "rope_parameters" stand
        the base, the rotated part and the growth of queries too.
      newer_rope: Whether the authors' code reads "rope_parameters" as well, so that a file keeps them.
      also_read: Further keys of `IMPLIED` that the family reads or judges, and that may differ from the spec.
      adjusted: another spelling of a config.json -> the one that `keys` reads.
      further_fields: config.json, and the fields that `keys` and rotary embedding hold -> those that no key
        holds alone.
      more: spec -> what it determines besides `keys`.
      carried: Pattern of tensors that no parameter is made of, which conversion and export keep bit for bit.
      fuses_experts: Whether its files hold the experts of a layer in two tensors, gate_up_proj and down_proj.
      template: spec -> keys that hold no field, for a model that never had a config.json.
    """

    name: str
    model_type: str
    classes: tuple[str, ...] = ()
    signs: Callable[[Config], tuple[str, ...]] = lambda config: ()
    unsigned: bool = True
    names: tuple[TensorName, ...] = LLAMA_NAMES
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: LLAMA_KEYS)
    expert_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    requirements: tuple[Requirement, ...] = LLAMA_REQUIREMENTS
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: Mapping[int, Tokens] = dataclasses.field(default_factory=dict)
    blocks: int | None = None
    scaling_type: str = "rope_type"
    rope_key: Key = "rope_scaling"
    newer_rope: bool = False
    also_read: tuple[str, ...] = ()
    adjusted: Callable[[Config], Config] = lambda config: config
    further_fields: Callable[[Config, dict[str, Any]], dict[str, Any]] = lambda config, fields: {}
    more: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}
    carried: str = ""
    fuses_experts: bool = False
    template: Callable[[ModelSpec], dict[str, Any]]

    def read(self, config: Config) -> ModelSpec:
        """The spec that a config.json describes.

        Raises:
          ValueError: an unsupported value or a missing key, by name.
        """
        config, scaling = read_rope(self.adjusted(config), self.keys["positions"], self.rope_key)
        # A window counts only where it is both set and switched on.
        window = (Requirement("sliding_window", (None,)),)
        window = window if config.read("use_sliding_window", bool, default=False) else ()
        config.check((*self.requirements, *window, *(() if self.expert_keys else (DENSE,))))
        kinds = config.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} - {"full_attention"}):
            raise ValueError(f"{config.where}: layer_types={shown(kinds)} must all be 'full_attention'")

        vocab = config.read(self.keys["vocab"], PositiveInt, config.get("vocab_size"))
        config, known, others = self._with_tokens(config, self.tokens.get(vocab, Tokens()))
        config = self._with_block_size(config) if "block_size" in self.keys else config
        fields = config.fields({**self.keys, "eot_id": "eot_token_id"}, **{**self.defaults, **known})
        fields |= {"rope_scaling": scaling, "stop_ids": others or None}
        spec = ModelSpec(**{**fields, **self.fixed, **self.further_fields(config, fields)}, family=self.name)
        config.check(foreign(config, spec, self.read_keys))
        return spec

    @property
    def read_keys(self) -> set[str]:
        """The keys of config.json that the family reads, or judges by rules of its own."""
        required = {requirement.key for requirement in self.requirements}
        blocks = BLOCK_SIZE if "block_size" in self.keys else ()
        return {*self.keys.values(), *self.expert_keys.values(), *required, *blocks, *self.also_read}

    def _with_tokens(
        self, config: Config, published: Tokens
    ) -> tuple[Config, dict[str, Any], tuple[int, ...]]:
        """A config.json with one end-of-text; the tokens that it does not name, by field; other ends."""
        ends = config.end_ids(config.values)
        more = config.end_ids(config.generation)  # the file that a generation of transformers reads
        listed = ends or more
        ids = tuple(dict.fromkeys((*ends, *more)))

        # `save_hf` writes null for a model without end-of-turn, which published files do not mention.
        eot = listed[1] if len(listed) > 1 else published.eot
        known = {"eot_id": None if "eot_token_id" in config.values else eot}
        mask = config.generation.get("mask_token_id")
        if (mask := published.mask if mask is None else mask) is not None:
            known["mask_id"] = mask
        values = {key: value for key, value in config.values.items() if key != "eos_token_id"}
        if (eos := ids[0] if ids else published.eos) is not None:
            values["eos_token_id"] = eos
        return dataclasses.replace(config, values=values), known, ids[1:]

    def _with_block_size(self, config: Config) -> Config:
        """A config.json with the block size at the family's own key; warns of one that names none."""
        key = self.keys["block_size"]
        sizes = {name: config.get(name) for name in BLOCK_SIZE if config.get(name) is not None}
        if len({*map(repr, sizes.values())}) > 1:
            named = " and ".join(f"{name}={shown(value)}" for name, value in sizes.items())
            raise ValueError(f"{config.where}: {named} must be equal: each is the block size")
        size = next(iter(sizes.values()), self.blocks)
        if size is None:
            size = self.defaults["block_size"]
            message = f"{config.where} names no {key}: block_size={size}, the default of {self.model_type}, "
            message += "stands in for it; model.replace_spec(block_size=...) sets another"
            warn(message, BlockSizeWarning)
        return dataclasses.replace(config, values=config.values | {key: size})

    def written(self, spec: ModelSpec) -> dict[str, Any]:
        """The keys of config.json that a spec determines; an unknown limit on positions is left out."""
        if self.expert_keys and spec.experts is None:
            raise ValueError(f"experts=None is not supported by {self.model_type}: its layers have experts")
        fields = {key: getattr(spec, name) for name, key in self.keys.items() if name != "rope_base"}
        fields |= {key: getattr(spec.experts, name) for name, key in self.expert_keys.items()}
        known = {key: value for key, value in fields.items() if value is not None}
        known["eos_token_id"] = [*spec.ends] if spec.stop_ids else spec.eos_id
        return {
            "model_type": self.model_type, **known, "eot_token_id": spec.eot_id, **self.rope(spec),
            **self.more(spec),
        }  # fmt: skip

    def rope(self, spec: ModelSpec) -> dict[str, Any]:
        """The keys of rotary embedding, in the spelling of published files."""
        part = {} if spec.rope_width is None else {"partial_rotary_factor": spec.rotated / spec.head_dim}
        scaling = written_scaling(spec, self.scaling_type, self.rope_key)
        if self.rope_key == "rope_parameters":
            return {self.rope_key: {**(scaling or {}), "rope_theta": spec.rope_base, **part}}
        return {self.keys["rope_base"]: spec.rope_base, self.rope_key: scaling, **part}

    def respelled_rope(
        self, values: Mapping[str, Any], spec: ModelSpec, original: Mapping[str, Any], changed: bool
    ) -> dict[str, Any]:
        """The keys of a file that came with rope_parameters, in a spelling that the authors' code reads.

        Args:
          values: The file's keys for the spec.
          spec: The model.
          original: The file's keys as they came.
          changed: Whether the spec is not the one that the file came with.
        """
        rope = self.rope(spec)
        if not self.newer_rope:
            return {key: value for key, value in {**values, **rope}.items() if key != "rope_parameters"}
        rest = {key: value for key, value in values.items() if key in original or key not in rope}
        if not changed:
            return rest
        scaling = rope.pop(self.rope_key) or {"rope_type": "default"}
        return rest | {"rope_parameters": {**scaling, **rope}}

    def made(self, spec: ModelSpec) -> dict[str, Any]:
        """The config.json of a model that never had one."""
        # The first of the supported values; where it is null, an absent key says the same.
        required = {entry.key: entry.allowed[0] for entry in self.requirements}
        given = {key: value for key, value in required.items() if value is not None}
        written = self.written(spec)  # which refuses what the layout cannot hold
        return given | self.template(spec) | written
