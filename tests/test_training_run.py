import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dllm_jax.nn.model import Model
from dllm_jax.training import (
    Batch,
    Batches,
    TrainConfig,
    abstract_state,
    begin,
    model_of,
    prepare,
    train,
    train_step,
)
from dllm_jax.training.run_directory import RunDirectory, read_log
from tests.models import cast, separate, tiny

CONFIG = TrainConfig(steps=10, learning_rate=3e-3, warmup=2, decay=3, review_every=2, save_every=4)


class Counting:
    """A source whose memory and batches depend on its reviews; may kill its process at a step."""

    def __init__(self, kill_at: int | None = None):
        self.kill_at = kill_at

    def begin(self):
        return {"reviews": 0}

    def batch(self, memory, step) -> Batch:
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        ids = np.random.default_rng([step, memory["reviews"]]).integers(0, 30, (4, 8)).astype(np.int32)
        return Batch(ids[:, :3], ids[:, 3:])

    def review(self, memory, model: Model, step):
        return {"reviews": memory["reviews"] + 1}


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    whole = train(tiny("llada"), Counting(), CONFIG, directory=tmp_path / "whole", progress=False)
    script = (
        "import tests.conftest; from tests.test_training_run import *\n"  # the same compiler settings
        f"cut = Path({str(tmp_path / 'cut')!r})\n"
        "train(tiny('llada'), Counting(7), CONFIG, directory=cut, progress=False)"
    )
    killed = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parents[1])
    assert killed.returncode == -9
    assert (tmp_path / "cut" / "checkpoints" / "4").is_dir()
    resumed = train(tiny("llada"), Counting(), CONFIG, directory=tmp_path / "cut", progress=False)
    assert resumed.memory == whole.memory == {"reviews": 5}
    chex.assert_trees_all_equal(resumed.model, whole.model, strict=True)
    without_time = lambda log: [{k: v for k, v in entry.items() if k != "seconds"} for entry in log]
    assert without_time(resumed.log) == without_time(whole.log)


def test_a_finished_run_is_returned_as_it_is(tmp_path):
    first = train(tiny("llada"), Counting(), CONFIG, directory=tmp_path, progress=False)
    again = train(tiny("llada"), Counting(kill_at=0), CONFIG, directory=tmp_path, progress=False)
    assert (again.model.params["embed"] == first.model.params["embed"]).all()
    assert again.log == first.log
    with pytest.raises(ValueError, match="already holds step 10"):
        train(tiny("llada"), Counting(), TrainConfig(steps=5, warmup=0), directory=tmp_path, progress=False)


def test_the_log_survives_a_torn_line(tmp_path):
    train(tiny("llada"), Counting(), CONFIG, directory=tmp_path, progress=False)
    file = tmp_path / "log.jsonl"
    entries = [json.loads(line) for line in file.read_text().splitlines()]
    assert [entry["step"] for entry in entries] == [2, 4, 6, 8, 10]
    assert entries[-1]["tokens"] == 10 * 4 * 8
    file.write_text(file.read_text() + '{"step": 11}\n{"step": 1')
    run = train(tiny("llada"), Counting(), CONFIG, directory=tmp_path, progress=False)
    assert run.log == entries
    assert read_log(file) == entries


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_kill_while_the_log_is_rewound_loses_no_entry(tmp_path, moment, monkeypatch):
    """Whenever it comes, the old log is whole; and the new one is on the disk before it takes its place."""
    files, entries = RunDirectory(tmp_path, {}), [{"step": step, "note": "é"} for step in range(10)]
    for entry in entries:
        files.append(entry)
    done = []

    def killed(name, call):
        def instead(*args, **options):
            if name == moment:
                raise KeyboardInterrupt
            done.append(name)
            return call(*args, **options)

        return instead

    with monkeypatch.context() as patch:
        patch.setattr(json, "dumps", killed("write", json.dumps))
        patch.setattr(os, "fsync", killed("fsync", os.fsync))
        patch.setattr(Path, "replace", killed("replace", Path.replace))
        with pytest.raises(KeyboardInterrupt):
            files.rewind(6)
    moments = ["write", "fsync", "replace"]
    assert list(dict.fromkeys(done)) == moments[: moments.index(moment)]
    assert read_log(files.log) == entries
    assert files.rewind(6) == entries[:7] == read_log(files.log)


@pytest.mark.parametrize("line", ["{broken", "[]", '{"loss": 1}', '{"step": "1"}', "[" * 100_000, "\udcff"])
def test_a_log_that_is_none_is_named(tmp_path, line):
    file = tmp_path / "log.jsonl"
    file.write_bytes(f'{{"step": 1}}\n{line}\n'.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"log\.jsonl:2: not an entry of a log"):
        read_log(file)


def test_fine_tuning_learns_a_batch_and_leaves_the_model_alone():
    model, batch = tiny("llada"), Counting().batch({"reviews": 0}, 0)
    before = np.array(model.params["embed"])
    config = TrainConfig(steps=180, learning_rate=1e-2, warmup=5, review_every=20, save_every=20)
    run = train(model, Batches(lambda step: batch), config, progress=False)
    assert run.log[0]["accuracy"] < 0.5
    assert run.log[-1]["accuracy"] > 0.95
    assert (before == model.params["embed"]).all()


@pytest.mark.parametrize("masters", [True, False])
def test_a_bfloat16_model_has_float32_state_unless_told_otherwise(masters):
    narrow = cast(tiny("llada"), jnp.bfloat16)
    batch = Counting().batch({"reviews": 0}, 0)
    setup = prepare(narrow, dataclasses.replace(CONFIG, master_weights=masters))
    state, metrics = jax.eval_shape(functools.partial(train_step, setup=setup), begin(narrow, setup), batch)
    dtype = jnp.dtype(jnp.float32 if masters else jnp.bfloat16)
    floats = [leaf for leaf in jax.tree.leaves((state.params, state.moments)) if leaf.ndim]
    assert {leaf.dtype for leaf in floats} == {dtype}
    assert metrics.loss.dtype == jnp.float32
    assert model_of(narrow, begin(narrow, setup), setup).dtype == jnp.bfloat16


def resumed(tmp_path, model=None, **changes):
    """A run of 4 steps that goes on to step 10 with changes."""
    model, first = model or tiny("llada"), dataclasses.replace(CONFIG, steps=4, decay=0)
    given = {"optimizer": changes.pop("before", None)}
    train(model, Counting(), first, directory=str(tmp_path), progress=False, **given)
    after = changes.pop("model_now", model)
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    config = dataclasses.replace(CONFIG, **({"decay": 0} | {k: changes[k] for k in names & set(changes)}))
    rest = given | {k: v for k, v in changes.items() if k not in names}
    return train(after, Counting(), config, directory=tmp_path, progress=False, **rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1e-3}, "learning_rate=0.003 then, 0.001 now"),
        ({"seed": 1}, "seed=0 then, 1 now"),
        ({"muon": 0.1}, "muon=None then, 0.1 now"),
        ({"warmup": None}, "warmup=2 then, 5 now"),
        ({"seed": 1, "beta1": 0.5}, "beta1=0.9 then, 0.5 now; seed=0 then, 1 now"),
        ({"seed": 1, "beta1": 0.5, "allow_changes": ["seed"]}, r": beta1=0.9 then, 0.5 now\. "),
        ({"master_weights": False}, "master_weights=True then, False now"),
        ({"allow_changes": ["lr"]}, r"allow_changes=\['lr'\] must be among steps, learning_rate"),
        ({"model_now": tiny("llada").replace_spec(mask_id=56)}, "spec.mask_id=59 then, 56 now"),
        ({"model_now": cast(tiny("llada"), jnp.bfloat16)}, "dtype='float32' then, 'bfloat16' now"),
        (
            {"trainable": {"embed": False, "layers": True, "norm": True, "head": True}},
            r"trainable\['embed'\]=None then, False now; frozen=0 then, \d+ now",
        ),
    ],
)  # fmt: skip
def test_a_changed_configuration_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        resumed(tmp_path, **changes)


def test_another_optimizer_is_refused_by_its_numbers(tmp_path):
    before, now = optax.adamw(optax.cosine_decay_schedule(1e-3, 10)), optax.adamw(1e-3)
    first = TrainConfig(steps=2, review_every=2, save_every=2)
    run = functools.partial(train, tiny("llada"), Counting(), first, directory=tmp_path, progress=False)
    run(optimizer=before)
    again = run(optimizer=optax.adamw(optax.cosine_decay_schedule(1e-3, 10)))
    assert len(again.log) == 1
    for other in (optax.adamw(optax.cosine_decay_schedule(1e-3, 20)), now, None):
        with pytest.raises(ValueError, match=r"configuration: optimizer='\w{64}' then, .* now\. "):
            run(optimizer=other)
    with pytest.raises(ValueError, match=r"holds another model, optimizer or trainable: moments.* absent"):
        run(optimizer=optax.sgd(1e-3, momentum=0.9), allow_changes=["optimizer"])


def test_numbers_in_the_state_or_in_closures_make_another_optimizer(tmp_path):
    model, first = tiny("llada"), TrainConfig(steps=1, review_every=1, save_every=1)
    scaled = lambda by: optax.stateless(lambda updates, params: jax.tree.map(lambda u: u * by, updates))
    rates = optax.inject_hyperparams(optax.sgd)
    for i, (one, again, other) in enumerate(
        [
            (rates(0.1), rates(0.1), rates(0.2)),
            (scaled(jnp.float32(0.1)), scaled(jnp.float32(0.1)), scaled(jnp.float32(0.2))),
        ]
    ):
        run = functools.partial(train, model, Counting(), first, directory=tmp_path / str(i), progress=False)
        run(optimizer=one)
        run(optimizer=again)
        with pytest.raises(ValueError, match="optimizer="):
            run(optimizer=other)


def test_what_changes_no_step_that_was_done_is_free(tmp_path):
    changed = resumed(tmp_path / "a", learning_rate=1e-3, allow_changes=["learning_rate"], save_every=2)
    same = resumed(tmp_path / "b", decay=3, remat=True, accumulate=2)
    assert changed.log[1] != same.log[2]
    with pytest.raises(ValueError, match="steps=10 then, 12 now; decay=3 then, 2 now"):
        train(
            tiny("llada"), Counting(), dataclasses.replace(CONFIG, steps=12, decay=2),
            directory=tmp_path / "b", progress=False,
        )  # fmt: skip


def test_frozen_parameters_of_another_model_are_refused(tmp_path):
    model, only = tiny("llada"), {"embed": False, "layers": True, "norm": False, "head": False}
    other = Model(model.params | {"head": model.params["head"].at[3, 3].add(1e-3)}, model.spec)
    options = {"directory": tmp_path, "trainable": only, "progress": False}
    run = lambda each: train(each, Counting(), TrainConfig(steps=2, review_every=2, save_every=2), **options)
    assert run(model).log == run(model).log
    with pytest.raises(ValueError, match=r"frozen=\d+ then, \d+ now"):
        run(other)
    assert abstract_state(model, prepare(model, CONFIG, trainable=only)).params["head"] is None


def test_stacked_layers_do_not_resume_as_separate_ones(tmp_path):
    with pytest.raises(ValueError, match=r"holds another model, .* is absent there, float32"):
        resumed(tmp_path, model_now=separate(tiny("llada")))


def test_a_diverging_run_stops():
    model = tiny("llada")
    params = jax.tree.map(lambda p: p * jnp.nan, model.params)
    with pytest.raises(FloatingPointError, match="at step 2"):
        train(Model(params, model.spec), Counting(), CONFIG, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"steps": float("nan")}, "steps=nan must be a whole number of at least 1"),
        ({"steps": 10**6, "warmup": 2.5}, "warmup=2.5 must be a whole number of at least 0, or None for 100"),
        ({"learning_rate": None}, r"learning_rate=None must be a number in \(0, inf\)"),
        ({"prompt_isolation": 1.5}, r"prompt_isolation=1\.5 must be a number in \[0, 1\]"),
        ({"blocks": (4, 0)}, r"blocks=\(4, 0\) must be .*each a whole number of at least 1"),
        ({"accumulate": 0}, "accumulate=0 must be a whole number of at least 1"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"warmup": 8, "decay": 3}, "warmup=8 and decay=3 must fit into steps=10"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"muon": 0.0}, r"muon=0\.0 must be a number in \(0, inf\), or None for AdamW"),
        ({"beta2": 1.0}, "beta2=1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"warmup": None, "decay": 11}, "warmup=0 and decay=11 must fit into steps=10"),
        ({"save_every": 3}, "save_every=3 must be a multiple of review_every=2"),
    ],
)
def test_a_bad_option_is_refused(changes, message, unannotated):
    options = {"steps": 10, "warmup": 0, "review_every": 2, "save_every": 4} | changes
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)


def test_the_warm_up_is_shorter_in_short_runs():
    warmups = [TrainConfig(steps=steps).warmup_steps for steps in (1, 10, 199, 200, 400, 10**6)]
    assert warmups == [0, 5, 99, 100, 100, 100]
    assert TrainConfig(steps=100, decay=60).warmup_steps == 20
    assert TrainConfig(steps=10, warmup=0).warmup_steps == 0
