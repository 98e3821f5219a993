"""Training on meshes of eight virtual devices, and by two processes of four, in processes of their own."""

import pytest

from tests.test_processes import free_address, output, start

COMMON = """
import sys
import warnings
import jax
import tests.conftest  # the compiler's settings
warnings.simplefilter("error")
directory, *arguments = sys.argv[1:]
"""

MESHES = """
jax.config.update("jax_num_cpu_devices", 8)
import re
import jax.numpy as jnp
import numpy as np
import pytest
from dllm_jax.training import Batch, Batches, TrainConfig, abstract_state, begin, model_of, prepare, train
from dllm_jax.training.state import step, train_step
from tests.models import cast, separate, tiny


def batch(number, examples=16):
    ids = np.random.default_rng(number).integers(0, 30, (examples, 8)).astype(np.int32)
    return Batch(ids[:, :3], ids[:, 3:])


def curve(model, mesh=None, steps=2, trainable=None, **options):
    setup = prepare(model, TrainConfig(**{"steps": 9, "warmup": 0} | options), mesh=mesh, trainable=trainable)
    state, losses = begin(model, setup), []
    for number in range(steps):
        state, metrics = train_step(state, batch(number), setup)
        losses.append(float(metrics.loss))
    return losses, state, setup


def local(array):
    return array.addressable_shards[0].data.shape


# Each mesh, form, family and option once; axes under all of their names, Auto and Explicit.
auto = (jax.sharding.AxisType.Auto,)
isolating = {"accumulate": 2, "prompt_isolation": 0.5, "blocks": (1, 9)}
CASES = [
    ((8,), ("data",), "llada", separate, {}),
    ((8,), ("fsdp",), "sdar", separate, {"remat": True}),
    ((4, 2), ("batch", "model"), "dream", lambda model: model, {"muon": 0.01}),
    ((2, 2, 2), ("dp", "fsdp", "tp"), "llada", lambda model: model, isolating),
]
skipped = int(*arguments)  # cases, and with them what runs seldom
for lengths, names, family, form, options in CASES[skipped:]:
    model = form(tiny(family, vocab=64, block_size=3 * (family == "sdar")))
    mesh = jax.make_mesh(lengths, names, axis_types=auto * len(names) if len(names) > 1 else None)
    alone, whole, _ = curve(model, **options)
    losses, state, setup = curve(model, mesh, **options)
    np.testing.assert_allclose(losses, alone, rtol=1e-5, err_msg=str(names))
    # On one device, weights that differ by rounding give parameters 4.0e-4 apart with Muon, 2.8e-4 without.
    apart = 5e-4 if "muon" in options else 3e-4
    close = lambda a, b: np.testing.assert_allclose(a, b, atol=apart, err_msg=str(names))
    jax.tree.map(close, whole.params, state.params)
    data, tensor = mesh.shape.get("fsdp", 1), mesh.shape.get("tp", mesh.shape.get("model", 1))
    first = lambda tree: tree["layers"][0] if isinstance(tree["layers"], list) else tree["layers"]
    assert local(first(state.params)["q"])[-3:] == (32 // data, 4 // tensor, 8)
    assert local(first(state.params)["down"])[-2:] == (48 // tensor, 32 // data)
    assert local(state.params["embed"]) == (64 // tensor, 32 // data)
    # What mirrors the parameters is where they are, and stays there.
    if "muon" not in options:
        where = lambda a: a.sharding.spec
        for moment in (state.moments[1][0].mu, state.moments[1][0].nu):
            assert jax.tree.all(jax.tree.map(lambda a, b: where(a) == where(b), moment, state.params))
    described = abstract_state(model, setup)
    same = lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim) and a.dtype == b.dtype
    assert jax.tree.all(jax.tree.map(same, described, state))
    trained = model_of(model, state, setup)
    assert {leaf.sharding.mesh for leaf in jax.tree.leaves(trained.params)} == {mesh}
    print("same curve", *names)

fsdp = jax.make_mesh((8,), ("fsdp",), axis_types=auto)
# bfloat16 with masters, and parts of it frozen, on a mesh that the model lies on already, with Explicit axes.
if not skipped:
    only = {"embed": False, "layers": True, "norm": False, "head": False}
    narrow = cast(tiny("llada", vocab=64), jnp.bfloat16)
    explicit = jax.make_mesh((8,), ("fsdp",), axis_types=(jax.sharding.AxisType.Explicit,))
    everywhere = jax.sharding.NamedSharding(explicit, jax.P())
    placed = jax.device_put(narrow, everywhere)
    one, other = curve(narrow, trainable=only), curve(placed, trainable=only)
    np.testing.assert_allclose(one[0], other[0], rtol=2e-2)
    assert other[1].params["embed"] is None and local(other[1].frozen["embed"]) == (64, 4)
    assert other[1].params["layers"]["q"].dtype == jnp.float32
    assert local(other[1].params["layers"]["q"]) == (2, 4, 4, 8)
    assert (placed.params["layers"]["q"] == narrow.params["layers"]["q"]).all()  # not donated
    print("frozen")

# No device ever holds a weight of all layers, not even between forward and backward pass.
setup = prepare(tiny("llada", vocab=64), TrainConfig(steps=9), mesh=fsdp)
state = begin(tiny("llada", vocab=64), setup)
with setup.scope():
    program = step.lower(state._replace(frozen=None), state.frozen, setup.batch(batch(0)), setup).compile()
text = program.as_text()
assert "f32[2,4,4,8]" in text and not re.search(r"f32\\[2,32,4,8\\]|f32\\[2,32,48\\]", text)
print("gathered by layer")


# A run that goes on elsewhere has the curve of one that does not.
def log(where, **options):
    run = train(
        tiny("dream", vocab=64), Batches(batch), TrainConfig(steps=options.pop("steps", 4), warmup=0,
        review_every=1, save_every=1), directory=where, progress=False, **options,
    )
    return [entry["loss"] for entry in run.log]


if not skipped:
    alone = log(directory + "/alone")
    moved = directory + "/moved"
    log(moved, steps=1, mesh=jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp")))
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "tensor"))):
        log(moved, steps=2)
    log(moved, steps=3)
    np.testing.assert_allclose(log(moved, mesh=fsdp), alone, atol=3e-5)
    print("resumed elsewhere")

with pytest.raises(ValueError, match="axes .'rows'., of which none is known: expected some of"):
    prepare(tiny("llada"), TrainConfig(steps=1), mesh=jax.make_mesh((8,), ("rows",)))
with pytest.raises(ValueError, match="a batch of 12 examples must be a multiple of 8: accumulate=1 micro-b"):
    train_step(state, batch(0, 12), setup)
with pytest.warns(UserWarning, match="do not divide: embed .1 parts of 4., head .1 parts of 4.$"):
    tp = prepare(tiny("dream"), TrainConfig(steps=9, warmup=0), mesh=jax.make_mesh((2, 4), ("dp", "tp")))
_, metrics = train_step(begin(tiny("dream"), tp), batch(0), tp)
np.testing.assert_allclose(metrics.loss, curve(tiny("dream"), steps=1)[0][0], rtol=1e-5)
print("refused or stated")
"""

PROCESSES = """
address, rank = arguments
jax.config.update("jax_num_cpu_devices", 4)
if address != "alone":
    jax.distributed.initialize(address, 2, int(rank))
import fcntl
import numpy as np
from dllm_jax.training import Batch, Batches, TrainConfig, train
from tests.models import tiny


def batch(number):
    ids = np.random.default_rng(number).integers(0, 30, (8, 8)).astype(np.int32)
    return Batch(ids[:, :3], ids[:, 3:])


mesh = None if address == "alone" else jax.make_mesh((2, 2, 2), ("dp", "fsdp", "tp"))
options = {"directory": directory, "progress": False, "mesh": mesh}
for steps in (1, 2):
    config = TrainConfig(steps=steps, warmup=0, review_every=1, save_every=1)
    run = train(tiny("llada", vocab=64), Batches(batch), config, **options)
print(*(entry["loss"] for entry in run.log))

# Somebody else has the directory: the first process finds out, and the others hear of it.
if rank == "0":
    taken = open(directory + "/log.jsonl", "ab")
    fcntl.flock(taken, fcntl.LOCK_EX)
try:
    train(tiny("llada", vocab=64), Batches(batch), config, **options)
except (ValueError, OSError) as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_every_mesh_has_the_curve_of_one_device(tmp_path, pytestconfig):
    """Every day on the last of the meshes; with --exhaustive on all, and going on elsewhere."""
    skipped, parts = (0, 8) if pytestconfig.getoption("exhaustive") else (3, 3)
    assert len(output(start(COMMON + MESHES, tmp_path, skipped))) == parts


@pytest.mark.exhaustive
def test_two_processes_train_as_one(tmp_path):
    address, program = free_address(), COMMON + PROCESSES
    pair = [start(program, tmp_path / "pair", address, rank) for rank in range(2)]
    alone, refused = output(start(program, tmp_path / "alone", "alone", 0))
    assert "is in use: another run trains in it" in refused
    expected = [float(loss) for loss in alone.split()]
    said = ("ValueError: directory=", "OSError: ")
    for process, begins in zip(pair, said, strict=True):
        *_, found, refused = output(process)
        assert refused.startswith(begins)
        losses = [float(loss) for loss in found.split()]
        assert len(losses) == 2
        assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < 3e-5
    log = (tmp_path / "pair" / "log.jsonl").read_text().splitlines()
    assert len(log) == 2  # one process writes it
