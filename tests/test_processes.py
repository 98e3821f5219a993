"""Two processes of four virtual devices each, connected by gloo, compute as one program."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from convert.verify import verify
from dllm_jax.checkpoint import convert
from tests.checkpoints import tiny, write_hf

START = """
import sys
import jax
process, address, *paths = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(address, 2, int(process))
assert jax.device_count() == 8 and jax.local_device_count() == 4
"""
DECODE = """
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import dllm_jax as dj
from dllm_jax.state import host

mesh = jax.make_mesh((2, 4), ("dp", "tp"))
prompt = np.arange(20, dtype=np.int32).reshape(4, 5)
where = NamedSharding(mesh, PartitionSpec("dp"))
sharded = jax.make_array_from_callback(prompt.shape, where, lambda index: prompt[index])
options = dict(length=4, block=2, policy=dj.policies.DualCache(), trace=True, widths=(10**6,))
options |= dict(sampler=dj.samplers.Threshold(0.3, temperature=0.5), key=jax.random.key(3))
score = dict(draws=16, key=jax.random.key(1))
for path in paths:
    alone = dj.load(path)
    model = dj.load(path, mesh=mesh)
    want = dj.generate(alone, prompt, **options)
    runs = {
        "global": dj.generate(model, sharded, **options),
        "of every process": dj.generate(model, prompt, **options),
        "three": dj.generate(model, prompt[:3], **options),
    }
    for name, out in runs.items():
        b = 3 if name == "three" else 4
        assert name == "three" or out.tokens.sharding.spec[0] == "dp", out.tokens.sharding
        assert name == "three" or out.tokens.addressable_shards[0].data.shape[0] == 2
        np.testing.assert_array_equal(host.everywhere(out.tokens), np.asarray(want.tokens)[:b], err_msg=name)
        counts, expected = host.everywhere(out.stats.computed_tokens), np.asarray(want.stats.computed_tokens)
        np.testing.assert_array_equal(counts, expected[:b])
    ours = dj.log_likelihood(model, sharded, sharded, **score)
    np.testing.assert_allclose(
        host.everywhere(ours), dj.log_likelihood(alone, prompt, prompt, **score), rtol=1e-4
    )
    try:
        bad = np.where(np.arange(5) == 4, 60, prompt)
        bad = jax.make_array_from_callback(bad.shape, where, lambda index, bad=bad: bad[index])
        dj.generate(model, bad, **options)
        raise AssertionError("a mask id was not noticed")
    except ValueError as error:
        assert "is the mask id" in str(error)
print("done")
"""


# A process must read what its devices hold, and not much more: file headers, and the pieces' tables.
READ = """
from pathlib import Path
import numpy as np
import dllm_jax as dj
from dllm_jax.checkpoint import save_hf, tensors

hugging_face, converted, out = paths
read = 0


class Counted:
    def __init__(self, part):
        self.part = part

    def __getitem__(self, index):
        global read
        found = self.part[index]
        read += found.nbytes
        return found

    def __getattr__(self, name):
        return getattr(self.part, name)


class Opened:
    def __init__(self, *args, **kwargs):
        self.file = safe_open(*args, **kwargs)

    def __enter__(self):
        self.opened = self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def keys(self):
        return self.opened.keys()

    def get_slice(self, name):
        return Counted(self.opened.get_slice(name))


safe_open, tensors.safe_open = tensors.safe_open, Opened
of_files = lambda: int(Path("/proc/self/io").read_text().split()[1])


def held(params):
    parts = {}
    for path, array in jax.tree.leaves_with_path(params):
        for shard in array.addressable_shards:
            parts[path, str(shard.index)] = shard.data.nbytes
    return sum(parts.values())


size = lambda params: sum(array.nbytes for array in jax.tree.leaves(params))
dj.load(converted, mesh=jax.make_mesh((8,), ("tp",)))  # imports and compilation read files too
for shape, names in (((8,), ("tp",)), ((2, 4), ("fsdp", "tp"))):
    for separate in (True, False):
        mesh, read = jax.make_mesh(shape, names), 0
        load = lambda path: dj.load(path, mesh=mesh, separate_layers=separate)
        theirs = load(hugging_face)
        share = held(theirs.params)
        assert share < 0.6 * size(theirs.params), (shape, share)
        assert share <= read <= 1.001 * share, (shape, share, read)
        before = of_files()
        ours = load(converted)
        read = of_files() - before
        assert 0.8 * share < read < share + 200_000, (shape, share, read)
        equal = jax.jit(lambda a, b: jax.tree.map(lambda x, y: (x == y).all(), a, b))
        assert all(jax.tree.leaves(equal(theirs.params, ours.params)))
save_hf(ours, out, keep_from=hugging_face)
with_files = Path(out).iterdir()
assert {"model.safetensors", "config.json"} <= {file.name for file in with_files}
try:
    save_hf(ours, out)
    raise AssertionError("an existing directory was overwritten")
except FileExistsError:
    assert process == "0"
except OSError as error:
    assert process == "1" and "the first process failed" in str(error)
print("done")
"""


def test_a_global_batch_is_decoded_by_two_processes(tmp_path):
    llada = write_hf(tmp_path / "llada", tiny())
    run_in_two(START + DECODE, convert(llada, tmp_path / "jax"))


@pytest.mark.exhaustive
def test_each_process_reads_what_its_devices_hold_and_one_writes(tmp_path):
    large = dict(width=512, heads=8, kv_heads=8, head_dim=64, mlp_width=2048, vocab=4096, layers=1)
    hf, out = write_hf(tmp_path / "hf", tiny(**large)), tmp_path / "out"
    run_in_two(START + READ, hf, convert(hf, tmp_path / "jax"), out)
    assert verify(hf, out, tokens=0).identical


def run_in_two(program: str, *arguments: Path):
    """Runs a program in two processes, which must print "done" in the end."""
    address = free_address()
    processes = [start(program, rank, address, *arguments) for rank in range(2)]
    try:
        assert [output(process)[-1] for process in processes] == ["done"] * 2
    finally:
        for process in processes:
            process.kill()


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def start(program: str, *arguments) -> subprocess.Popen:
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1])
    return subprocess.Popen([sys.executable, "-c", program, *map(str, arguments)], **pipes)


def output(process: subprocess.Popen) -> list[str]:
    """The lines that it prints; it must end well, and in time."""
    out, error = process.communicate(timeout=300)
    assert process.returncode == 0, error[-3000:]
    return out.splitlines()
