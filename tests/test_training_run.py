import dataclasses
import errno
import fcntl
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tyro

from dllm_jax import locks, lora
from dllm_jax.command_line import plain_errors
from dllm_jax.command_line import run as run_command
from dllm_jax.interrupts import uninterrupted
from dllm_jax.nn.model import Model
from dllm_jax.training import (
    Batch,
    Batches,
    TrainConfig,
    abstract_state,
    prepare,
    train,
)
from dllm_jax.training.run_directory import RunDirectory, record_of
from tests import refuses
from tests.campaigns.kills import Counting
from tests.models import cast, separate, tiny

ONLY = {"embed": False, "layers": True, "norm": False, "head": False}
CONFIG = TrainConfig(steps=10, learning_rate=3e-3, warmup=2, decay=3, review_every=2, save_every=4)


class Never(Counting):
    """Has no batch to give."""

    def batch(self, memory, step):
        pytest.fail("trained")


def test_a_finished_run_is_returned_as_it_is_with_its_log(tmp_path):
    """Runs that are killed go on bit for bit: tests/campaigns/kills.py."""
    first = train(tiny("llada"), Counting(), CONFIG, directory=tmp_path, progress=False)
    file = tmp_path / "log.jsonl"
    read = lambda: [json.loads(line) for line in file.read_text().splitlines()]
    entries = read()
    assert [entry["step"] for entry in entries] == [2, 4, 6, 8, 10]
    assert entries[-1]["tokens"] == 10 * 4 * 8
    for log_within in (True, False):  # checkpoints of 0.2.0 hold none
        file.write_text(file.read_text() + '{"step": 11}\n{"step": 1')  # what a kill may leave
        if not log_within:
            shutil.rmtree(tmp_path / "checkpoints/10/log")
        again = train(tiny("llada"), Never(), CONFIG, directory=tmp_path, progress=False)
        assert (again.model.params["embed"] == first.model.params["embed"]).all()
        assert again.log == first.log == entries == read()
    with pytest.raises(ValueError, match="already holds step 10"):
        train(tiny("llada"), Counting(), TrainConfig(steps=5, warmup=0), directory=tmp_path, progress=False)


def test_a_log_of_others_is_not_replaced(tmp_path):
    file, run = tmp_path / "log.jsonl", lambda: RunDirectory(tmp_path, {}).__exit__()
    for content in ("", "\0" * 20, '{"st', '\ufeff{"step": 2, "loss"'):
        file.write_text(content, encoding="utf-8")
        run()
    file.write_text('{"loss": 1.0}\n')
    refuses(r"log\.jsonl that is none of a run, .* Choose another directory", run)
    assert file.read_text() == '{"loss": 1.0}\n'


def test_fine_tuning_learns_a_batch_and_leaves_the_model_alone():
    model, batch = tiny("llada"), Counting().batch({"reviews": 0}, 0)
    before = np.array(model.params["embed"])
    config = TrainConfig(steps=180, learning_rate=1e-2, warmup=5, review_every=20, save_every=20)
    run = train(model, Batches(lambda step: batch), config, progress=False)
    assert run.log[0]["accuracy"] < 0.5
    # Each entry is of masks drawn again, and by other sums on other CPUs: the last five together say more.
    assert np.mean([entry["accuracy"] for entry in run.log[-5:]]) > 0.9
    assert (before == model.params["embed"]).all()


class Interrupted(Counting):
    """Ctrl-C while the batch of step 6 is made."""

    def batch(self, memory, step):
        if step == 6:
            signal.raise_signal(signal.SIGINT)
        return super().batch(memory, step)


@pytest.fixture(autouse=True)
def interrupts():
    """Ctrl-C raises KeyboardInterrupt, also where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_a_resumed_run_says_at_which_step(tmp_path, capsys):
    run = functools.partial(train, tiny("llada"), config=CONFIG, directory=tmp_path)
    refuses("^interrupted: ", run, Interrupted(), error=KeyboardInterrupt, progress=False)
    run(Counting(), progress=True)
    assert f"{tmp_path}: resumed from step 4 of 10" in capsys.readouterr().out


def test_an_interrupted_run_says_how_to_go_on_and_does(tmp_path):
    run = functools.partial(train, tiny("llada"), config=CONFIG, progress=False)
    interrupted = functools.partial(run, Interrupted(), directory=tmp_path / "a")
    message = r"^interrupted: .*a holds the run up to step 4 of 10\. Call train again"
    refuses(message, interrupted, error=KeyboardInterrupt)
    entries = lambda run: [(entry["step"], entry["loss"]) for entry in run.log]
    assert entries(run(Counting(), directory=tmp_path / "a")) == entries(run(Counting()))


def test_a_second_training_in_a_directory_is_refused_and_changes_nothing(tmp_path):
    """The second begins when the first has a checkpoint."""
    run = functools.partial(train, tiny("llada"), config=CONFIG, directory=tmp_path, progress=False)
    held = lambda: {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    class Meanwhile(Counting):
        def batch(self, memory, step):
            if step == 6:
                before = held()
                refuses(rf"^directory='{tmp_path}' is in use: another run trains in it\. Wait", run, Never())
                assert held() == before
            return super().batch(memory, step)

    run(Meanwhile())
    assert len(run(Never()).log) == 5


def test_a_directory_is_free_again_when_the_process_that_trains_in_it_is_killed(tmp_path):
    run = functools.partial(train, tiny("llada"), config=CONFIG, directory=tmp_path, progress=False)
    run(Counting())
    hold = (
        "import sys; from pathlib import Path; from dllm_jax.training.run_directory import RunDirectory\n"
        "files = RunDirectory(Path(sys.argv[1]), {}); print('holds', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path)], stdin=pipe, stdout=pipe) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        refuses("is in use: another run trains", run, Never())
        holder.kill()
    assert len(run(Never()).log) == 5


def test_a_file_system_without_locks_warns_and_goes_on(tmp_path, monkeypatch):
    def unknown(file, flags):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unknown)
    with pytest.warns(locks.NoLockWarning, match=r"log\.jsonl: its file system has no locks"):
        train(tiny("llada"), Counting(), CONFIG, directory=tmp_path, progress=False)


@pytest.mark.parametrize(("review_every", "save_every"), [(4, 3), (50, 5), (3, 1), (3, 200)])
def test_checkpoints_need_no_review(tmp_path, review_every, save_every):
    """What is resumed between two reviews logs the steps before it too; each option works alone."""
    config = dataclasses.replace(CONFIG, review_every=review_every, save_every=save_every)
    run = functools.partial(train, tiny("llada"), config=config, progress=False)
    refuses("^interrupted: ", run, Interrupted(), directory=tmp_path, error=KeyboardInterrupt)
    strip = lambda run: [{**entry, "seconds": 0} for entry in run.log]
    resumed, whole = run(Counting(), directory=tmp_path), run(Counting())
    assert strip(resumed) == strip(whole)
    assert (resumed.model.params["embed"] == whole.model.params["embed"]).all()
    assert TrainConfig(steps=100, save_every=20).review_every == 50
    assert TrainConfig(steps=100, review_every=30).save_every == 200


def test_an_interrupt_waits_until_a_file_is_written_and_ends_a_command_in_one_line(capsys):
    done = []

    def written():
        with plain_errors(), uninterrupted():
            signal.raise_signal(signal.SIGINT)
            done.append("written")

    with pytest.raises(SystemExit) as ended:
        written()
    assert (ended.value.code, done, capsys.readouterr().err) == (130, ["written"], "interrupted\n")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    def impatient():
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            pytest.fail("a second one does not wait")

    with pytest.raises(KeyboardInterrupt):
        impatient()


def test_an_interrupted_command_ends_without_the_clean_up_that_could_crash():
    code = (
        "import atexit, signal\nfrom dllm_jax.command_line import run\n"
        "atexit.register(print, 'cleaned up')\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "run(lambda: print('work') or signal.raise_signal(signal.SIGINT), 'run it again to go on')"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "work\n", "run it again to go on\n")


def test_an_import_leaves_the_signal_handlers_of_a_program(tmp_path):
    """Of a package called `bench`, too, which is a name of a program of this project."""
    (tmp_path / "bench").mkdir()
    show = "import signal, dllm_jax; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
    (tmp_path / "bench" / "__init__.py").write_text(show)
    (tmp_path / "bench" / "__main__.py").write_text("")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}
    command = [sys.executable, "-m", "bench"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


def test_a_reader_that_stops_ends_a_command_without_a_traceback():
    code = "from dllm_jax.command_line import run; run(lambda: print('x' * 10**6))"
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_help_has_no_line_that_a_terminal_would_break_within_a_word(monkeypatch, capsys):
    def command(steps: int = 1):
        """Has a description that is longer than a narrow terminal, which tyro leaves as it is.

        Args:
          steps: Number of steps.
        """

    monkeypatch.setattr("sys.argv", ["command", "--help"])
    monkeypatch.setenv("COLUMNS", "40")
    with pytest.raises(SystemExit, match="0"):
        run_command(lambda: tyro.cli(command, prog="command"))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 40
    assert "narrow terminal, which tyro leaves as it" in lines


@pytest.fixture(scope="module")
def four_steps(tmp_path_factory) -> str:
    """The directory of a run of 4 steps."""
    where = str(tmp_path_factory.mktemp("run") / "of-4-steps")
    first = dataclasses.replace(CONFIG, steps=4, decay=0)
    train(tiny("llada"), Counting(), first, directory=where, progress=False)
    return where


def resumed(four_steps, where, **changes):
    """A copy of the run that goes on to step 10 with changes."""
    shutil.copytree(four_steps, where)
    after = changes.pop("model_now", tiny("llada"))
    names = {field.name for field in dataclasses.fields(TrainConfig)}
    config = dataclasses.replace(CONFIG, **({"decay": 0} | {k: changes[k] for k in names & set(changes)}))
    rest = {k: v for k, v in changes.items() if k not in names}
    return train(after, Counting(), config, directory=where, progress=False, **rest)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 1e-3}, "learning_rate=0.003 then, 0.001 now"),
        ({"warmup": None}, "warmup=2 then, 5 now"),
        ({"seed": 1, "beta1": 0.5, "allow_changes": ["seed"]}, r": beta1=0.9 then, 0.5 now\. "),
        ({"master_weights": False}, "master_weights=True then, False now"),
        ({"allow_changes": ["lr"]}, r"allow_changes=\['lr'\] must be among steps, learning_rate"),
        ({"model_now": tiny("llada").replace_spec(mask_id=56)}, "spec.mask_id=59 then, 56 now"),
        ({"model_now": cast(tiny("llada"), jnp.bfloat16)}, "dtype='float32' then, 'bfloat16' now"),
        ({"trainable": ONLY}, r"trainable\['embed'\]=None then, False now; frozen=0 then, \d+ now"),
        ({"model_now": separate(tiny("llada"))}, r"holds another model, .* is absent there, float32"),
    ],
)  # fmt: skip
def test_a_changed_configuration_is_refused_by_name(four_steps, tmp_path, changes, message):
    refuses(message, resumed, four_steps, tmp_path / "a", **changes)


def test_adapters_of_another_alpha_are_refused(tmp_path):
    """Their scale is in no array of a checkpoint."""
    of = lambda alpha: lora.attach(tiny("llada"), lora.LoRA(alpha=alpha), jax.random.key(0))
    first = TrainConfig(steps=1, review_every=1, save_every=1)
    more = dict(directory=tmp_path, trainable=lora.trainable, progress=False)
    assert len(train(of(8.0), Counting(), first, **more).log) == 1
    refuses(r"alpha=\[8\.0\] then, \[16\.0\] now", train, of(16.0), Counting(), first, **more)


@pytest.mark.parametrize("family", ["llada", "llada-moe", "nemotron", "diffusion-gemma"])
def test_a_configuration_is_what_a_checkpoint_of_it_says(family):
    """With whatever a spec holds: a tuple there would differ from the list that is read again."""
    config = dataclasses.replace(CONFIG, blocks=(2, 4) if family == "llada" else None)
    record = record_of(tiny(family), prepare(tiny(family), config), None, replaced=False)
    assert json.loads(json.dumps(record)) == record


COSINE = lambda steps: optax.adamw(optax.cosine_decay_schedule(1e-3, steps))
SCALED = lambda by: optax.stateless(lambda updates, _: jax.tree.map(lambda u: u * jnp.float32(by), updates))


@pytest.mark.parametrize(("make", "one", "another"), [
    (COSINE, 10, 20), (optax.inject_hyperparams(optax.sgd), 0.1, 0.2), (SCALED, 0.1, 0.2),
], ids=["schedule", "state", "closure"])  # fmt: skip
def test_another_optimizer_is_refused_by_its_numbers(tmp_path, make, one, another):
    """Those of schedules, of its state, and of arrays that it closes over."""
    first = TrainConfig(steps=1, review_every=1, save_every=1)
    run = functools.partial(train, tiny("llada"), Counting(), first, directory=tmp_path, progress=False)
    run(optimizer=make(one))
    assert len(run(optimizer=make(one)).log) == 1
    for other in (make(another), optax.adamw(3e-3), None):
        refuses(r"configuration: optimizer='\w{64}' then, .* now\. ", run, optimizer=other)
    with pytest.raises(ValueError, match=r"holds another model, optimizer or trainable: moments.* absent"):
        run(optimizer=optax.sgd(1e-3, momentum=0.9), allow_changes=["optimizer"])


def test_options_that_change_no_step_done_so_far_are_free(four_steps, tmp_path):
    faster = dict(learning_rate=1e-3, allow_changes=["learning_rate"], save_every=2)
    changed = resumed(four_steps, tmp_path / "a", **faster)
    same = resumed(four_steps, tmp_path / "b", decay=3, remat=True, accumulate=2)
    assert changed.log[1] != same.log[2]
    with pytest.raises(ValueError, match="steps=10 then, 12 now; decay=3 then, 2 now"):
        train(
            tiny("llada"), Counting(), dataclasses.replace(CONFIG, steps=12, decay=2),
            directory=tmp_path / "b", progress=False,
        )  # fmt: skip


def test_frozen_parameters_of_another_model_are_refused(tmp_path):
    model = tiny("llada")
    other = Model(model.params | {"head": model.params["head"].at[3, 3].add(1e-3)}, model.spec)
    options = {"directory": tmp_path, "trainable": ONLY, "progress": False}
    run = lambda each: train(each, Counting(), TrainConfig(steps=2, review_every=2, save_every=2), **options)
    assert run(model).log == run(model).log
    refuses(r"frozen=\d+ then, \d+ now", run, other)
    assert abstract_state(model, prepare(model, CONFIG, trainable=ONLY)).params["head"] is None


def test_a_diverging_run_stops():
    model = tiny("llada")
    params = jax.tree.map(lambda p: p * jnp.nan, model.params)
    with pytest.raises(FloatingPointError, match=r"nan at step 1\. Its batch was checked: .* No update"):
        train(Model(params, model.spec), Counting(), CONFIG, progress=False)


def test_options_that_do_not_go_together_are_refused():
    options = {"steps": 10, "warmup": 0, "review_every": 2, "save_every": 4}
    for changes, message in (
        ({"warmup": 8, "decay": 3}, "warmup=8 and decay=3 must fit into steps=10"),
        ({"warmup": None, "decay": 11}, "warmup=0 and decay=11 must fit into steps=10"),
    ):
        refuses(message, TrainConfig, **options | changes)


def test_the_warm_up_is_shorter_in_short_runs():
    warmups = [TrainConfig(steps=steps).warmup_steps for steps in (1, 10, 199, 200, 400, 10**6)]
    assert warmups == [0, 5, 99, 100, 100, 100]
    assert TrainConfig(steps=100, decay=60).warmup_steps == 20
    assert TrainConfig(steps=10, warmup=0).warmup_steps == 0
    with pytest.warns(UserWarning, match="steps=1 with warmup=1 learns nothing: .*Use warmup=0"):
        TrainConfig(steps=1, warmup=1)


def test_batches_that_teach_nothing_are_told_of_once():
    """Truncation may cut all answers off; weight decay goes on."""
    ids = np.arange(12, dtype=np.int32).reshape(2, 6)
    whole, empty = Batch(ids[:, :3], ids[:, 3:]), Batch(ids[:, :3], np.full((2, 3), -100))
    run = functools.partial(train, tiny("llada"), config=TrainConfig(steps=3, warmup=0), progress=False)
    with pytest.warns(UserWarning, match="batch of step 1 has no answer token .* weight decay alone") as told:
        result = run(Batches(lambda step: empty if step else whole))
    assert len(told) == 1
    assert result.log[-1]["loss"] > 0
    run(Batches(lambda step: whole._replace(answer_mask=np.array([[1, 0, 0], [0, 0, 0]]))))
