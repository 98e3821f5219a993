"""The benches run from end to end at the smallest size, and what they compute is right."""

import dataclasses
import functools
import importlib
import json
import pathlib
import re
import shlex
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tyro

import dllm_jax as dj
from bench import roofline as predictions
from bench.compiled.program import Case
from bench.generate import __main__ as generate
from bench.generate import generation
from bench.generate.generation import Generation, Limits
from bench.kernels import __main__ as kernels
from bench.kernels.cases import FAMILIES
from bench.shared import device, measure, models, runner, steps
from bench.shared.measure import Grid
from dllm_jax import roofline
from dllm_jax.decoding.stats import Stats
from dllm_jax.nn.parameters import abstract, stacked
from dllm_jax.roofline import Hardware

ROOF = Hardware("test", 1e12, 1e11, 1e12, "", 1e12)


@pytest.fixture(scope="module")
def tiny():
    return models.random_model(models.shape("tiny"), "float32")


def test_generate_tiny(tmp_path):
    out = tmp_path / "found.json"
    options = generate.Options(
        shape="tiny",
        grid=Grid(("DualCache",), prompts=(16,), batches=(1,), length=8, block=4),
        limits=Limits(repeats=2),
        json=out,
    )
    generate.main(options)
    report = json.loads(out.read_text())
    exact, dual = report["rows"]
    assert (exact["policy"], dual["policy"]) == ("Policy()", "DualCache()")
    assert exact["over_exact"]["values"] == [1.0, 1.0]
    pairs = zip(dual["exact_seconds"]["values"], dual["seconds"]["values"], strict=True)
    assert dual["over_exact"]["values"] == [pytest.approx(base / ours) for base, ours in pairs]
    assert (exact["part_ms"], exact["width"], dual["width"]) == (None, None, 4)
    assert (exact["forwards"], exact["refreshes"], dual["refreshes"]) == (8, 8, 2)
    for found in report["rows"]:
        assert found["seconds"]["low"] <= found["seconds"]["median"] <= found["seconds"]["high"]
        assert found["tokens_per_s"] == pytest.approx(8 / found["seconds"]["median"])
        assert found["tokens_before_eos_per_s"] <= found["tokens_per_s"]
        assert found["program_bytes"] > 0
        assert found["whole_predicted_ms"] > 0
    assert report["date"]
    assert report["ceilings"]["bandwidth"] > 0


def test_what_does_not_fit_is_said(tiny):
    options = generate.Options(grid=Grid(("DualCache",), prompts=(16,), batches=(1,), length=8, block=4))
    run = options.run(16, 1, dj.policies.Policy())
    small = dataclasses.replace(ROOF, capacity=1e3)
    with pytest.raises(MemoryError, match="by prediction"):
        generation.prepare(tiny, run, small, Limits())
    rows = list(generate.measure(tiny, options, small))
    assert all("by prediction" in row["error"] for row in rows)
    assert len(rows) == 2


def made(policy: dj.policies.Policy, sampler: dj.samplers.Sampler, whole_s: float) -> Generation:
    """A generation of 64 tokens whose steps take `whole_s` each, and which takes none itself."""
    layout, counts = dj.Layout(16, 64, 32, 64), np.asarray([64])
    stats = Stats(counts, 80 * counts, 0.0 * counts, 0.0 * counts, counts, counts, counts, counts > 0)
    time = device.Time.of([whole_s])
    run = measure.Run(16, 1, 64, 32, 64, policy, sampler)
    out = (None, stats, None)
    program = SimpleNamespace(run=lambda: out)
    predicted = roofline.work(models.shape("tiny"), policy, layout)
    return Generation(run, predicted, steps.StepTimes(time), program, out)


@pytest.mark.parametrize(
    ("sampler", "by_steps"), [(dj.samplers.Confidence(), 640.0), (dj.samplers.Threshold(0.9), None)]
)
def test_what_is_compared_with_the_exact_decoder(sampler, by_steps):
    """Steps are added up only where their number is known; without an exact decoder there is no ratio."""
    exact, dual = (made(p, sampler, 10.0) for p in (dj.policies.Policy(), dj.policies.DualCache()))
    limits, slow = Limits(repeats=2), dataclasses.replace(exact, out=None)
    found = generation.whole_run(dual, slow, limits)
    assert found["exact_by_steps_s"] == by_steps
    assert (found["over_exact"] is None) == (by_steps is None)
    assert generation.whole_run(slow, slow, limits)["seconds"] is None
    found = generation.whole_run(dual, exact, limits)
    assert found["exact_by_steps_s"] is None
    assert len(found["over_exact"]["values"]) == len(found["exact_seconds"]["values"]) == 2
    assert generation.whole_run(exact, exact, limits)["over_exact"]["values"] == (1.0, 1.0)
    assert generation.whole_run(dual, None, limits)["over_exact"] is None
    assert (dual.stepwise(ROOF)["predicted_s"] is None) == (by_steps is None)


def test_rows_are_printed_and_written_as_they_come(tmp_path, capsys):
    path = tmp_path / "deep" / "found.json"
    written = []

    def rows():
        yield {"name": "a", "ms": 1.5}
        written.append(json.loads(path.read_text()))
        yield {"name": "b", "error": "no memory"}
        raise KeyboardInterrupt

    columns = {"name": lambda row: row["name"], "ms": lambda row: row["ms"], "s": lambda row: row["ms"] / 1e3}
    with pytest.raises(KeyboardInterrupt):
        runner.run(rows(), columns, path, lambda rows: {"date": "now", "rows": rows})
    assert written == [{"date": "now", "rows": [{"name": "a", "ms": 1.5}]}]
    assert len(json.loads(path.read_text())["rows"]) == 2
    lines = ["| name | ms | s |", "| --- | ---: | ---: |", "| a | 1.5 | 0.0015 |", "| b | no memory |  |"]
    assert capsys.readouterr().out.splitlines() == lines
    assert runner.table_of(columns, [{"name": "a", "ms": 1.5}]).splitlines() == lines[:3]
    with pytest.raises(KeyError, match="ms"):
        runner.run([{"name": "a"}], columns, None, list)


def commands() -> list[str]:
    """Command lines of the pages about what was measured."""
    root = pathlib.Path(__file__).parents[1]
    pages = (
        "docs/background/performance.md",
        "docs/background/compiled.md",
        "docs/background/results.md",
        "docs/background/benchmarks.md",
        "bench/README.md",
    )
    texts = [(root / name).read_text() for name in pages]
    found = [line for text in texts for line in re.findall(r"python -m (bench\.[^`\n]*)", text)]
    return found


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_documented_commands_parse(command):
    module, *arguments = shlex.split(command.split(" > ")[0].split("(")[0])
    if module == "bench.peer_torch":
        pytest.importorskip("torch", reason="torch peer: install the 'oracle' extra")
    folder = pathlib.Path(__file__).parents[1] / module.replace(".", "/")
    main = importlib.import_module(f"{module}.__main__" if folder.is_dir() else module).main
    called = functools.wraps(main)(lambda *given, **named: True)
    assert tyro.cli(called, args=arguments)


@pytest.mark.usefixtures("layers_of_the_platform")
def test_random_model():
    dtype = "bfloat16"
    spec = models.shape("tiny", qkv_bias=True, layers=3)
    model = models.random_model(spec, dtype)
    wanted = abstract(spec, dtype)
    assert model.layers_are_separate == dj.abstract(spec).layers_are_separate
    assert jax.tree.map(lambda a: (a.shape, a.dtype), stacked(model.params)) == jax.tree.map(
        lambda a: (a.shape, a.dtype), wanted
    )
    layers = np.asarray(stacked(model.params)["layers"]["gate"], np.float32)
    assert np.std(layers) == pytest.approx(0.02, rel=0.05)
    assert not np.allclose(layers[0], layers[1])
    with pytest.raises(ValueError, match="shape='huge'"):
        models.shape("huge")


def test_steps_take_the_width_that_the_engine_would_give_them(tiny):
    run = measure.Run(16, 2, 8, 4, 8, dj.policies.DualCache(), dj.samplers.Confidence())
    stepper = steps.Stepper(tiny, run.request(tiny))
    assert stepper.coming(stepper.start()) is None
    state, width = stepper.first_partial()
    assert width == 4
    done = state.canvas.active.at[0].set(False)
    need = state.need.at[0].set(False).at[1].set(True)  # all of the only sequence that is left
    resting = state._replace(canvas=dataclasses.replace(state.canvas, active=done), need=need)
    assert stepper.coming(resting) is None


def test_times():
    taken = device.Time.of([3.0, 1.0, 2.0])
    assert (taken.median, taken.low, taken.high, taken.values) == (2.0, 1.0, 3.0, (3.0, 1.0, 2.0))
    assert taken.scaled(1e3).median == 2e3
    assert taken.over(device.Time.of([2.0])).values == (1.5, 0.5, 1.0)
    assert taken.over(taken).values == (1.0, 1.0, 1.0)
    order = []
    device.interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert order == ["a", "b", "a", "b"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.operation.name)
def test_kernel_operands_fit_every_implementation(family):
    case = family.make(family.small[0], jnp.float32)
    implementations = ("xla", "pallas")
    results = [jax.eval_shape(kernels.function(family, i, case), *case.arrays) for i in implementations]
    first, *others = (jax.tree.map(lambda a: (a.shape, a.dtype), result) for result in results)
    assert all(other == first for other in others)
    assert case.bytes(results[0]) > 0


def test_a_kernel_that_does_not_support_its_operands_is_not_timed_as_xla():
    family = next(family for family in FAMILIES if family.operation.name == "attention")
    narrow = family.make(family.small[0]._replace(head=20), jnp.float32)
    with pytest.raises(NotImplementedError, match="head width 20"):
        kernels.function(family, "pallas", narrow)
    with pytest.raises(NotImplementedError, match="no attention by cudnn on cpu"):
        kernels.function(family, "cudnn", narrow)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.operation.name)
def test_kernel_operands_of_real_models(family):
    for _, shape in family.shapes(small=False):
        made = jax.eval_shape(lambda s=shape: family.make(s, jnp.bfloat16).arrays)
        assert all(a.size for a in jax.tree.leaves(made))


def test_kernels_small():
    options = kernels.Options(
        operations=("topk_evict",),
        implementations=("xla",),
        small=True,
        most=1,
        repeats=1,
        calls=1,
    )
    assert dataclasses.replace(options, calls=None, dtype="bfloat16").per_run == 1  # on a CPU, at any dtype
    rows = list(kernels.measure(options, "float32", ROOF))
    assert [row["implementation"] for row in rows] == ["xla"]
    assert rows[0]["over_xla"] == 1.0
    with pytest.raises(ValueError, match="nothing"):
        kernels.Options(operations=("nothing",)).chosen()


def test_predictions(tmp_path, capsys):
    grid = Grid(("Policy", "DualCache"), prompts=(96,), batches=(1,), length=64)
    found = tmp_path / "found.json"
    forecast = predictions.Forecast(("llada-8b",), ("h100", "v5e"), grid, json=found)
    predictions.main(forecast)
    table = capsys.readouterr().out
    assert table.count("| Policy | 96 | 1 |") == 2
    predictions.main(dataclasses.replace(forecast, markdown=True))
    short = capsys.readouterr().out
    assert short.count("| policy | prompt 96 |") == 2
    assert "(1.00x) *" in short.split("TPU v5e")[1]  # it does not fit
    report = json.loads(found.read_text())
    assert len(report["rows"]) == 2 * 2
    fits = {row["hardware"]: row["fits"] for row in report["rows"]}
    assert fits == {"h100": True, "v5e": False}
    exact = report["rows"][0]
    assert (exact["policy"], exact["over_exact"]) == ("Policy", 1.0)
    with pytest.raises(ValueError, match="z80"):
        predictions.Forecast(hardware=("z80",))


def test_a_run_over_images_takes_their_features_as_an_argument():
    model = dj.abstract(models.shape("llada-v-8b", layers=2))
    case = Case("h100", "DualCache", shape="llada-v-8b", layers=2, prompt=16, images=1, length=32, block=32)
    request = case.run().request(model)
    assert request.inputs.embeds is not None
    assert request.inputs.embeds.shape == (1, 16 + 3627, 4096)
    tokens = np.asarray(request.inputs.tokens)[0]
    assert (tokens == dj.EMBEDDED).sum() == 3627
    assert (tokens[3627 : 3627 + 16] >= 0).all()


def test_fewer_widths_are_compiled_if_asked_for():
    model = dj.abstract(models.shape("llada-8b", layers=2))
    found = lambda **options: Case("v6e", "PrefixCache", layers=2, **options).run().request(model).plan.widths
    assert found() == (64, 128, 256)
    assert found(widths=(256,)) == (256,)
