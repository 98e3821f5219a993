"""What a family's checkpoints have in common: how its config.json is read, and written."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from dllm_jax.checkpoint.config import KINDS, Config, Requirement
from dllm_jax.checkpoint.names.table import TensorName
from dllm_jax.nn.spec import ModelSpec

DENSE = Requirement("num_experts", (None,))  # a relative with experts would be read as if it had none


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """A checkpoint layout.

    Attributes:
      name: `ModelSpec.family`.
      model_type: config.json's `model_type`.
      names: its tensors.
      keys: of config.json, by the field of `ModelSpec` that they hold; read and written by the same table.
      expert_keys: the same of `ExpertSpec`; none of dense models.
      requirements: keys that hold no field, and what this library supports of them.
      fixed: fields of `ModelSpec` that all its models share.
      defaults: of keys that published files leave out, by field.
      tokens: ids of the mask and of end-of-turn, by the vocabulary size of published models whose config.json
        does not name them.
      adjusted: another spelling of a config.json -> the one that `keys` reads.
      own: config.json and what `keys` hold -> the fields that no key holds alone.
      more: spec -> what it determines beside `keys`.
      template: spec -> keys that hold no field, for a model that never had a config.json.
    """

    name: str
    model_type: str
    names: tuple[TensorName, ...]
    keys: Mapping[str, str]
    expert_keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    requirements: tuple[Requirement, ...]
    fixed: Mapping[str, Any]
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    tokens: Mapping[int, tuple[int | None, int]] = dataclasses.field(default_factory=dict)
    adjusted: Callable[[Config], Config] = lambda config: config
    own: Callable[[Config, dict[str, Any]], dict[str, Any]] = lambda config, fields: {}
    more: Callable[[ModelSpec], dict[str, Any]] = lambda spec: {}
    template: Callable[[ModelSpec], dict[str, Any]]

    def read(self, config: Config) -> ModelSpec:
        """The spec that a config.json describes.

        Raises:
          ValueError: naming the key, its value and what is supported.
        """
        config = self.adjusted(config)
        # A window counts only where it is both set and switched on.
        window = (Requirement("sliding_window", (None,)),)
        window = window if config.read("use_sliding_window", bool, default=False) else ()
        config.check((*self.requirements, *window, *(() if self.expert_keys else (DENSE,))))
        kinds = config.values.get("layer_types")
        if kinds is not None and (not isinstance(kinds, list) or {*map(str, kinds)} - {"full_attention"}):
            raise ValueError(f"{config.where}: layer_types={kinds!r} must all be 'full_attention'")

        # `save_hf` writes null for a model without end-of-turn, which published files do not mention.
        vocab = config.read(self.keys["vocab"], KINDS["vocab"], config.values.get("vocab_size"))
        mask, end = self.tokens.get(vocab, (None, None))
        known = {"mask_id": mask, "eot_id": None if "eot_token_id" in config.values else end}
        fields = config.fields({**self.keys, "eot_id": "eot_token_id"}, **{**known, **self.defaults})
        return ModelSpec(**{**fields, **self.fixed, **self.own(config, fields)}, family=self.name)

    def written(self, spec: ModelSpec) -> dict[str, Any]:
        """The keys of config.json that a spec determines; an unknown limit on positions is left out."""
        fields = {key: getattr(spec, name) for name, key in self.keys.items()}
        fields |= {key: getattr(spec.experts, name) for name, key in self.expert_keys.items()}
        known = {key: value for key, value in fields.items() if value is not None}
        return {"model_type": self.model_type, **known, "eot_token_id": spec.eot_id, **self.more(spec)}

    def made(self, spec: ModelSpec) -> dict[str, Any]:
        """The config.json of a model that never had one."""
        # The first of the supported values; where it is null, an absent key says the same.
        required = {entry.key: entry.allowed[0] for entry in self.requirements}
        given = {key: value for key, value in required.items() if value is not None}
        return given | self.template(spec) | self.written(spec)
