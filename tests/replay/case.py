"""One recorded case: what was set, and what came out."""

import dataclasses
import functools
import json
import pathlib
import re
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj


class UnknownSetting(ValueError):
    """A recording was made with a setting that its replay does not read."""

    outcome = "refused"


class Settings(dict):
    """What a recording was made with; knows what has been read of it, so that nothing is ignored."""

    def __init__(self, values: dict):
        super().__init__({k: Settings(v) if isinstance(v, dict) else v for k, v in values.items()})
        self.read: set[str] = set()

    def __getitem__(self, name: str):
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default=None):
        self.read.add(name)
        return super().get(name, default)

    def describes(self, *names: str):
        """Marks what other settings imply, or what only describes this method's recordings."""
        self.read.update(names)

    def only(self, name: str, *supported):
        """The value of a setting that is replayed for some values only, None where it is not recorded.

        Raises:
          UnknownSetting: another value.
        """
        value = self.get(name)
        if value is not None and value not in supported:
            raise UnknownSetting(f"{name}={value!r} is not replayed; supported: {supported}")
        return value

    def unread(self) -> list[str]:
        """Names of the settings that were never looked at."""
        inner = {n: value for n, value in self.items() if n in self.read and isinstance(value, Settings)}
        nested = [f"{name}.{deep}" for name, value in inner.items() for deep in value.unread()]
        return [name for name in self if name not in self.read] + nested


# What describes a recording and its making, and is not a setting of the run.
DESCRIPTION = """
    answer_length answer_seed arrays attention attention_mask_passed base_rope_theta batch
    batch_size cache_ratio_field_returned_by_reference cache_ratio_paper calibration case commit
    computed_fraction dataset_score_levenshtein decoded decoded_without_logits
    diff_when_max_length_not_overridden dropped_for_size dtype eager_check edit_similarity_backend
    effective_rope_theta family fields files input_kind input_seeds interpretations kv_bytes_formula
    left_pads leftover_masks loglik loglik_float64 loglik_weights_perturbed_1e6 longllada_commit
    longllada_repo masked_tail masks_left_at_end mean_recomputed_fraction method min_topk_gap model
    model_class_commit model_class_repo models names nan_confidences_occurred nan_in_logits nfe note occurred
    origin packages patches prompt_length prompt_lengths prompt_seed prompt_shape reference_fixes
    same_sampler_in scaling_factor seeds smallest_selection_margin source source_commit source_file
    source_files source_function source_repo split status status_reason steps_note tie_breaking
    tokens_per_forward tokens_per_step tokens_that_differ_from_no_eviction top_k_source torch torch_seed
    total_forward_steps triggered_steps unpatched_topk_gives_same_tokens versions weights_dtype
    why_this_source
"""
MEASURED = re.compile("max_abs_diff|_vs_|_docs|^robust|^diff_")  # comparisons made while recording


@dataclasses.dataclass(frozen=True)
class Case:
    """A folder with case.json (settings) and trace.npz (arrays).

    Attributes:
      folder: where they are.
      widths: of partial steps in all replays; the policies' own if None.
    """

    folder: pathlib.Path
    widths: ClassVar[tuple[int, ...] | None] = None

    @property
    def method(self) -> str:
        return self.folder.parent.name

    @property
    def name(self) -> str:
        return f"{self.method}/{self.folder.name}"

    @functools.cached_property
    def settings(self) -> Settings:
        return Settings(json.loads((self.folder / "case.json").read_text()))

    def check_everything_was_read(self):
        """Raises UnknownSetting if the replay ignored a setting that may matter."""
        described = DESCRIPTION.split()
        unread = [(name, name.split(".")[0]) for name in self.settings.unread()]
        if ignored := [name for name, top in unread if top not in described and not MEASURED.search(top)]:
            raise UnknownSetting(f"{self.name}: the replay does not read {', '.join(ignored)}")

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "trace.npz") as file:
            return {name: file[name] for name in file.files}

    @property
    def status(self) -> str:
        return self.settings["status"]

    @property
    def restores_oddities(self) -> bool:
        """`optional` cases replay with the options that restore the reference's own behavior."""
        return self.status == "optional"

    @property
    def mask_id(self) -> int:
        """The mask's id, as recordings of different methods call it."""
        return self.settings.get("mask_token_id", self.settings.get("mask_id"))

    @property
    def prompt_mask(self) -> np.ndarray | None:
        """False at left padding; None without."""
        s, prompt = self.settings, self.arrays["prompt"]
        if pads := s.get("left_pads") or s.get("left_padding"):
            return np.arange(prompt.shape[1]) >= np.asarray(pads)[:, None]
        return prompt != s["pad_id"] if s.get("left_pad") else None

    def generate(self, model: dj.Model, **options) -> dj.Output:
        """Of the case's prompts, with a trace."""
        options |= {"prompt_mask": self.prompt_mask, "widths": self.widths, "trace": True}
        return dj.generate(model, self.arrays["prompt"], **options)

    def noise(self) -> dj.samplers.RecordedNoise | None:
        """The case's draws: Gumbel noise for tokens, uniform or Gumbel noise for the order."""
        found = self._token_noise(), self._order_noise()
        if all(noise is None for noise in found):
            return None
        return dj.samplers.RecordedNoise(*(jnp.asarray(0 if a is None else a, jnp.float32) for a in found))

    def _token_noise(self) -> np.ndarray | None:
        arrays = self.arrays
        if "noise_uniform" in arrays:
            rows, gumbel = arrays["noise_rows"], -np.log(-np.log(arrays["noise_uniform"]))
        elif "token_noise_exp" in arrays:
            rows, gumbel = arrays["token_noise_rows"], -np.log(arrays["token_noise_exp"].astype(np.float64))
        else:
            return None
        steps, *places = arrays["tokens"].shape
        dense = np.zeros((steps - 1, *places, gumbel.shape[1]))
        dense[tuple(rows.T)] = gumbel
        return dense

    def _order_noise(self) -> np.ndarray | None:
        for uniform in ("random_confidence", "origin_uniform"):
            if uniform in self.arrays:
                return np.nan_to_num(self.arrays[uniform], nan=2.0)  # drawn for masked positions only
        drawn = self.arrays.get("alg_noise_exp")
        return None if drawn is None else -np.log(np.nan_to_num(drawn.astype(np.float64), nan=1.0))

    def model(self, **spec_changes) -> dj.Model:
        """The case's checkpoint with its mask's id and its overrides."""
        overrides = self.settings.get("config_overrides") or Settings({})
        overrides.describes("max_sequence_length", "max_position_embeddings")  # no limits here
        dtype = self.settings.get("dtype", "float32")
        # Recordings of one kind of model may lie next to those that brought its checkpoints.
        here = self.folder.parents[1]
        folders = [here / "models", *sorted(here.parent.glob("*/models"))]
        model = load(next(f / s for f in folders if (f / (s := self.settings["model"])).is_dir()), dtype)
        ids = {"mask_id": overrides.get("mask_token_id", self.mask_id)}
        ids["rope_base"] = overrides.get("rope_theta")
        return model.replace_spec(**{k: v for k, v in ids.items() if v is not None} | spec_changes)


@functools.cache
def load(path: pathlib.Path, dtype: str) -> dj.Model:
    """A checkpoint, read once per dtype."""
    return dj.load(path, dtype=jnp.dtype(dtype))


def find(root: pathlib.Path, method: str | None = None) -> list[Case]:
    """All cases under a folder, by name."""
    folders = sorted(p.parent for p in root.glob("*/*/case.json"))
    return [case for case in map(Case, folders) if method in (None, case.method)]
