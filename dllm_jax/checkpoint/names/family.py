"""Description of a family of checkpoints: how its config.json is read and written."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dllm_jax.checkpoint.config import BlockSizeWarning, Config, Requirement
from dllm_jax.checkpoint.names import as_llama
from dllm_jax.checkpoint.names.foreign import foreign
from dllm_jax.checkpoint.names.rope import Key, read_rope, written_scaling
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec
from dllm_jax.options import PositiveInt, shown

DENSE = Requirement("num_experts", (None,))  # a relative with experts would be read as if it had none
BLOCK_SIZE = ("block_size", "block_length", "bd_size")  # spellings of one number


class Tokens(NamedTuple):
    """Ids of special tokens; None where config.json has to name them."""

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
      expert_keys: the same of `ExpertSpec`; none of dense models.
      requirements: keys that hold no field, and what this library supports of them.
      fixed: fields of `ModelSpec` that all its models share.
      defaults: Values of keys that published files leave out, by field.
      tokens: ids of special tokens, by the vocabulary size of published models whose config.json does not
        name them.
      blocks: block size of all published models of a family none of whose config.json names it.
      scaling_type: key of the type in `rope_scaling`.
      rope_key: Key of the object that holds rotary embedding in published files. In "rope_parameters" stand
        the base and the growth of queries too.
      newer_rope: Whether the authors' code reads "rope_parameters" as well, so that a file keeps them.
      also_read: Keys of config.json that `adjusted` and `own` read, or judge.
      adjusted: another spelling of a config.json -> the one that `keys` reads.
      own: config.json, and the fields that `keys` and rotary embedding hold -> those that no key holds alone.
      more: spec -> what it determines besides `keys`.
      template: spec -> keys that hold no field, for a model that never had a config.json.
    """

    name: str
    model_type: str
    classes: tuple[str, ...] = ()
    signs: Callable[[Config], tuple[str, ...]] = lambda config: ()
    unsigned: bool = True
    names: tuple[TensorName, ...] = as_llama.NAMES
    keys: Mapping[str, str] = dataclasses.field(default_factory=lambda: as_llama.KEYS)
    expert_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    requirements: tuple[Requirement, ...] = as_llama.REQUIREMENTS
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: Mapping[int, Tokens] = dataclasses.field(default_factory=dict)
    blocks: int | None = None
    scaling_type: str = "rope_type"
    rope_key: Key = "rope_scaling"
    newer_rope: bool = False
    also_read: tuple[str, ...] = ()
    adjusted: Callable[[Config], Config] = lambda config: config
    own: Callable[[Config, dict[str, Any]], dict[str, Any]] = lambda config, fields: {}
    more: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}
    template: Callable[[ModelSpec], dict[str, Any]]

    def read(self, config: Config) -> ModelSpec:
        """The spec that a config.json describes.

        Raises:
          ValueError: naming the key, its value and what is supported.
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
        spec = ModelSpec(**{**fields, **self.fixed, **self.own(config, fields)}, family=self.name)
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
        if mask := config.generation.get("mask_token_id") or published.mask:
            known["mask_id"] = mask
        values = {key: value for key, value in config.values.items() if key != "eos_token_id"}
        if (eos := ids[0] if ids else published.eos) is not None:
            values["eos_token_id"] = eos
        return dataclasses.replace(config, values=values), known, ids[1:]

    def _with_block_size(self, config: Config) -> Config:
        """A config.json with the block size at the family's own key; warns of one that names none."""
        key = self.keys["block_size"]
        found = {name: config.get(name) for name in BLOCK_SIZE if config.get(name) is not None}
        if len({*map(repr, found.values())}) > 1:
            named = " and ".join(f"{name}={shown(value)}" for name, value in found.items())
            raise ValueError(f"{config.where}: {named} must be equal: both are the block size")
        size = next(iter(found.values()), self.blocks)
        if size is None:
            size = self.defaults["block_size"]
            message = f"{config.where} names no {key}: block_size={size}, the default of {self.model_type}, "
            message += "stands in for it; model.replace_spec(block_size=...) sets another"
            warnings.warn(message, BlockSizeWarning, stacklevel=2)
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
