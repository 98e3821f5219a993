"""`python -m dllm_jax check`: whatever is wrong with a device turns the verdict, and nothing else does."""

import dataclasses
import json
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
from jax._src.cudnn import fused_attention_stablehlo as jax_cudnn

import dllm_jax as dj
from dllm_jax.check import command, environment, operations, peers, several, speed, timing, tokens
from dllm_jax.check.report import Finding, Report
from dllm_jax.command_line import plain_errors
from dllm_jax.roofline import HARDWARE, Hardware
from pallas_kernels import evidence
from pallas_kernels.attention import xla
from pallas_kernels.choice import Entry
from pallas_kernels.operands import FAMILIES
from pallas_kernels.topk_evict import OPERATION as TOPK
from tests import refuses
from tests.models import EXHAUSTIVE, spec

ROOF = Hardware("test", 1e12, 1e11, 1e12, "", 1e12)
ATTENTION = next(family for family in FAMILIES if family.operation.name == "attention")


def with_kernel(kernel, family=ATTENTION):
    """The operation with another kernel, which CPUs interpret."""
    operation = dataclasses.replace(family.operation, kernels={"tpu": kernel})
    return family._replace(operation=operation, small=family.small[2:3])


def failing(*arrays, interpret=False):
    raise jax.errors.JaxRuntimeError("INTERNAL: no such instruction\nmore")


def kernel(by):
    def almost(q, k, v, mask=None, lengths=None, *, interpret=False):
        out, lse = xla.attention(q, k, v, mask, lengths)
        return (out + by * jnp.max(jnp.abs(out))).astype(q.dtype), lse

    return almost


@pytest.mark.parametrize(
    ("broken", "right", "said"),
    [
        (kernel(1e-7), True, "xla, pallas right"),
        (kernel(1e-3), False, "pallas 0.001 off, not 1e-05"),
        (failing, False, "INTERNAL: no such"),
    ],
    ids=["rounding", "off", "fails"],
)
def test_a_kernel_that_is_wrong_turns_the_verdict(broken, right, said):
    (found,) = operations.operation_findings(ROOF, ("float32",), quick=True, families=(with_kernel(broken),))
    assert found.right is right
    assert said in found.text
    report = Report({}, parts={"operations": [found]}, complete=True)
    assert bool(report.wrong) is not right
    assert ("are right" in next(report.verdict())) is right


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.operation.name)
def test_operands_fit_every_implementation_and_real_models(family):
    case = family.make(family.small[0], jnp.float32)
    by = lambda name: lambda *arrays: evidence.run(family, case, name, *arrays)
    shapes = [jax.eval_shape(by(name), *case.arrays) for name in ("xla", "pallas")]
    first, other = (jax.tree.map(lambda a: (a.shape, a.dtype), one) for one in shapes)
    assert first == other
    assert case.bytes(shapes[0]) > 0
    for _, shape in family.shapes(small=False):
        made = jax.eval_shape(lambda s=shape: family.make(s, jnp.bfloat16).arrays)
        assert all(a.size for a in jax.tree.leaves(made))


def timed(operation, positions, **microseconds):
    """A finding as of an accelerator."""
    found = {name: {"right": us is not None, "us": {"median": us}} for name, us in microseconds.items()}
    data = {"operation": operation, "dtype": "bfloat16", "positions": positions, "implementations": found}
    return Finding("", "", True, data | {"fastest": "xla", "shape": ""})


def test_evidence_is_what_was_clearly_faster_and_never_wrong():
    found = [
        timed("attention", 32, xla=10.0, cudnn=8.0, pallas=9.9),
        timed("attention", 32, xla=10.0, cudnn=9.9, pallas=7.0),
        timed("attention", 4352, xla=10.0, cudnn=4.0),
        timed("received", 32, xla=10.0, pallas=2.0),
        Finding("", "", False, {"operation": "received", "implementations": {"pallas": {"right": False}}}),
    ]
    chosen = operations.derive_evidence(found, "a report")
    best = [(e.operation, e.positions, e.implementation) for e in chosen]
    assert best == [
        ("attention", (1, 32), "xla"),  # neither is faster at both shapes
        ("attention", (33, 2**31 - 1), "cudnn"),
        ("received", (1, 2**31 - 1), "xla"),  # it was wrong elsewhere
    ]
    assert {(e.platform, e.device, e.dtypes, e.report) for e in chosen} == {
        ("cpu", "cpu", ("bfloat16",), "a report")
    }


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The user's cache directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    evidence.fault.cache_clear()
    yield evidence.user_file()
    evidence.fault.cache_clear()


ON_CPUS = Entry("attention", "cpu", "cpu", "pallas", ("float32",), (2, 8), "the report of a test")


def test_recorded_evidence_decides_where_load_says_nothing(cache):
    path = dj.bundled.path("tiny-llada")
    assert dj.load(path).implementation is None  # nothing ships for CPUs
    operations.record((ON_CPUS,), cache)
    model = dj.load(path)
    assert model.implementation == (ON_CPUS,)
    assert dj.load(path, implementation="xla").implementation == "xla"
    assert "attention by pallas, of the calls that it takes" in repr(model)
    shown = {
        (row.positions, row.platform): row.implementation
        for row in dj.explain_kernels(model, 1, dj.Layout(16, 8, 4, 8), dj.policies.DualCache()).rows
    }
    assert shown[4, "cpu"] == "pallas, interpreted (the report of a test)"
    assert shown[24, "cpu"] == "xla: no kernel for this platform"  # more positions than it speaks of
    assert shown[4, "tpu"] == "xla: the kernel was not measured to be faster"

    prompt = np.arange(5, 21)[None]
    runs = [
        dj.generate(one, prompt, length=8, block=4, policy=dj.policies.DualCache()).tokens
        for one in (model, dataclasses.replace(model, implementation=None))
    ]
    np.testing.assert_array_equal(*runs)
    data = json.loads(cache.read_text())
    cache.write_text(json.dumps(data | {"jax": "0.1"}))  # of another version: it says nothing
    assert dj.load(path).implementation is None
    cache.write_text("{}")
    with pytest.raises(ValueError, match=r"implementations.json does not hold implementations .*: remove it"):
        dj.load(path)


def without_backend(*arrays, interpret=False):
    raise ModuleNotFoundError("No module named 'jax.experimental.pallas.triton'")


@pytest.mark.parametrize("broken", [kernel(1e-3), without_backend], ids=["off", "no backend"])
def test_evidence_that_is_wrong_here_is_not_believed(broken, cache, monkeypatch):
    operations.record((ON_CPUS,), cache)
    monkeypatch.setattr(evidence, "FAMILIES", [with_kernel(broken)])
    with pytest.warns(
        evidence.ImplementationWarning,
        match="pallas attention failed its correctness check .* using XLA instead",
    ):
        assert dj.load(dj.bundled.path("tiny-llada")).implementation is None


def test_each_operation_may_have_an_implementation_of_its_own():
    path, layout = dj.bundled.path("tiny-llada"), dj.Layout(16, 8, 4, 8)
    model = dj.load(path, implementation={"attention_and_lse": "pallas", "topk_evict": "xla"})
    rows = dj.explain_kernels(model, 1, layout, dj.policies.MaskKV(budget=4)).rows
    said = {(r.operation, r.platform): r.implementation for r in rows}
    assert said["attention_and_lse", "cpu"] == "pallas, interpreted (as asked for)"
    assert said["topk_evict", "cpu"] == "xla (as asked for)"
    assert said["received", "cpu"].startswith("xla: ")
    for wrong, told in (({"atention": "xla"}, "atention"), ({"attention": "pallsa"}, "pallsa")):
        with pytest.raises(ValueError, match=told):
            dj.load(path, implementation=wrong)


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        (None, "xla: cuDNN is not detected"),
        (SimpleNamespace(cudnn_get_version=lambda: 91000), "cudnn (docs/"),
    ],
    ids=["without cuDNN", "with cuDNN"],
)
def test_shipped_evidence_is_for_gpus_and_calls_that_cudnn_takes(installed, expected, monkeypatch):
    monkeypatch.setattr(jax_cudnn, "cuda_versions", installed)
    described = lambda kind: type("Described", (), {"platform": "cuda", "device_kind": kind})()
    chosen = lambda device: [(e.operation, e.implementation) for e in evidence.known(device)]
    gpu = described("NVIDIA H100 80GB HBM3")
    cudnn = [("attention", "cudnn"), ("attention_and_lse", "cudnn")]
    assert chosen(described("NVIDIA A100-SXM4-80GB")) == cudnn
    ours = ("attention", "attention_and_lse", "received", "ragged_attention", "topk_evict", "experts")
    assert {entry for entry in chosen(gpu) if entry[1] == "triton"} == {(name, "triton") for name in ours}
    assert [entry for entry in chosen(gpu) if entry[1] == "cudnn"] == cudnn
    second = [name for name, backend in chosen(gpu) if backend == "mosaic_gpu"]
    assert second == ["attention_and_lse", "received", "ragged_attention", "topk_evict"]
    model = dataclasses.replace(dj.abstract("llada-8b"), implementation=evidence.known(gpu))
    layout = dj.Layout(64, 32, 32, 32)
    found = dj.explain_kernels(model, 1, layout)
    rows = {(r.operation, r.platform): r.implementation for r in found.rows}
    assert rows["attention", "tpu"].startswith("xla")
    assert str(found).endswith("head: 126464 x 4096, 1.04 GB; a step reads all of it")
    # Which of the two is installed where the test runs does not matter: jax for CUDA brings cuDNN along.
    assert rows["attention", "cuda"].startswith(expected)
    assert TOPK.positions((jnp.zeros((1, 2, 7)),)) == 7


def test_the_first_entry_that_supports_a_call_decides():
    entries = tuple(
        Entry("attention", "cuda", "", name, ("bfloat16",), (1, 64), name) for name in ("pallas", "xla")
    )
    mask = lambda queries: jax.ShapeDtypeStruct((1, 1, queries, 40), jnp.bool_)

    def taken(queries, head, mask=None):
        q, k = (jax.ShapeDtypeStruct((1, n, 4, head), jnp.bfloat16) for n in (queries, 40))
        return ATTENTION.operation.explain((q, k, k, mask, None), {}, entries)["cuda"]

    assert taken(32, 64, mask(32)) == taken(64, 64) == "triton (pallas)"
    assert taken(32, 24) == "xla (xla)"
    assert taken(65, 64) == "xla: the kernel was not measured to be faster"


def test_versions_that_do_not_go_together(monkeypatch):
    jaxlib = jax.__version__
    good = {"jaxlib": jaxlib, "jax-cuda13-plugin": jaxlib}
    assert not list(environment.version_mismatches(good, "gpu", "590.1"))
    assert not list(environment.version_mismatches({"jaxlib": jaxlib}, "cpu", None))
    found = environment.version_mismatches(
        good | {"jax-cuda12-plugin": "0.4.1", "libtpu": "0.0.1"}, "gpu", "550.54.14-beta"
    )
    told = " | ".join(found)
    assert "jax-cuda12-plugin 0.4.1 is installed, but this jax wants" in told
    assert "libtpu 0.0.1 is installed, but this jax wants" in told
    assert "jax-cuda12-plugin and jax-cuda13-plugin are both installed" in told
    assert "driver 550.54.14-beta is older than 580" in told
    monkeypatch.setattr(environment, "GPU", environment.Path("/"))
    assert "jax runs on the CPU" in next(iter(environment.version_mismatches({}, "cpu", None)))


GEOMETRY = speed.Geometry((16,), (1,), 8, 4)


def measured(cases: list[speed.SpeedCase], roof: Hardware = ROOF, seconds: float = 600) -> list[Finding]:
    until = time.monotonic() + seconds
    return list(speed.speed_findings(spec("llada"), "float32", roof, GEOMETRY, cases, None, until))


def test_a_device_without_memory_turns_the_verdict():
    tiny = spec("llada")
    right = {f.name: f.right for f in environment.environment_findings(tiny, ROOF)}
    assert right["together"] is True
    assert right["memory"] is True
    small = dataclasses.replace(ROOF, capacity=1e5)
    assert {f.name: f.right for f in environment.environment_findings(tiny, small)}["memory"] is False
    # Of speed it is no fault, and the next case is measured.
    cases = [speed.SpeedCase(dj.policies.Policy(), 16, 1), speed.SpeedCase(dj.policies.DualCache(), 16, 1)]
    found = measured(cases, small)
    assert [f.right for f in found] == [None, None]
    assert all("out of memory" in f.text for f in found)


@pytest.mark.parametrize("name", ["diffusiongemma-26b-a4b", "sdar-8b"])
def test_shapes_with_blocks_of_their_own_are_checked_by_the_caches_that_they_have(name):
    large = dj.presets.model_spec(name)
    found = {finding.name: finding for finding in environment.environment_findings(large, HARDWARE["h200"])}
    cases = speed.cases(speed.Geometry(), (), quick=True, spec=large)
    assert found["memory"].right is True
    assert found["memory"].text.startswith(f"{type(cases[1].policy).__name__} at prompt 1024 needs ")
    for case in cases:
        plan = speed.speed_request(dj.abstract(large), case, speed.Geometry()).plan
        assert plan.layout.block == large.block_size


def test_speed_says_what_it_measured_and_what_it_left_out():
    cases = [speed.SpeedCase(dj.policies.DualCache(), 16, 1, "int8")]
    (found,) = measured(cases)
    data = found.data
    assert set(data["steps"]) == {"full", "partial"}
    assert data["share"] == data["steps"]["partial"]["share"] > 0
    assert data["tokens_per_s"] == pytest.approx(8 / data["seconds"]["median"])
    assert data["program_bytes"] > 0
    model = dj.abstract(spec("llada"))
    asked = speed.speed_request(model, cases[0], GEOMETRY)
    bytes_of = lambda case: speed._predicted(model, case, asked).memory.weights
    assert bytes_of(cases[0]._replace(weights=None)) == model.dtype.itemsize * bytes_of(cases[0])
    every = speed.cases(speed.Geometry(), ("xla", "cudnn"), quick=False, spec=spec("llada"))
    assert len(set(every)) == len(every)
    (late,) = measured(every, seconds=-1)
    assert late.text.startswith(
        f"no time for {len(every)} of {len(every)} cases, from 'Policy, prompt 1024, batch 1' on"
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_token_turns_the_verdict(dtype):
    model = dj.load(dj.bundled.path("tiny-llada"), dtype="float32")
    out = dj.generate(model, np.arange(5, 21)[None], length=8, block=4, trace=True)
    case = tokens.TokenCase("tiny-llada", dtype, dj.policies.Policy())
    compared = lambda *outs: tokens._compared(case, model, *outs)
    assert compared(out, out).right is True
    taken = np.asarray(out.trace.tokens)
    step = 3
    (position,) = np.flatnonzero(taken[step + 1, 0] != taken[step, 0])
    logits = np.asarray(dj.forward(model, jnp.asarray(taken[step])))[0, position]
    for other, close in ((int(np.argsort(logits)[0]), False), (int(taken[step + 1, 0, position]), True)):
        changed = taken.copy()
        changed[step + 1 :, 0, position] = other
        wrong = out._replace(trace=out.trace._replace(tokens=changed))
        found = compared(wrong, out)
        assert found.right is close
        if not close:
            assert f"step {step}, sequence 0, position {position}" in found.text
    broken = out._replace(stats=out.stats._replace(finite=np.array([False])))
    assert compared(broken, out).right is False


def test_tokens_of_a_device_are_compared_with_another():
    here, other = jax.devices()[:2]
    (found,) = tokens.token_findings(other, here, ("tiny-llada",), ("float32",), (dj.policies.Policy(),))
    assert (found.right, found.text) == (True, "the tokens of the CPU")


def test_meshes_of_all_devices(monkeypatch):
    tiny = spec("llada", heads=8, kv_heads=8, vocab=64)
    if not EXHAUSTIVE:
        monkeypatch.setattr(several, "_time", lambda *arguments: timing.Time.of([1.0]))
    found = list(several.device_findings(tiny, "float32", GEOMETRY, ("tp",)))
    assert [f.name for f in found] == ["one of 8, time", "tp=8, tokens", "tp=8, time"]
    assert [f.right for f in found] == [None, True, None]
    monkeypatch.setattr(several, "_tokens", lambda mesh: np.array([mesh is None]))
    monkeypatch.setattr(several, "_time", lambda *arguments: timing.Time.of([1.0]))
    named = {f.name: f for f in several.device_findings(tiny, "float32", GEOMETRY)}
    assert {named[f"{axis}=8, tokens"].right for axis in ("tp", "dp")} == {False}
    assert "1.00 times as fast as one" in named["dp=8, time"].text


def test_a_part_that_fails_is_reported_and_the_rest_goes_on(tmp_path, monkeypatch, capsys):
    path = tmp_path / "deep" / "report.json"
    interrupted = []

    def parts(*arguments):
        def breaks():
            yield Finding("one", "as it should be", True)
            raise RuntimeError("no such device\nmore")

        def stops():
            assert json.loads(path.read_text())["verdict"]["complete"] is False
            interrupted.append(True)
            raise KeyboardInterrupt

        good = lambda: [Finding("three", "good", True)]
        return {"environment": breaks, "operations": good, "tokens": stops, "speed": good}

    monkeypatch.setattr(command, "_parts", parts)
    console = rich.console.Console(width=200)
    arguments = command.CheckArguments(json=path, parts=("environment", "operations", "tokens", "speed"))
    assert command.run_checks(arguments, console) == 1
    report = json.loads(path.read_text())
    assert interrupted
    assert report["verdict"]["wrong"] == ["environment, the whole part: RuntimeError: no such device"]
    assert [f["name"] for f in report["parts"]["operations"]] == ["three"]
    assert "speed" not in report["parts"]
    assert report["jax"] == jax.__version__
    assert "1 of 3 comparisons are wrong" in capsys.readouterr().out
    assert command.run_checks(command.CheckArguments(parts=("operations",)), console) == 0
    refuses("would drop what was recorded", command.CheckArguments, record=True, parts=("speed",))


def test_peers_are_timed_in_a_process_of_their_own(monkeypatch):
    asked = []

    def run(command, env, **options):
        path = environment.Path(command[command.index("--json") + 1])
        rows = [{"policy": "exact", "prompt": 1024, "of": "forward", "theirs_over_ours": {"median": 1.25}}]
        path.write_text(json.dumps({"rows": rows}))
        asked.append((command[-2:], env["XLA_PYTHON_CLIENT_MEM_FRACTION"]))
        return type("Done", (), {"returncode": len(asked) - 1, "stderr": "Traceback\nCUDA out of memory"})

    monkeypatch.setattr(peers.subprocess, "run", run)
    (found,) = peers.peer_findings("llada-8b")
    assert (found.name, found.text) == ("exact, prompt 1024, forward", "theirs over ours 1.25")
    assert asked == [(["--shape", "llada-8b"], ".45")]
    with pytest.raises(RuntimeError, match=r"bench.peer_torch: CUDA out of memory"):
        list(peers.peer_findings(None))
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--peers: torch is missing"):
        command.run_checks(command.CheckArguments(peers=True), rich.console.Console())


def test_bad_arguments_are_refused_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["dllm_jax", "check", "--shape", str(tmp_path / "none")])
    from dllm_jax.__main__ import main

    with pytest.raises(SystemExit) as ended, plain_errors():
        main()
    assert ended.value.code == 2
    assert command.timed_spec("llada-8b").layers == 32
    assert command.timed_spec(None) == command.timed_spec("tiny-llada")
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        command.run_checks(
            command.CheckArguments(json=tmp_path / "file" / "report.json"), rich.console.Console()
        )
