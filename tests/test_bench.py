"""The benches run from end to end at the smallest size, and what they compute is right."""

import dataclasses
import functools
import importlib
import importlib.util
import json
import pathlib
import re
import shlex

import jax
import jax.numpy as jnp
import pytest
import tyro

import dllm_jax as dj
from bench import card, in_flight, peer_bonsai, peer_gemma
from bench import roofline as predictions
from bench.generate import __main__ as generate
from bench.generate.generation import Limits
from bench.shared import models
from bench.shared.measure import Grid, Run
from bench.train_tiny.converted import block_causal, with_experts
from dllm_jax.check import timing
from dllm_jax.check.weights import random_model
from dllm_jax.decoding.full_pass import forward
from dllm_jax.nn import parameters
from dllm_jax.nn.layer import Layer, embed
from dllm_jax.nn.model import full_pass
from dllm_jax.nn.spec import ExpertSpec
from dllm_jax.policies import DualCache, Policy
from tests import models as small


@pytest.fixture(scope="module")
def tiny():
    return random_model(models.shape("tiny"), "float32")


def test_generate_tiny(tmp_path):
    out = tmp_path / "found.json"
    grid = Grid(("DualCache",), prompts=(16,), batches=(1,), length=8, block=4)
    generate.main(generate.Options(shape="tiny", grid=grid, limits=Limits(repeats=2), json=out))
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


@pytest.mark.parametrize("row", [card.Row("DualCache()", 64, 2, 64, many) for many in (0, 5)], ids=str)
def test_a_row_of_a_card_says_what_was_computed(tiny, row):
    found = card.measure(tiny, row, 4, timing.ceilings("float32", 1, megabytes=4, side=64))
    assert (found["prompt"], found["steps"], found["policy"]) == (16, row.length, "DualCache()")
    assert found["first_s"] > found["seconds"] > 0
    assert found["tokens_per_s"] == pytest.approx(row.length * (row.many or row.batch) / found["seconds"])
    assert 0 < found["computed_tokens"] <= found["executed_tokens"]
    assert found["nfe"] == row.length or (row.many and 32 <= found["nfe"] <= row.length)
    assert ("predicted_s" in found) == (not row.many)


def test_a_card_continues_where_a_file_ends(tmp_path, monkeypatch):
    """Rows of another card, commit or flags are measured again, and one that failed; nothing is lost."""
    where = {"device": "H200", "commit": "abc", "flags": ""}
    first, second, *others = card.QUEUE
    held = [{"row": str(first)} | where, {"row": str(second), "error": "out of memory"} | where]
    held += [{"row": str(one)} | where | {"commit": "older"} for one in others]
    todo = list(card.missing({"rows": held}, where))
    assert todo == [second, *others]

    def one(row: card.Row) -> dict:
        clock.append(clock[-1] + 50)
        if row is second:
            raise MemoryError("out of memory")
        return {"policy": row.policy}

    clock = [0.0]
    monkeypatch.setattr(card.time, "monotonic", lambda: clock[-1])
    found = list(card.rows(iter(todo), one, until=160, where=where))
    assert [row["row"] for row in found] == [str(second), str(others[0]), str(others[1])]
    assert found[0]["error"] == "MemoryError: out of memory"
    assert all(row["commit"] == "abc" for row in found)


def test_ratios_of_a_card_stand_beside_the_claims():
    exact = {"policy": "Policy()", "prompt": 4096, "batch": 1, "seconds_per_forward": 3.0}
    ours = exact | {"policy": "SparseDLLM()", "seconds_per_forward": 0.5}
    assert card.over_exact([exact, ours], ours) == "6.0 (claimed 10)"
    assert card.over_exact([ours], ours | {"batch": 8}) == "- (claimed 10)"


SMALL = dict(
    layers=2, width=16, heads=2, kv_heads=2, head_dim=8, vocab=64, mask_id=63, eos_id=62, rope_width=4
)


@pytest.mark.parametrize("name", ["sdar-8b", "fast-dllm-v2-7b", "llada-moe-7b", "llada2-mini"])
def test_random_weights_of_published_shapes(name, layers_of_the_platform):
    """The parameters are those of a loaded model, experts, norms and dense first layers included."""
    spec = models.shape(name)
    if spec.experts is not None:
        spec = dataclasses.replace(spec, experts=dataclasses.replace(spec.experts, mlp_width=4))
    spec = dataclasses.replace(spec, **SMALL, mlp_width=24, eot_id=None)
    model = random_model(spec, "bfloat16")
    described = jax.eval_shape(parameters.separate, parameters.abstract(spec, "bfloat16"))
    shapes = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype), tree)
    assert shapes(model.params) == shapes(described)
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.params):
        constant = any(word in path[-1].key for word in ("norm", "bias"))
        assert (float(jnp.std(leaf.astype(jnp.float32))) == 0) == constant, path


def commands() -> list[str]:
    """Command lines of the pages about what was measured."""
    root = pathlib.Path(__file__).parents[1]
    names = ("background/performance", "background/results", "dev/compiled", "dev/gpu-steps")
    pages = (root / "bench/README.md", *(root / f"docs/{name}.md" for name in names))
    return [
        line
        for page in pages
        for line in re.findall(r"python -m (bench\.(?:(?! -->)[^`\n])*)", page.read_text())
    ]


def test_documented_commands_parse():
    assert commands()
    for command in sorted(set(commands())):
        module, *arguments = shlex.split(command.split(" > ")[0].split("(")[0])
        if module == "bench.peer_torch" and importlib.util.find_spec("torch") is None:
            continue
        folder = pathlib.Path(__file__).parents[1] / module.replace(".", "/")
        main = importlib.import_module(f"{module}.__main__" if folder.is_dir() else module).main
        assert tyro.cli(functools.wraps(main)(lambda *given, **named: True), args=arguments), command


def test_rows_beside_bonsai_have_equal_tokens_in_every_run(tiny):
    """Another decoder in its place: the clone is no part of the repository."""
    asked = Run(8, 1, 4, 2, 4, dj.policies.Policy(), dj.samplers.Confidence())
    exact = lambda prompt, run: dj.generate(tiny, prompt, length=4, block=2).tokens
    found = list(peer_bonsai.rows(tiny, {"bonsai": exact, "bonsai, nnx.jit": exact}, asked, 2))
    assert [(row["of"], row["policy"]) for row in found] == [
        (name, policy) for name in ("bonsai", "bonsai, nnx.jit") for policy in ("exact", "DualCache")
    ]
    for row in found:
        times = zip(row["theirs"]["values"], row["ours"]["values"], strict=True)
        assert row["theirs_over_ours"]["values"] == tuple(theirs / ours for theirs, ours in times)
        assert len(row["theirs"]["values"]) == 2
        assert row["same_tokens"] == (row["agreeing"] == row["tokens"] == 4)
        assert row["same_tokens"] or row["policy"] == "DualCache"
        assert all(cell({"shape": "tiny"} | row) for cell in peer_bonsai.TIMES.values())

    # The second run of three has another token.
    changes = iter((0, 1, 0))
    drifting = lambda prompt, run: exact(prompt, run).at[0, -1].add(next(changes))
    with pytest.raises(ValueError, match="bonsai: a run of exact decoding has other tokens than ours"):
        list(peer_bonsai.rows(tiny, {"bonsai": drifting}, asked, 2))


def test_deepminds_gemma_gets_every_weight_once(tmp_path):
    """Denoising reads all of ours but the scalars of causal passes: theirs has one per layer for both."""
    asked = peer_gemma.WithClone(width=32, layers=6, experts=4, vocab=64, canvas=4, path=tmp_path)
    model = peer_gemma.ours(asked)
    tree = peer_gemma.weights(model)
    mine, sent = (
        sum(float(jnp.sum(jnp.abs(leaf))) for leaf in jax.tree.leaves(of)) for of in (model.params, tree)
    )
    assert mine - model.spec.layers == pytest.approx(sent, rel=1e-6)
    sizes = [sum(leaf.size for leaf in jax.tree.leaves(of)) for of in (model.params, tree)]
    assert sizes[0] - model.spec.layers == sizes[1]
    assert tree["layer_5"]["attn"].keys() == tree["layer_0"]["attn"].keys() - {"kv_einsum"} | {"k_einsum"}
    with pytest.raises(ValueError, match="must be a clone of google-deepmind/gemma, with gemma/diffusion"):
        peer_gemma.main(asked)
    with pytest.raises(ValueError, match="layers=8 must be a multiple of 6"):
        peer_gemma.ours(dataclasses.replace(asked, layers=8))


def test_missing_parts_of_bonsai_are_named(tmp_path, tiny):
    with pytest.raises(
        SystemExit, match=r"is no clone of jax-ml/bonsai: bonsai/models/llada/modeling\.py is"
    ):
        peer_bonsai.bonsai(tmp_path, tiny)
    (tmp_path / peer_bonsai.HERE).parent.mkdir(parents=True)
    (tmp_path / peer_bonsai.HERE).write_text("import a_package_of_nobody")
    with pytest.raises(SystemExit, match="bonsai needs a_package_of_nobody, which is not installed"):
        peer_bonsai.bonsai(tmp_path, tiny)
    with pytest.raises(ValueError, match="shape='sdar-small' is sdar: bonsai has LLaDA"):
        peer_bonsai.Options(tmp_path, ("sdar-small",))


def test_predictions(tmp_path, capsys):
    grid, found = (
        Grid(("Policy", "DualCache"), prompts=(96,), batches=(1,), length=64),
        tmp_path / "found.json",
    )
    forecast = predictions.Forecast(("llada-8b",), ("h100", "v5e"), grid, json=found)
    predictions.main(dataclasses.replace(forecast, markdown=True))
    table = capsys.readouterr().out
    assert table.count("| policy | prompt 96 |") == 2
    assert "(1.00x) *" in table.split("TPU v5e")[1]  # it does not fit
    rows = json.loads(found.read_text())["rows"]
    assert {(row["hardware"], row["fits"]) for row in rows} == {("h100", True), ("v5e", False)}
    assert (len(rows), rows[0]["policy"], rows[0]["over_exact"]) == (2 * 2, "Policy", 1.0)


def test_norms_of_queries_and_keys_keep_attention_as_peaked():
    """Of the first layer, whose inputs are the same: the mean squares are those of the model without."""
    spec, tokens = small.spec("sdar", kv_heads=4), jnp.arange(24).reshape(2, 12)
    before = small.tiny("llada")
    after = block_causal(before, dataclasses.replace(spec, rope_base=before.spec.rope_base), tokens)
    position, _, rope = full_pass(before.spec, tokens, None)
    squares = []
    for model in (small.separate(before), after):
        layer = Layer(model.params["layers"][0], model.spec, rope, 0)
        qk = layer.qk(embed(model.params, tokens), position)
        squares.append([float(jnp.mean(part**2)) for part in qk])
    assert squares[1] == pytest.approx(squares[0], rel=1e-4)
    with pytest.raises(ValueError, match="sdar model cannot be the beginning"):
        block_causal(after, spec, tokens)


def test_a_dense_model_begins_as_one_with_experts():
    """Nearly the same function; without the pairing of experts and their copies it is another one."""
    dense = small.tiny("sdar")
    experts = ExpertSpec(count=5, per_token=3, mlp_width=16, renormalized=True)
    spec = dataclasses.replace(dense.spec, family="sdar-moe", experts=experts)
    tokens = small.random_tokens(spec, 2, 24)
    logits = forward(dense, tokens)
    converted = with_experts(dense, spec, spread=1e-6)
    assert float(jnp.abs(forward(converted, tokens) - logits).max()) < 1e-3
    for layer in converted.params["layers"]:
        layer["router"] = jnp.abs(layer["router"])
    assert float(jnp.abs(forward(converted, tokens) - logits).max()) > 0.1
    with pytest.raises(ValueError, match="do not divide an MLP of width 48"):
        with_experts(dense, dataclasses.replace(spec, experts=dataclasses.replace(experts, mlp_width=20)))


@pytest.mark.filterwarnings("ignore:.*masks of sequences")  # the planned sampler decodes nothing
@pytest.mark.parametrize("policy", [Policy(), DualCache()], ids=lambda p: type(p).__name__)
def test_positions_in_flight_are_counted_as_steps_execute_them(policy):
    prompts = [[10 + i, *[11] * (5 * i % 12)] for i in range(7)]
    options = dict(slots=2, group=1, length=32, block=4, buckets=dj.buckets.Ladder((4, 6, 12)))
    counted = in_flight.account(prompts, policy, **options)
    asked = options | dict(policy=policy, sampler=in_flight.Planned())
    outs = [out for _, out in dj.generate_many(small.tiny("llada"), prompts, **asked)]
    total = lambda name: sum(float(getattr(out.stats, name)[0]) for out in outs)
    assert counted.selected == total("computed_tokens")
    assert counted.row()["executed"] == pytest.approx(total("executed_tokens") / counted.selected)
    assert len(counted.rungs) > 1
