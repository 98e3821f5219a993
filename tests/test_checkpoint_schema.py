"""spec.json and config.json: one schema with ranges, and exactly the tensors that it implies."""

import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.checkpoint import convert
from tests import refuses, table
from tests.checkpoints import rewrite, tiny, write_hf

# Field of ModelSpec, key of LLaDA's config.json, a value outside, and what is said of it.
OUTSIDE = table("configs")["outside"]


pytestmark = pytest.mark.usefixtures("unannotated")


@pytest.fixture(scope="module")
def originals(tmp_path_factory) -> Path:
    place = tmp_path_factory.mktemp("originals")
    convert(write_hf(place / "hf", tiny()), place / "jax")
    return place


@pytest.fixture
def places(originals, tmp_path) -> Path:
    return shutil.copytree(originals, tmp_path / "places")


def specify(places: Path, **changes):
    """Changes fields of the spec in spec.json."""
    file = places / "jax" / "spec.json"
    rewrite(file, spec=json.loads(file.read_text())["spec"] | changes)


@pytest.mark.parametrize(("field", "key", "value", "rule"), OUTSIDE)
def test_values_outside_are_refused_by_both_files(places, field, key, value, rule):
    rewrite(places / "hf" / "config.json", **{key: value})
    specify(places, **{field: value})
    for kind in ("hf", "jax"):
        with pytest.raises(ValueError, match=rule) as error:
            dj.load(places / kind)
        assert str(places / kind) in str(error.value)


REST = [
    ({"format": True}, "format=True is not supported; supported: 3 or 4"),
    ({"format": [1]}, r"format=\[1\] is not supported"),
    ({"dtype": None}, 'dtype=None is not supported; supported: "float32" or "bfloat16"'),
    ({"dtype": "bfloat16"}, "layer_000.* describes|embed.* describes"),
    ({"spec": 3}, "spec=3 must be an object"),
    ({"more": 1}, "unknown keys more"),
    ({"spec": {}}, "missing .* 'family', 'layers'"),
    ({"spec.shifted": "false"}, "spec.json: shifted='false'"),
    ({"spec.family": "gpt"}, "spec.json: family='gpt'"),
    ({"spec.heads": 3}, "spec.json: heads=3"),
    ({"spec.head_dim": 7}, "spec.json: head_dim=7"),
    ({"spec.more": 7}, "spec.json: .*'more'"),
]


@pytest.mark.parametrize(("changes", "rule"), REST)
def test_the_rest_of_a_spec_file(places, changes, rule):
    ((key, value),) = changes.items()
    if key.startswith("spec."):
        specify(places, **{key.removeprefix("spec."): value})
    else:
        rewrite(places / "jax" / "spec.json", **changes)
    with pytest.raises(ValueError, match=rule) as error:
        dj.load(places / "jax")
    assert str(places / "jax") in str(error.value)


def test_whole_numbers_are_numbers(places):
    specify(places, rope_base=10**12)
    model = dj.load(places / "jax")
    assert type(model.spec.rope_base) is float
    assert np.isfinite(dj.forward(model, np.array([[1, 2, 3]]))).all()


def test_units_that_changed_places_or_are_too_many(places):
    params = places / "jax" / "params"
    (params / ".DS_Store").write_text("")  # hidden files next to units do not matter
    (params / "layer_003").mkdir()
    refuses(r"holds layer_003, which spec\.json does not describe", dj.load, places / "jax")
    (params / "layer_003").rmdir()
    for old, new in (("layer_000", "x"), ("layer_001", "layer_000"), ("x", "layer_001")):
        (params / old).rename(params / new)
    refuses("layer_000 holds the unit layer_001", dj.load, places / "jax")


def test_numbers_and_metadata_of_a_unit_that_are_broken(places):
    unit = places / "jax" / "params" / "norm"
    # One parameter: of several, those still being read when the first fails answer to a closed event loop.
    for file in unit.rglob("d/*"):
        file.write_bytes(file.read_bytes()[:10])
    refuses("norm cannot be read", dj.load, places / "jax")
    for content in ("null", "3", "[]", "{}", '{"tree_metadata": null}', "{", "[" * 100_000):
        (unit / "manifest.ocdbt").write_text(content)
        refuses(f"{unit} (cannot be read|holds)", dj.load, places / "jax")


def test_json_that_is_nested_too_deeply_or_too_large(places):
    for name in ("hf/model.safetensors.index.json", "hf/config.json", "jax/spec.json"):
        (places / name).write_text('{"a":' + "[" * 100_000)
        refuses(f"{name} is not valid JSON: nested too deeply", dj.load, (places / name).parent)
    os.truncate(places / "hf" / "config.json", 2**40)  # takes no room
    refuses(r"config\.json has 1099511627776 bytes; .* at most", dj.load, places / "hf")


def test_a_factor_that_leaves_the_range(originals):
    for factor in (1e20, 1e-20):
        message = f"rope_factor={factor} is too large or too small: rope_base="
        refuses(re.escape(message), dj.load, originals / "hf", rope_factor=factor)
