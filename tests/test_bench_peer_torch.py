"""The torch decoders of bench.peer_torch produce our tokens, and its rows have what the table needs."""

import dataclasses
import json

import numpy as np
import pytest

import dllm_jax as dj
from bench.shared import runner
from bench.shared.measure import Run
from tests.models import FAMILIES, tiny
from tests.policy_cases import WIDE

REASON = "torch peer: install the 'oracle' extra"
torch = pytest.importorskip("torch", reason=REASON)
torch.set_num_threads(1)  # more of them spin where the cores are taken

from bench.peer_torch import __main__ as peer_torch  # noqa: E402 (needs torch)
from bench.peer_torch.decoders import peer  # noqa: E402
from bench.peer_torch.twin import twin  # noqa: E402

POLICIES = (
    dj.policies.Policy(),
    dj.policies.DualCache(),
    dj.policies.SparseDLLM(),
    dj.policies.SparseDLLM(keep=0.3, kernel=1, delay=0),
)


def generations(model: dj.Model, policy: dj.policies.Policy, **changes) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of ours and theirs: two prompts of 9, blocks of 6 in 4 steps (two tokens in the first two)."""
    run = Run(
        **{"prompt": 9, "batch": 2, "length": 12, "block": 6, "steps": 8} | changes,
        policy=policy,
        sampler=dj.samplers.Confidence(),
    )
    tokens = np.asarray(run.request(model).inputs.tokens)
    shape = dict(length=run.length, block=run.block, steps=run.steps)
    ours = dj.generate(model, tokens[:, : run.prompt], policy=policy, widths=WIDE, **shape)
    decoder = peer(twin(model), policy)
    assert decoder is not None
    with torch.inference_mode():
        theirs = decoder.generate(torch.tensor(tokens, dtype=torch.long), run)
    return np.asarray(ours.tokens), theirs.numpy()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_tokens(family, policy):
    ours, theirs = generations(tiny(family), policy)
    np.testing.assert_array_equal(ours, theirs)
    assert not np.any(theirs == tiny(family).spec.mask_id)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_policies_differ_where_tokens_are_compared(family):
    """Otherwise equal tokens would say nothing."""
    found = [generations(tiny(family), policy)[1] for policy in POLICIES]
    assert len({tokens.tobytes() for tokens in found}) == len(POLICIES)


def test_masks_are_never_decoded():
    """Of a model that prefers [MASK] in most places, as ours."""
    model = tiny("llada")
    head = model.params["head"].at[model.spec.mask_id].multiply(10)
    model = dataclasses.replace(model, params={**model.params, "head": head})
    ours, theirs = generations(model, dj.policies.Policy())
    best = np.asarray(dj.forward(model, ours)).argmax(axis=-1)
    assert np.mean(best == model.spec.mask_id) > 0.2
    assert not np.any(theirs == model.spec.mask_id)
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("changes", [{}, {"tied": True}], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_their_forward_is_that_of_transformers_with_our_weights(family, changes):
    model = tiny(family, **changes)
    theirs, tokens = twin(model), torch.arange(14).reshape(2, 7)
    with torch.inference_mode():
        opened = theirs.logits(theirs.full(tokens))
        whole = theirs.network(input_ids=tokens, attention_mask=torch.zeros(2, 1, 7, 7)).logits
    torch.testing.assert_close(opened, whole)
    np.testing.assert_allclose(dj.forward(model, tokens.numpy()), opened.numpy(), atol=1e-4)


def test_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # stays at one, see above
    path = tmp_path / "found.json"
    geometry = dict(prompt=(8,), length=4, block=2, repeats=2)
    options = peer_torch.Options(("tiny",), ("exact", "DualCache", "DKVDecode"), **geometry, json=path)
    peer_torch.main(options)
    report = json.loads(path.read_text())
    found = [(row["policy"].split("(")[0], row["of"]) for row in report["rows"]]
    wanted = [("exact", "forward"), *((name, "generation") for name in ("exact", "DualCache", "DKVDecode"))]
    assert found == wanted
    forward, exact, dual, dkv = report["rows"]
    for row in (exact, dual):
        assert (row["shape"], row["prompt"], row["same_tokens"], row["agreeing"], row["tokens"]) == (
            "tiny",
            8,
            True,
            4,
            4,
        )
        times = zip(row["theirs"]["values"], row["ours"]["values"], strict=True)
        assert row["theirs_over_ours"]["values"] == [pytest.approx(t / o) for t, o in times]
        assert len(row["ours"]["values"]) == 2
    assert forward["theirs_over_ours"]["low"] > 0
    times = zip(dkv["exact"]["values"], dkv["ours"]["values"], strict=True)
    assert dkv["exact_over_ours"]["values"] == [pytest.approx(e / o) for e, o in times]
    assert "theirs" not in dkv
    assert report["torch"] == torch.__version__
    assert report["specs"]["tiny"]["layers"] == 2
    assert {"cpu", "cores", "jax", "dtype", "weights"} <= set(report)
    lines = capsys.readouterr().out.splitlines()
    assert lines == runner.table_of(peer_torch.COLUMNS, report["rows"]).splitlines()
    assert "4 of 4" in lines[4]


def test_tokens_that_differ_are_counted(monkeypatch):
    """Theirs with another policy than ours."""
    model = tiny("llada")
    exact = lambda theirs, policy: peer(theirs, dj.policies.Policy())
    monkeypatch.setattr(peer_torch, "peer", exact)
    options = peer_torch.Options(("tiny",), length=12, block=6, repeats=1)
    (row,) = peer_torch.rows(model, twin(model), options, 9, dj.policies.DualCache())
    assert not row["same_tokens"]
    assert row["agreeing"] < row["tokens"] == 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(shape=("huge",)), "shape='huge'"),
        (dict(policy=("DualCache", "Dual")), "Dual are not among"),
    ],
    ids=str,
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        peer_torch.Options(**options)


def test_settings_without_a_peer_are_refused():
    theirs = twin(tiny("llada"))
    assert peer(theirs, dj.policies.D2Cache()) is None
    with pytest.raises(ValueError, match="side='prefix' must be 'both'"):
        peer(theirs, dj.policies.SparseDLLM(side="prefix"))
