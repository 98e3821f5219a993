"""Two processes of four virtual devices each, connected by gloo, compute as one program."""

import os
import socket
import subprocess
import sys
from pathlib import Path

from dllm_jax.checkpoint import convert
from tests.checkpoints import tiny, write_hf

PROGRAM = """
import sys
import jax
process, port, *paths = sys.argv[1:]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_disable_most_optimizations", True)
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process))
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import dllm_jax as dj
from dllm_jax.state import host

assert jax.device_count() == 8 and jax.local_device_count() == 4
mesh = jax.make_mesh((2, 4), ("dp", "tp"))
prompt = np.arange(20, dtype=np.int32).reshape(4, 5)
where = NamedSharding(mesh, PartitionSpec("dp"))
sharded = jax.make_array_from_callback(prompt.shape, where, lambda index: prompt[index])
options = dict(length=4, block=2, policy=dj.policies.DualCache(), trace=True)
options |= dict(sampler=dj.samplers.Threshold(0.3, temperature=0.5), key=jax.random.key(3))
score = dict(draws=16, key=jax.random.key(1))
for path in paths:
    alone = dj.load(path)
    model = dj.load(path, mesh=mesh)
    want = dj.generate(alone, prompt, **options)
    runs = {
        "global": dj.generate(model, sharded, **options),
        "bucket": dj.generate(model, sharded, buckets=dj.buckets.Ladder((8,)), **options),
        "of every process": dj.generate(model, prompt, **options),
        "three": dj.generate(model, prompt[:3], **options),
    }
    for name, out in runs.items():
        b = 3 if name == "three" else 4
        assert name == "three" or out.tokens.sharding.spec[0] == "dp", out.tokens.sharding
        assert name == "three" or out.tokens.addressable_shards[0].data.shape[0] == 2
        np.testing.assert_array_equal(host.everywhere(out.tokens), np.asarray(want.tokens)[:b], err_msg=name)
        counts, expected = host.everywhere(out.stats.computed), np.asarray(want.stats.computed)
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


def test_a_global_batch_is_decoded_by_two_processes(tmp_path):
    llada = write_hf(tmp_path / "llada", tiny())
    paths = [str(convert(llada, tmp_path / "jax"))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    root = Path(__file__).parents[1]
    run = lambda process: subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(process), port, *paths],
        cwd=root,
        env={name: value for name, value in os.environ.items() if name != "XLA_FLAGS"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    processes = [run(0), run(1)]
    try:
        said = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, error) in zip(processes, said, strict=True):
        assert process.returncode == 0, error[-3000:]
        assert out.splitlines()[-1] == "done"
