"""One recorded case: what was set, and what came out."""

import dataclasses
import functools
import json
import pathlib

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj


@dataclasses.dataclass(frozen=True)
class Case:
    """A folder with case.json (settings) and trace.npz (arrays)."""

    folder: pathlib.Path

    @property
    def method(self) -> str:
        return self.folder.parent.name

    @property
    def name(self) -> str:
        return f"{self.method}/{self.folder.name}"

    @functools.cached_property
    def settings(self) -> dict:
        return json.loads((self.folder / "case.json").read_text())

    @functools.cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        with np.load(self.folder / "trace.npz") as file:
            return {name: file[name] for name in file.files}

    @property
    def status(self) -> str:
        return self.settings["status"]

    @property
    def restores_oddities(self) -> bool:
        """`optional` cases replay with the options that restore the reference's own behaviour."""
        return self.status == "optional"

    def model(self, **spec_changes) -> dj.Model:
        """The case's checkpoint with its overrides."""
        overrides = self.settings.get("config_overrides") or {}
        if "mask_token_id" in overrides:
            spec_changes["mask_id"] = overrides["mask_token_id"]
        model = load(self.folder.parents[1] / "models" / self.settings["model"], self.settings["dtype"])
        if "rope_theta" in overrides:
            spec_changes["rope_base"] = overrides["rope_theta"]
        return model.replace_spec(**spec_changes)


@functools.cache
def load(path: pathlib.Path, dtype: str) -> dj.Model:
    """A checkpoint, read once per dtype."""
    return dj.load(path, dtype=jnp.dtype(dtype))


def find(root: pathlib.Path, method: str | None = None) -> list[Case]:
    """All cases under a folder, by name."""
    folders = sorted(p.parent for p in root.glob("*/*/case.json"))
    return [case for case in map(Case, folders) if method in (None, case.method)]
