"""Results: not replaced by others, and what a journal may be resumed by."""

import dataclasses

import pytest

from dllm_jax.eval import cli
from dllm_jax.eval.results.record import paths
from dllm_jax.eval.run.checkpoint import Checkpoint
from dllm_jax.eval.run.settings import Decoding


def test_a_result_is_replaced_by_the_same_run_only(tmp_path):
    decoding = Decoding(length=4, block=2)
    options = cli.Options(decoding=decoding, out=tmp_path)
    run = lambda task="FewShot", **changes: cli.run_tasks(
        dataclasses.replace(options, **changes), task, (5,), 1
    )
    assert run() == 0
    content = (tmp_path / "tasks-Policy.json").read_text()
    for changes, reason in (
        (dict(sampler="Threshold(0.9)"), r"decoding\.sampler was .Confidence.* and would be .Threshold"),
        (
            dict(decoding=dataclasses.replace(decoding, seed=1)),
            r"decoding\.seed was 0 and would be 1; settings\.seed was 0 .*another --out",
        ),
        (dict(checkpoint=Checkpoint("tiny-dream")), r"model\.identity was"),
        (dict(task="FewShot(kinds=3)"), r"settings\.task was"),
        (dict(decoding=dataclasses.replace(decoding, batch=2)), "batch was 8 and would be 2"),
    ):
        with pytest.raises(ValueError, match=reason):
            run(**changes)
    assert (tmp_path / "tasks-Policy.json").read_text() == content
    assert run() == 0
    (tmp_path / "tasks-Policy.json").write_text("{}")
    with pytest.raises(ValueError, match=r"not a result of dllm_jax\.eval.*another --out"):
        run()


def test_policies_of_one_file_name_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'DualCache\(\)' and another .*tasks-DualCache\.json"):
        paths(tmp_path, "tasks", ("DualCache", "Policy", "DualCache()"))
