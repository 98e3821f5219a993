"""The torch decoders of bench.peer_torch produce our tokens, and its rows have what the table needs."""

import json

import numpy as np
import pytest

import dllm_jax as dj
from bench.shared import models, runner
from bench.shared.measure import Run
from dllm_jax.check.weights import random_model
from tests.models import families, tiny

REASON = "torch peer: install the 'oracle' extra"
torch = pytest.importorskip("torch", reason=REASON)
torch.set_num_threads(1)  # more of them spin where the cores are taken

from bench.peer_torch import __main__ as peer_torch  # noqa: E402 (needs torch)
from bench.peer_torch import gemma  # noqa: E402
from bench.peer_torch.decoders import peer  # noqa: E402
from bench.peer_torch.twin import Twin, twin  # noqa: E402

SPARSE = dj.policies.SparseDLLM
POLICIES = dj.policies.Policy(), dj.policies.DualCache(), SPARSE(), SPARSE(keep=0.3, kernel=1, delay=0)


def generations(
    model: dj.Model,
    policy: dj.policies.Policy = dj.policies.Policy(),
    sampler: dj.samplers.Sampler = dj.samplers.Confidence(),
    **changes,
) -> tuple[dj.Output, np.ndarray]:
    """Ours, and their tokens: two prompts of 9, blocks of 6 in 4 steps (two tokens in the first two)."""
    shape = {"prompt": 9, "batch": 2, "length": 12, "block": 6, "steps": 8} | changes
    run = Run(**shape, policy=policy, sampler=sampler)
    tokens = np.asarray(run.request(model).inputs.tokens)
    shape = dict(length=run.length, block=run.block, steps=run.steps)
    ours = dj.generate(model, tokens[:, : run.prompt], policy=policy, sampler=sampler, **shape)
    decoder = peer(twin(model), policy)
    with torch.inference_mode():
        theirs = decoder.generate(torch.tensor(tokens, dtype=torch.long), run)
    return ours, theirs.numpy()[:, : run.prompt + run.length]


@families("llada")
def test_same_tokens(family):
    """And others under each policy: otherwise equal tokens would say nothing."""
    found = set()
    for policy in POLICIES:
        ours, theirs = generations(tiny(family), policy)
        np.testing.assert_array_equal(ours.tokens, theirs)
        assert not np.any(theirs == tiny(family).spec.mask_id)
        found.add(theirs.tobytes())
    assert len(found) == len(POLICIES)


@pytest.mark.parametrize(
    ("family", "prompt", "block"),
    [("sdar", 8, 4), ("sdar", 9, 6), ("sdar", 3, 4), ("fast-dllm-v2", 9, 6), ("llada2", 8, 4)],
)
def test_same_tokens_of_a_block_causal_model(family, prompt, block, monkeypatch):
    """Whole blocks of prompt, a block that the prompt's end shares, and no whole block; three steps each."""
    forwards, hidden = [], Twin.hidden
    counted = lambda self, tokens, *given: forwards.append(tokens.shape[1]) or hidden(self, tokens, *given)
    monkeypatch.setattr(Twin, "hidden", counted)
    described = models.shape(f"{family}-tiny", block_size=block)
    model, found = random_model(described, "float32", gain=peer_torch.GAIN), set()
    shape = dict(prompt=prompt, block=block, steps=12 // block * 3)
    for threshold in (1.0, 0.005):
        ours, theirs = generations(model, sampler=dj.samplers.Dynamic(threshold), **shape)
        np.testing.assert_array_equal(ours.tokens, theirs)
        assert not np.any(theirs == model.spec.mask_id)
        found.add(theirs.tobytes())
    assert len(found) == 2, "the threshold changed nothing"

    # Theirs is a prompt, and one more forward per block than ours.
    if prompt % block == 0 and family == "sdar":
        forwards.clear()
        ours, _ = generations(model, sampler=dj.samplers.Dynamic(1.0), **shape)
        assert forwards == [prompt, *[block] * (3 * (3 + 1))]
        assert ours.stats.nfe.tolist() == [3 * 3] * 2


def test_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # stays at one, see above
    path = tmp_path / "found.json"
    geometry = dict(prompt=(8,), length=4, block=(2,), repeats=2)
    options = peer_torch.Options(("tiny",), ("exact", "DualCache"), **geometry, json=path)
    peer_torch.main(options)
    report = json.loads(path.read_text())
    found = [(row["policy"].split("(")[0], row["of"]) for row in report["rows"]]
    wanted = [("exact", "forward"), *((name, "generation") for name in ("exact", "DualCache"))]
    assert found == wanted
    forward, exact, dual = report["rows"]
    for row in (exact, dual):
        told = [row[name] for name in ("shape", "prompt", "same_tokens", "agreeing", "tokens")]
        assert told == ["tiny", 8, True, 4, 4]
        times = zip(row["theirs"]["values"], row["ours"]["values"], strict=True)
        assert row["theirs_over_ours"]["values"] == [pytest.approx(t / o) for t, o in times]
        assert len(row["ours"]["values"]) == 2
    assert forward["theirs_over_ours"]["low"] > 0
    assert report["torch"] == torch.__version__
    assert report["specs"]["tiny"]["layers"] == 2
    assert {"cpu", "cores", "jax", "dtype", "weights"} <= set(report)
    assert (report["platform"], exact["their_device"]) == ("cpu", "cpu")
    lines = capsys.readouterr().out.splitlines()
    assert lines == runner.table_of(peer_torch.COLUMNS, report["rows"]).splitlines()
    assert "4 of 4" in lines[4]

    # Of a block-causal model a row per block and threshold, and no forward, which would be of the prompt.
    geometry |= dict(block=(2, 4), threshold=(1.0, 0.005), repeats=1)
    found = list(peer_torch.measure(peer_torch.Options(("sdar-tiny",), ("exact",), **geometry), "float32"))
    cases = [(row["of"], row["block"], row["threshold"], row["agreeing"]) for row in found]
    assert cases == [("generation", *case, 4) for case in ((2, 1.0), (2, 0.005), (4, 1.0), (4, 0.005))]
    assert [row["steps"] for row in found[::2]] == [4, 4]
    assert min(row["steps"] for row in found[1::2]) < 4


def test_bfloat16_reaches_both_sides_and_the_rotary_frequencies_stay_float32(capsys):
    model = random_model(models.shape("tiny"), "bfloat16", gain=peer_torch.GAIN)
    theirs = twin(model)
    kinds = {name: tensor.dtype for name, tensor in theirs.network.named_parameters()}
    assert set(kinds.values()) == {torch.bfloat16}
    assert theirs.network.model.rotary_emb.inv_freq.dtype == torch.float32
    geometry = dict(prompt=(8,), length=4, block=(2,), repeats=1, device="cpu", dtype="bfloat16")
    options = peer_torch.Options(("tiny",), ("DualCache",), **geometry)
    (row,) = peer_torch.measure(options, "bfloat16")
    assert row["agreeing"] >= 3  # roundings differ
    assert row["theirs_over_ours"]["low"] > 0


def test_tokens_that_differ_are_counted(monkeypatch):
    """Theirs with another policy than ours."""
    model = tiny("llada")
    exact = lambda theirs, *_: peer(theirs, dj.policies.Policy())
    monkeypatch.setattr(peer_torch, "peer", exact)
    run = Run(9, 1, 12, 6, 12, dj.policies.DualCache(), dj.samplers.Confidence())
    (row,) = peer_torch.rows(model, twin(model), run, 1)
    assert not row["same_tokens"]
    assert row["agreeing"] < row["tokens"] == 12


def test_other_policies_have_no_peer():
    theirs = twin(tiny("llada"))
    with pytest.raises(ValueError, match=r"D2Cache.* has no peer in torch: Policy, DualCache, SparseDLLM"):
        peer(theirs, dj.policies.D2Cache())
    with pytest.raises(ValueError, match="side='prefix' must be 'both'"):
        peer(theirs, SPARSE(side="prefix"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's compiler, which theirs imports
def test_rows_of_a_model_without_masks(tmp_path, monkeypatch):
    """Theirs computes our logits, and a step is a part of its canvas."""
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # stays at one, see above
    path = tmp_path / "measured.json"
    shape = dict(width=64, layers=6, experts=4, vocab=128, canvas=16, prompt=(32,), steps=3, repeats=2)
    gemma.main(gemma.Comparison(**shape, json=path))
    report = json.loads(path.read_text())
    canvas, step = report["rows"]
    assert (canvas["of"], step["of"]) == ("canvas", "denoising step")
    assert canvas["logits"] < 1e-4
    for row in (canvas, step):
        times = zip(row["theirs"]["values"], row["ours"]["values"], strict=True)
        assert row["theirs_over_ours"]["values"] == [pytest.approx(t / o) for t, o in times]
    assert step["ours"]["median"] < canvas["ours"]["median"]
    assert report["spec"]["gemma"]["full"] == [5]
    assert {"cpu", "cores", "jax", "torch", "transformers", "dtype", "weights"} <= set(report)
