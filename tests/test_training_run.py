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
import pytest

from dllm_jax.nn.model import Model
from dllm_jax.training import Batch, Batches, TrainConfig, begin, train, train_step
from dllm_jax.training.run_directory import read_log
from tests.models import cast, tiny

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


def test_fine_tuning_learns_a_batch_and_leaves_the_model_alone():
    model, batch = tiny("llada"), Counting().batch({"reviews": 0}, 0)
    before = np.array(model.params["embed"])
    config = TrainConfig(steps=180, learning_rate=1e-2, warmup=5, review_every=20, save_every=20)
    run = train(model, Batches(lambda step: batch), config, progress=False)
    assert run.log[0]["accuracy"] < 0.5
    assert run.log[-1]["accuracy"] > 0.95
    assert (before == model.params["embed"]).all()


def test_bfloat16_parameters_stay_bfloat16():
    narrow = cast(tiny("llada"), jnp.bfloat16)
    batch = Counting().batch({"reviews": 0}, 0)
    step = functools.partial(train_step, spec=narrow.spec, config=CONFIG)
    state, metrics = jax.eval_shape(step, begin(narrow, CONFIG), batch)
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {jnp.dtype(jnp.bfloat16)}
    assert metrics.loss.dtype == jnp.float32


def test_a_diverging_run_stops():
    model = tiny("llada")
    params = jax.tree.map(lambda p: p * jnp.nan, model.params)
    with pytest.raises(FloatingPointError, match="at step 2"):
        train(Model(params, model.spec), Counting(), CONFIG, progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"learning_rate": 0.0}, "learning_rate=0.0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"warmup": 8, "decay": 3}, "warmup=8 and decay=3 must fit into steps=10"),
        ({"clip": -1.0}, "clip=-1.0"),
        ({"beta2": 1.0}, "beta2=1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"save_every": 3}, "save_every=3 must be a multiple of review_every=2"),
    ],
)
def test_a_bad_option_is_refused(changes, message):
    options = {"steps": 10, "warmup": 0, "review_every": 2, "save_every": 4} | changes
    with pytest.raises(ValueError, match=message):
        TrainConfig(**options)
