"""Shared settings: tests compile a lot and run little, so compile cheaply and only once per machine.

`pytest` is the quick suite: it leaves out what `tests/quick.py` names, in whatever files it is given. A test
that is given by its id (`tests/test_x.py::test_y`) runs. `--full` runs every test, as CI does; `--exhaustive`
also runs it with every pair of the values of its axes.
"""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib

# Emitting fusions through MLIR is half of the time that XLA takes for our programs on a CPU: an ElasticCache
# trace took 15.7 CPU seconds with it and 8.6 without. Splitting a program for several threads takes another
# tenth; looking for what a loop need not repeat, which copies the program for each loop in it, a third of a
# single program's time and a seventh to a quarter of a file's. Must be said before jax starts its backend,
# and only to a version that knows the flags, as XLA ends the process at an unknown one.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    cheaper = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    # Programs for TPUs, which libtpu compiles, are looked at as users get them.
    if importlib.util.find_spec("libtpu") is None:
        cheaper += " --xla_disable_hlo_passes=while-loop-invariant-code-motion,simplify-while-loops"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {cheaper}"
# Processes that tests start compile as cheaply.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"
# Programs are kept for the next run, and for the processes that tests start.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(pathlib.Path(__file__).parents[1] / ".jax_cache")
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.5"

import hypothesis
import jax
import jaxtyping
import pytest

from tests import quick
from tests.programs import forget_in_time, share_contexts

FORM_OF_LAYERS = "dllm_jax.nn.parameters.separate_is_faster"
# Files in which every layer of a checkpoint has arrays of its own, as users of CPUs and GPUs load it.
SEPARATE = "convert_crash", "bundled", "export", "llada_v_checkpoint", "readme", "release", "suffix"
# Files in which small models have the short programs that users of them get.
SMALL = "bundled", "readme", "release"
# Files whose partial steps gather what they compute, at the policy's own widths.
NARROW = (
    *("bench", "block_causal", "check", "compiled", "engine", "explain", "generate_many"),
    *("group", "mesh", "policies", "policy_reads", "roofline", "testing"),
)

share_contexts()

# Arrays lie on the first of these unless a test makes a mesh.
jax.config.update("jax_num_cpu_devices", 8)

# Looking for garbage among all that was imported is a tenth of the time that a program takes.
gc.freeze()
gc.set_threshold(20_000, 20, 20)

# The same examples in every run, so that it fails for what changed; --exhaustive draws new ones.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.register_profile("exhaustive", deadline=None)


# Every test that was collected, also those that are left out.
COLLECTED = pytest.StashKey[list]()


def pytest_addoption(parser):
    parser.addoption("--full", action="store_true", help="run the tests that tests/quick.py leaves out, too")
    parser.addoption(
        "--exhaustive",
        action="store_true",
        help="run every test with every pair of values of a `matrix`, and draw new examples",
    )
    parser.addoption(
        "--annotations",
        action="store_true",
        help="check shapes and dtypes of all calls; tests of refusals then see other errors",
    )


def pytest_configure(config):
    config.addinivalue_line("markers", "exhaustive: runs only with --exhaustive")
    config.addinivalue_line("markers", "full(reason): runs only with --full, as tests/quick.py says")
    hypothesis.settings.load_profile("exhaustive" if config.getoption("exhaustive") else "suite")

    # CI does so in files that call the engine's rooms: what looks at each call takes a fifth of the time that
    # tests take, however little it checks. Annotations of what is imported before this are not checked.
    if config.getoption("annotations"):
        jaxtyping.install_import_hook(["dllm_jax", "pallas_kernels"], "tests.checked")


def pytest_collection_modifyitems(config, items):
    """Marks what `tests/quick.py` names, and leaves out what the options do not ask for."""
    for item in items:
        for line, reason in quick.of_file(item.path.name).items():
            if quick.matches(line, quick.name_of(item)):
                item.add_marker(pytest.mark.full(reason))
    config.stash[COLLECTED] = list(items)

    everything = config.getoption("exhaustive")
    by_id = any("::" in argument for argument in config.args)
    runs = {"exhaustive": everything, "full": everything or by_id or config.getoption("full")}
    missing = [name for name, asked in runs.items() if not asked]
    left_out = [item for item in items if any(map(item.get_closest_marker, missing))]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def pytest_collection_finish():
    """Leaves out what the tests imported, too."""
    gc.freeze()


def pytest_terminal_summary(terminalreporter, config):
    if not (config.getoption("full") or config.getoption("exhaustive")):
        terminalreporter.write_line("The quick suite: `pytest --full` also runs what tests/quick.py names.")


@pytest.fixture(autouse=True)
def forget_programs():
    yield
    forget_in_time()


@pytest.fixture(autouse=True, scope="module")
def small_models_as_large_ones(request):
    """Programs of tests' models have all of a large model's parts, but in the files of `SMALL`."""
    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem.removeprefix("test_") not in SMALL:
            patch.setattr("dllm_jax.nn.parameters.is_small", lambda spec: False)
        yield


@pytest.fixture(autouse=True, scope="module")
def layers_in_one_stack(request):
    """Checkpoints load as for TPUs, layers stacked, but in the files of `SEPARATE` and with --exhaustive.

    One body for all layers compiles in half the time. In the other files they load as CPUs read them faster.
    """
    # Not before pytest has begun: annotations of what is imported earlier are not checked.
    from dllm_jax.nn.parameters import separate_is_faster

    with pytest.MonkeyPatch.context() as patch:
        if request.path.stem.removeprefix("test_") not in SEPARATE and not request.config.getoption(
            "exhaustive"
        ):
            patch.setattr(FORM_OF_LAYERS, lambda spec, platform: False)
        yield separate_is_faster


@pytest.fixture(autouse=True, scope="module")
def steps_in_place(request):
    """Partial steps compute their positions in place on the canvas, but in the files of `NARROW`.

    One kind of step less halves what is compiled. With --exhaustive every file has the policies' own widths.
    In test_policies.py --full has them for policies with layers of their own, and for two that choose sets:
    the engine gathers rows of all sets alike.
    """
    from dllm_jax import policies
    from dllm_jax.decoding import request as requests
    from tests.models import WIDE

    narrow, name = requests.step_widths, request.path.stem.removeprefix("test_")
    quick, both = not request.config.getoption("full"), (policies.PrefixCache, policies.DualCache)

    def widths(policy, spec, layout, own):
        alike = policy.only_sets and not isinstance(policy, both)
        in_place = quick or alike if name == "policies" else name not in NARROW
        return narrow(policy, spec, layout, WIDE if own is None and in_place else own)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(requests, "step_widths", widths)
        yield


@pytest.fixture
def layers_of_the_platform(monkeypatch, layers_in_one_stack):
    """Layers in the form that users get, for tests of that choice."""
    monkeypatch.setattr(FORM_OF_LAYERS, layers_in_one_stack)


@pytest.fixture
def unannotated():
    """Calls as users do, without checks of annotations, for tests of the errors that users see."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def optimized():
    """Compiles as users do, for tests that look at what the compiler made."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def evaluate(monkeypatch, capsys):
    """`python -m dllm_jax.eval WORDS`, which returns, or ends with an `error` in one line."""
    from dllm_jax.command_line import plain_errors
    from dllm_jax.eval.__main__ import main

    def run(*words: object, error: str | None = None) -> int:
        monkeypatch.setattr("sys.argv", ["dllm_jax.eval", *map(str, words)])
        if error is None:
            return main()
        with pytest.raises(SystemExit) as ended, plain_errors():
            main()
        assert error in capsys.readouterr().err.splitlines()[-1]
        return ended.value.code

    return run


@pytest.fixture(scope="session")
def lm():
    """The smallest model that reads text, as evaluations open it."""
    from dllm_jax.eval.run.settings import Checkpoint

    return Checkpoint("tiny-llada").open()


@pytest.fixture
def tokenizer(lm):
    return lm.tokenizer


@pytest.fixture(scope="session")
def llada_v_path(tmp_path_factory):
    """A random checkpoint with a vision tower; nobody writes there."""
    from tests import llada_v

    return llada_v.write(tmp_path_factory.mktemp("llada-v") / "tiny")
