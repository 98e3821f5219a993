"""Low-rank adapters: what they compute, how they train, and the files of Hugging Face PEFT."""

import dataclasses
import functools
import json
import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import dllm_jax as dj
from dllm_jax import lora
from dllm_jax.checkpoint import save_hf
from dllm_jax.checkpoint.families import units_of
from dllm_jax.checkpoint.names.table import part_to_hf
from dllm_jax.nn.low_rank import adapted, is_low_rank
from dllm_jax.nn.parameters import layer_of
from dllm_jax.training import Batch, Batches, TrainConfig, begin, model_of, prepare, train, train_step
from tests import refuses
from tests.models import FAMILIES, cast, families, in_int8, random_tokens, separate, tiny
from tests.policy_cases import matrix

pytestmark = pytest.mark.usefixtures("unannotated")  # callers' types are not checked

ALL = ("q", "k", "v", "o", "gate", "up", "down", "head")
OPTIONS = lora.LoRA(rank=3, alpha=5.0, matrices=ALL)
KEY = jax.random.key(1)
STACKED = lambda model: model


def moved(model: dj.Model, seed: int = 0) -> dj.Model:
    """The model with adapters whose B is not zero."""
    matrices = iter(range(1000))

    def of(leaf):
        if not is_low_rank(leaf):
            return leaf
        drawn = jax.random.normal(jax.random.key(seed + next(matrices)), leaf.b.shape)
        return dataclasses.replace(leaf, b=(0.2 * drawn).astype(leaf.b.dtype))

    return dataclasses.replace(model, params=jax.tree.map(of, model.params, is_leaf=is_low_rank))


@functools.cache
def with_adapters(family: str, form=STACKED) -> dj.Model:
    return moved(lora.attach(form(tiny(family)), OPTIONS, KEY))


def tokens(model: dj.Model) -> np.ndarray:
    return random_tokens(model.spec, 2, 9)


def same(one, other) -> bool:
    equal = lambda a, b: a.dtype == b.dtype and np.array_equal(np.asarray(a), np.asarray(b))
    return jax.tree.all(jax.tree.map(equal, one, other))


@families("dream")
def test_fresh_adapters_change_nothing_and_come_off_again(family):
    model = tiny(family)
    adapted_model = lora.attach(model, OPTIONS, KEY)
    ids = tokens(model)
    np.testing.assert_array_equal(dj.forward(adapted_model, ids), dj.forward(model, ids))
    leaves = (jax.tree.leaves(each) for each in (lora.detach(adapted_model), model))
    assert all(ours is theirs for ours, theirs in zip(*leaves, strict=True))
    assert lora.options_of(adapted_model) == OPTIONS
    assert "LoRA    q, k, v, o, gate, up, down, head; rank 3, alpha 5" in repr(adapted_model)

    # A is uniform within 1 / sqrt(inputs), and the same in both forms of the layers.
    a = np.asarray(adapted_model.params["layers"]["o"].a)
    bound = 1 / np.sqrt(model.spec.heads * model.spec.head_dim)
    assert a.shape == (model.spec.layers, model.spec.heads, model.spec.head_dim, 3)
    assert 0.9 * bound < np.abs(a).max() <= bound
    assert not np.array_equal(a[0], a[1])
    apart = lora.attach(separate(model), OPTIONS, KEY)
    assert same([apart.params["layers"][i]["o"].a for i in range(2)], list(a))
    assert not any(np.any(matrix.b) for matrix in adapted(apart.params))


@matrix("family, form", FAMILIES, (STACKED, separate), today=[("dream", separate)])
def test_merged_matrices_compute_the_same(family, form):
    model = with_adapters(family, form)
    merged = lora.merge(model)
    assert jax.tree.structure(merged) == jax.tree.structure(form(tiny(family)))
    ids = tokens(model)
    ours = dj.forward(model, ids)
    np.testing.assert_allclose(ours, dj.forward(merged, ids), rtol=1e-3, atol=1e-4)
    assert np.abs(ours - dj.forward(form(tiny(family)), ids)).max() > 0.1


def test_int8_matrices_may_have_adapters_but_not_be_merged():
    model = in_int8(tiny("llada"))
    ours = moved(lora.attach(model, OPTIONS, KEY))
    assert np.abs(dj.forward(ours, tokens(model)) - dj.forward(model, tokens(model))).max() > 0.1
    assert ours.weights == "int8"
    refuses("int8 matrices cannot be merged", lora.merge, ours)


def batch(step: int) -> Batch:
    ids = np.random.default_rng(step % 2).integers(0, 30, (8, 8)).astype(np.int32)
    return Batch(ids[:, :3], ids[:, 3:])


def test_training_moves_the_factors_alone_and_goes_on_from_checkpoints(tmp_path):
    base = cast(tiny("dream"), jnp.bfloat16)
    model = lora.attach(base, lora.LoRA(rank=2, matrices=("q", "down")), KEY)
    options = dict(learning_rate=1e-2, warmup=0, review_every=2, save_every=2)
    go = lambda steps, directory=None: train(
        model, Batches(batch), TrainConfig(steps=steps, **options), trainable=lora.trainable,
        directory=directory, progress=False,
    )  # fmt: skip
    first = go(2, tmp_path / "run")
    assert same(lora.detach(first.model).params, base.params)
    assert all(np.any(matrix.b) and matrix.a.dtype == jnp.bfloat16 for matrix in adapted(first.model.params))
    resumed = go(4, tmp_path / "run")
    assert same(resumed.model.params, go(4).model.params)
    assert not same(resumed.model.params, first.model.params)


def test_a_model_with_adapters_says_what_of_it_is_trained():
    """Its matrices are in no adapter's file."""
    model = lora.attach(tiny("llada"), lora.LoRA(rank=2), KEY)
    refuses(
        "trainable=None is not supported by a model with LoRA adapters", prepare, model, TrainConfig(steps=2)
    )
    run = functools.partial(train, model, Batches(batch), TrainConfig(steps=2), progress=False)
    refuses("trainable=None .* Use trainable=lora.trainable", run)
    for everything in (True, lambda params: jax.tree.map(lambda _: True, params)):
        with pytest.warns(UserWarning, match="trains more than the model's LoRA adapters: lora.save") as told:
            prepare(model, TrainConfig(steps=2), trainable=everything)
        assert len(told) == 1
    prepare(model, TrainConfig(steps=2), trainable=lora.trainable)  # warnings are errors
    prepare(tiny("llada"), TrainConfig(steps=2))


def test_muon_takes_adamw_for_the_factors():
    model = lora.attach(tiny("llada"), OPTIONS, KEY)
    config = TrainConfig(steps=2, warmup=0, muon=0.01, learning_rate=1e-2)
    setup = prepare(model, config, trainable=lora.trainable)
    trained = model_of(model, train_step(begin(model, setup), batch(0), setup)[0], setup)
    # The first step of Adam (with Nesterov's momentum) moves every entry that has a gradient equally far.
    for factors in adapted(trained.params):
        b = np.abs(np.asarray(factors.b))
        np.testing.assert_allclose(b[b > 1e-6], b.max(), rtol=0.05)
        assert b.max() > 5e-3


@pytest.mark.exhaustive
def test_a_mesh_trains_the_same():
    model = moved(lora.attach(separate(tiny("llada", vocab=64)), OPTIONS, KEY))
    config = TrainConfig(steps=1, warmup=0)
    losses = []
    for mesh in (None, jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)):
        setup = prepare(model, config, trainable=lora.trainable, mesh=mesh)
        state, metrics = train_step(begin(model, setup), batch(0), setup)
        losses.append((metrics.loss, train_step(state, batch(1), setup)[1].loss))
        if mesh is not None:
            factor = state.params["layers"][0]["q"]
            assert "fsdp" in factor.a.sharding.spec
            assert "tp" in factor.b.sharding.spec
            back = model_of(model, state, setup)
            on_mesh = lora.attach(lora.detach(back), OPTIONS, KEY)
            assert adapted(on_mesh.params)[0].a.sharding.mesh == adapted(back.params)[0].base.sharding.mesh
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def stored(directory) -> dict[str, np.ndarray]:
    return load_file(directory / "adapter_model.safetensors")


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_pefts_files_hold_the_update_of_the_checkpoints_tensors(family, dtype, tmp_path):
    """W + alpha / r B A in the layout of the Hugging Face tensors is the merged model's tensor."""
    model = cast(with_adapters(family), dtype)
    lora.save(model, tmp_path / "adapter", base="some/model")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (3, 5, "some/model")
    factors, merged, plain = stored(tmp_path / "adapter"), lora.merge(model), lora.detach(model)
    count = 0
    for unit in units_of(model.spec):
        params = [m.params if unit.layer is None else layer_of(m.params, unit.layer) for m in (merged, plain)]
        for entry in (entry for entry in unit.entries if entry.leaf in ALL):
            leaves = [np.asarray(each[entry.leaf], np.float32) for each in params]
            ours, before = (part_to_hf(model.spec, entry, leaf) for leaf in leaves)
            stem = f"base_model.model.{entry.name.removesuffix('.weight')}.lora"
            a, b = (factors[f"{stem}_{letter}.weight"] for letter in "AB")
            assert a.shape == (3, before.shape[1])
            assert b.dtype == dtype
            expected = before + 5 / 3 * b.astype(np.float32) @ a.astype(np.float32)
            near = 1e-2 if dtype == jnp.bfloat16 else 1e-5
            np.testing.assert_allclose(ours, expected, rtol=near, atol=1e-6)
            count += 2
    assert count == len(factors) == 2 * (7 * model.spec.layers + 1)

    # And back, bit for bit, in either form of the layers; saved again they are the same file.
    for form in (STACKED, separate):
        back = lora.load(form(cast(tiny(family), dtype)), tmp_path / "adapter")
        assert same(back.params, form(model).params)
        lora.save(back, tmp_path / "again", base="some/model", overwrite=True)
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


@pytest.mark.parametrize(
    ("matrices", "wanted"),
    [
        (("v", "q"), ["q_proj", "v_proj"]), (("down", "head"), ["ff_out"]), (("gate",), ["ff_proj"]),
        (("head",), r"model\.transformer\.ff_out"),
        (("q", "down"), r"model\.transformer\.blocks\.\d+\.q_proj|model\.transformer\.blocks\.\d+\.ff_out"),
    ],
)  # fmt: skip
def test_target_modules_name_no_module_too_many(matrices, wanted, tmp_path):
    """PEFT takes a list by the last names of modules, a text as a pattern of whole names."""
    model = lora.attach(tiny("llada"), lora.LoRA(rank=1, matrices=matrices), KEY)
    path = lora.save(model, tmp_path / "adapter")
    found = json.loads((path / "adapter_config.json").read_text())["target_modules"]
    assert found == wanted
    if isinstance(found, str):
        names = {name.removeprefix("base_model.model.").split(".lora_")[0] for name in stored(path)}
        every = {e.name.removesuffix(".weight") for unit in units_of(model.spec) for e in unit.entries}
        assert {name for name in every if re.fullmatch(found, name)} == names


REFUSED = {
    "matrices='w' must be": lambda: lora.LoRA(matrices="w"),
    r"matrices=\(\) must be": lambda: lora.LoRA(matrices=()),
    "must name each matrix once": lambda: lora.LoRA(matrices=("q", "q")),
    "lora=3 must be": lambda: lora.attach(tiny("llada"), 3, KEY),
    "key=3 must be": lambda: lora.attach(tiny("llada"), OPTIONS, 3),
    "has LoRA adapters already": lambda: lora.attach(with_adapters("llada"), OPTIONS, KEY),
    "head is its embedding": lambda: lora.attach(tiny("llada", tied=True), OPTIONS, KEY),
    "the model has no LoRA adapters": lambda: lora.merge(tiny("llada")),
    r"save lora.merge\(model\)": lambda: save_hf(with_adapters("llada"), "nowhere"),
}


def test_bad_input_is_refused():
    for message, make in REFUSED.items():
        refuses(message, make)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return lora.save(with_adapters("llada"), tmp_path_factory.mktemp("written") / "adapter")


def test_adapters_of_other_kinds_and_models_and_broken_files_are_refused(written, tmp_path):
    config = json.loads((written / "adapter_config.json").read_text())
    shutil.copyfile(written / "adapter_model.safetensors", tmp_path / "adapter_model.safetensors")
    for changes, message in (
        (dict(peft_type="IA3"), "peft_type='IA3' is not supported"),
        (
            dict(use_dora=True, bias="all"),
            r"bias='all' is not .*merge_and_unload.*\n.*use_dora=True is not ",
        ),
        (dict(rank_pattern={"q_proj": 4}), "rank_pattern="),
        (dict(modules_to_save=["lm_head"]), "modules_to_save="),
        (dict(r=4), r"misshaped: .*q_proj.lora_A.weight is \[3, 32\], expected \[4, 32\]"),
        (dict(lora_alpha=None), "required key 'lora_alpha' is null"),
    ):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | changes))
        refuses(message, lora.load, tiny("llada"), tmp_path)
    for model, message in (
        (tiny("dream"), r"no tensor of .* is named base_model\.model\.model\."),
        (tiny("llada", layers=3), r"missing: .*blocks\.2\.q_proj"),
        (tiny("llada", layers=1), r"unmapped: .*blocks\.1\.q_proj"),
    ):
        refuses(message, lora.load, model, written)
    with pytest.raises(FileExistsError):
        lora.save(with_adapters("llada"), written)
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing of the kind")
    refuses("is not a complete safetensors file", lora.load, tiny("llada"), tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    # What is there instead of an adapter is said.
    missing = lambda message: refuses(message, lora.load, tiny("llada"), tmp_path, error=FileNotFoundError)
    (tmp_path / "adapter_model.bin").write_bytes(b"")
    missing(r"adapter_model\.bin would need torch and is not read: save the model as safetensors")
    (tmp_path / "adapter_config.json").rename(tmp_path / "config.json")
    (tmp_path / "adapter_model.bin").rename(tmp_path / "model.safetensors")
    missing(r"adapter_config\.json does not exist; the directory is a Hugging Face checkpoint")


def test_names_in_adapters_of_other_writers(written, tmp_path):
    """Prefixes that wrappers leave are in tests/campaigns/adapters.py."""
    config = json.loads((written / "adapter_config.json").read_text()) | {"target_modules": "all-linear"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    factors = stored(written)
    first = "base_model.model.model.transformer.blocks.0.q_proj.lora_A.weight"
    expert = "base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight"
    for more, message in (
        ({f"module.{first}": factors[first]}, r"tensors are .*q_proj\.lora_A\.weight without the prefixes"),
        (
            {first.replace("model.model.model", "model.model"): factors[first]},
            "are both .* but for prefixes",
        ),
        (
            {first.replace("A.w", "A.a.w"): factors[first], first.replace("A.w", "A.b.w"): factors[first]},
            "holds several adapters: a, b",
        ),
        ({expert: factors[first]}, r"1 tensors update experts or routers .*Merge it with PEFT"),
        ({f"{first}.{i}": factors[first] for i in range(130)}, "and 115 more"),
    ):
        save_file(factors | more, tmp_path / "adapter_model.safetensors")
        refuses(message, lora.load, tiny("llada"), tmp_path)
