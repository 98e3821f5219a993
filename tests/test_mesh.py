"""Models and batches over meshes of the suite's eight devices give what one device gives."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.decoding.placement import place, with_auto_axes
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.group import choose_group, full_step_batch
from dllm_jax.engine.loop import denoise
from dllm_jax.engine.pieces import begin_pieces
from dllm_jax.nn.mesh import ReplicationWarning
from dllm_jax.testing.runs import compilations
from dllm_jax.training import Batch, masked_diffusion_loss
from tests import refuses
from tests.checkpoints import tiny as tiny_spec
from tests.checkpoints import write_hf
from tests.models import FAMILIES, frequencies, prompts, separate, spec, tiny
from tests.policy_cases import BLOCK_CASES, EVERY, EXHAUSTIVE, KEY, SAMPLER_CASES, WIDE, matrix, suited
from tests.test_stops import ANSWER, words

TP, DP, BOTH, MORE_DATA = "tp=8", "dp=8", "dp=2 tp=4", "dp=4 tp=2"
MESHES = (TP, DP, BOTH, MORE_DATA)
SPLITS = {"heads": 8, "vocab": 64}  # sizes that eight devices divide
KV_HEADS = {"llada": 8, "dream": 2}  # dream's have fewer kv heads than devices
TYPES = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}


def mesh_of(text: str, axis_type: AxisType = AxisType.Explicit) -> jax.sharding.Mesh:
    axes = dict(axis.split("=") for axis in text.split())
    return jax.make_mesh(tuple(map(int, axes.values())), tuple(axes), axis_types=(axis_type,) * len(axes))


def one_device(family: str, apart: bool = True) -> dj.Model:
    model = tiny(family, kv_heads=KV_HEADS[family], **SPLITS)
    return separate(model) if apart else model


def on_mesh(model: dj.Model, mesh: jax.sharding.Mesh, **options) -> dj.Model:
    """The model placed as `load` places it."""
    described = dj.abstract(
        model.spec, jnp.float32, mesh, separate_layers=model.layers_are_separate, **options
    )
    placed = jax.device_put(model.params, jax.tree.map(lambda leaf: leaf.sharding, described.params))
    return dataclasses.replace(model, params=placed, rules=described.rules)


def assert_same(ours: dj.Output, alone: dj.Output):
    """Tokens, computed sets and counts are the same; scores are sums in another order."""
    shared = lambda out: out._replace(stats=out.stats._replace(executed_tokens=out.stats.nfe))
    ours, alone = map(shared, (ours, alone))
    for ours_leaf, leaf in zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            np.testing.assert_allclose(ours_leaf, leaf, rtol=1e-4, atol=1e-5)
        else:
            np.testing.assert_array_equal(ours_leaf, leaf)


SOME = [
    (policies.DKVPrefill, samplers.RandomOrder(), "llada", BOTH),
    (policies.MaskKV, samplers.EBSampler(gamma=3.0), "llada", BOTH),
]


@matrix("policy, sampler, family, mesh", EVERY, SAMPLER_CASES, FAMILIES, MESHES, today=SOME)
def test_a_mesh_gives_what_one_device_gives(policy, sampler, family, mesh):
    """Three sequences of unequal length, which no mesh with several parts of the batch divides."""
    alone = one_device(family)
    prompt, mask = prompts(alone, (9, 6, 8))
    if isinstance(sampler, dj.samplers.PCSampler):  # this model has another vocabulary
        sampler = dataclasses.replace(sampler, frequencies=frequencies(alone.spec.vocab))
    options = dict(length=8, block=4, policy=policy, sampler=suited(policy, sampler), key=KEY, trace=True)
    if isinstance(policy, policies.DLLMCache) and isinstance(sampler, samplers.DreamSchedule):
        options["steps"] = 4  # after a step that decodes nothing, rounding chooses among equal positions
    run = lambda model, **more: dj.generate(model, prompt, prompt_mask=mask, **options, **more)
    assert_same(run(on_mesh(alone, mesh_of(mesh))), run(alone, widths=WIDE))


@pytest.mark.filterwarnings("ignore::dllm_jax.decoding.report.LengthWarning")
@matrix("family, mesh", FAMILIES, MESHES, today=[("llada", BOTH)])
def test_answers_grow_over_a_mesh_as_on_one_device(family, mesh):
    """After prompts (DAEDAL), and in templates (DreamOn), of unequal length."""
    eos, expand = {"llada": (41, 19), "dream": (14, 8)}[family]
    alone = one_device(family).replace_spec(eos_id=eos)
    prompt, mask = prompts(alone, (9, 6, 8))
    sampler = samplers.DAEDAL(0.3, 0.2, grow_below=0.04, insert_below=0.9, expansion=3, checked=6)
    options = dict(prompt_mask=mask, length=4, max_length=12, block=4, sampler=sampler, trace=True)
    options |= dict(policy=policies.DualCache(), nonfinite="ignore", widths=WIDE)
    masks = [alone.spec.mask_id] * 3
    templates = [[*np.asarray(prompt)[i, -width:].tolist(), *masks, 1] for i, width in enumerate((9, 6, 8))]
    fill = dict(max_length=6, sampler=samplers.DreamOn(expand), trace=True)
    placed = on_mesh(alone, mesh_of(mesh))
    for run in (
        lambda model: dj.generate(model, prompt, **options),
        lambda model: dj.infill(model, templates, **fill),
    ):
        assert_same(ours := run(placed), run(alone))
        assert np.asarray(ours.stats.insertions).any()


SURE = samplers.Threshold(0.3)
OF_BLOCKS = [
    ("a2d-qwen3", BLOCK_CASES[policies.MAGE].policy, SURE, BOTH),
    ("nemotron", policies.Policy(), samplers.SelfSpeculation(block=4), BOTH),
    *(("sdar", case.policy, SURE, DP) for case in BLOCK_CASES.values()),
    ("sdar", policies.SparseDLLM(keep=0.3), SURE, TP),
    ("a2d-qwen3", policies.MaskKV(budget=3), SURE, TP),
    ("a2d-qwen3", BLOCK_CASES[policies.FOCUS].policy, SURE, TP),
    ("nemotron", policies.Policy(), samplers.Autoregressive(), BOTH),
    ("nemotron", policies.DKVDecode(refresh_every=2), samplers.Threshold(0.4), BOTH),
]


@pytest.mark.parametrize(
    ("family", "policy", "sampler", "mesh"), OF_BLOCKS if EXHAUSTIVE else OF_BLOCKS[:2], ids=str
)
def test_chosen_pairs_and_drafts_are_those_of_one_device(family, policy, sampler, mesh):
    """KV heads are split, and with them the pairs that each of them chooses."""
    alone = tiny(family, kv_heads=4, heads=8, vocab=64, block_size=4)
    prompt, mask = prompts(alone, (9, 6, 8))
    block = {} if sampler.procedure.block else dict(block=4)
    options = dict(length=8, policy=policy, sampler=sampler, trace=True, widths=WIDE, **block)
    run = lambda model: dj.generate(model, prompt, prompt_mask=mask, **options)
    assert_same(run(on_mesh(alone, mesh_of(mesh))), run(alone))


@matrix(
    "policy, mesh", [policies.DualCache(), policies.D2Cache(k=5)], (DP, MORE_DATA),
    today=[(policies.DualCache(), MORE_DATA)],
)  # fmt: skip
def test_each_device_runs_a_group_of_its_own(policy, mesh):
    """Of two sequences per device, a full step runs one on each, and nothing as large as a cache moves."""
    alone = one_device("llada")
    prompt, mask = prompts(alone, (9, 6, 8, 7) * (2 if mesh == MORE_DATA else 4))
    sampler = samplers.Threshold(0.25, cfg_scale=1.5)
    options = dict(prompt_mask=mask, length=8, block=4, policy=policy, sampler=sampler, trace=True)
    model = on_mesh(alone, mesh_of(mesh))
    ours = dj.generate(model, prompt, group=1, **options)
    assert_same(ours, dj.generate(alone, prompt, widths=WIDE, **options))

    # One of each device's neighbors: who needs a full step, and has made the fewest steps.
    placed = place(model, prepare(model, prompt, group=1, **options))
    state = begin_pieces(*with_auto_axes(placed)[:3])
    ways, batch = placed.plan.shares, len(prompt)
    part = jnp.arange(batch) % 2 == 1
    assert choose_group(part, state.canvas, placed.plan).tolist() == list(range(1, batch, 2))
    assert full_step_batch(placed.plan, batch) == ways == batch // 2
    if isinstance(policy, policies.D2Cache):  # whose rollout gathers queries of partial steps
        return
    text = denoise.lower(placed.model, placed.inputs, placed.plan).compile().as_text()
    cache = 2 * len(prompt) * 17 * alone.spec.kv_heads * alone.spec.head_dim
    for shape in re.findall(r"= \w+\[([\d,]+)\]\S* (?:all-gather|all-to-all)\(", text):
        assert math.prod(map(int, shape.split(","))) < cache // 4, shape


@pytest.mark.parametrize("policy", [policies.MaskKV, policies.EvictPrompt])
def test_devices_exchange_the_pairs_that_heads_keep_and_no_others(policy):
    """Those of all heads together, where each alone might keep eight times as many; and few numbers."""
    model = on_mesh(one_device("llada", apart=False), mesh_of("tp=2"))
    prompt = prompts(model, (64,))[0]
    placed = place(model, prepare(model, prompt, length=8, block=4, policy=policy(budget=4)))
    text = denoise.lower(placed.model, placed.inputs, placed.plan).compile().as_text()
    moves = re.findall(r"= (.*) (all-gather|all-reduce|all-to-all)\(.*full_step/while/", text)
    sizes = {"all-gather": [], "all-reduce": [], "all-to-all": []}
    for results, kind in moves:
        shapes = re.findall(r"\[([\d,]*)\]", results)
        sizes[kind] += [math.prod(map(int, shape.split(","))) for shape in shapes if shape]
    kept = 4 * model.spec.kv_heads * model.spec.head_dim
    assert sizes["all-reduce"].count(kept) == 2
    assert max(sizes["all-gather"]) <= 2 * model.spec.kv_heads
    assert not sizes["all-to-all"]
    assert len(moves) <= 8


TWO = samplers.Confidence(), samplers.Threshold(0.25)


@pytest.mark.exhaustive
@matrix("sampler, family, mesh", TWO, FAMILIES, MESHES, today=[])
def test_guidance_early_stops_constraints_and_log_probabilities_over_a_mesh(sampler, family, mesh):
    alone = one_device(family)
    prompt, mask = prompts(alone, (9, 6, 8))
    sampler = dataclasses.replace(sampler, cfg_scale=1.5)
    options = dict(length=8, block=4, policy=policies.DualCache(), sampler=sampler, trace=True)
    options |= dict(prompt_mask=mask, widths=WIDE)
    eos = int(dj.generate(alone, prompt, **options).tokens[0, 9 + 2])
    alone = alone.replace_spec(eos_id=eos)
    run = lambda model: dj.generate(model, prompt, stop_at_eos=True, **options)
    ours = run(on_mesh(alone, mesh_of(mesh)))
    assert_same(ours, run(alone))
    assert np.asarray(ours.stats.answer_tokens)[0] < 8
    allow = [[1, 2, 3], *[None] * 6, [4]]
    options |= dict(allow=allow, constraints=samplers.OneOf(2, ((5, 6), (7,)), 8), logprobs=2)
    assert_same(run(on_mesh(alone, mesh_of(mesh))), run(alone))
    options |= dict(allow=[[i] for i in words().convert_tokens_to_ids(ANSWER)], constraints=(), logprobs=None)
    options |= dict(stop=dj.StopTexts(words(), ["##", "C"]))
    ours = run(on_mesh(alone, mesh_of(mesh)))
    assert_same(ours, run(alone))
    assert np.asarray(ours.stats.answer_tokens).tolist() == [4, 4, 4]


def test_a_mesh_records_runs_of_samplers_that_verify_causally():
    """A trace says so on a model without a causal context, too: its canvases are not computed again."""
    alone = tiny("sdar", **SPLITS)
    prompt, mask = prompts(alone, (9, 6))
    run = lambda model: dj.generate(
        model, prompt, prompt_mask=mask, length=3, sampler=samplers.S2D2(on=None), trace=True
    )
    ours = run(on_mesh(alone, mesh_of(DP)))
    assert_same(ours, run(alone))
    assert ours.trace.causal.shape == (ours.trace.steps, 2)
    assert ours.trace.start.tolist() == [0, 3]


explicit_every_day = pytest.mark.parametrize(
    "types", ["explicit", pytest.param("auto", marks=pytest.mark.exhaustive)]
)


@explicit_every_day
def test_a_sharded_prompt_stays_so(types):
    """Eager, under jit and under set_mesh; of the mesh that the user made, Auto or Explicit."""
    alone, mesh = one_device("dream", apart=False), mesh_of(BOTH, TYPES[types])
    model = on_mesh(alone, mesh)
    prompt, _ = prompts(alone, (9, 9, 9, 9))
    sharded = jax.device_put(prompt, NamedSharding(mesh, PartitionSpec("dp")))
    options = dict(length=8, block=4, policy=policies.DualCache(), trace=True, widths=WIDE)
    want = dj.generate(alone, prompt, **options)
    runs = {"eager": dj.generate(model, sharded, **options)}
    inside = jax.jit(lambda model, prompt: dj.generate(model, prompt, **options))(model, sharded)
    runs["jit"] = inside._replace(trace=None)
    np.testing.assert_array_equal(inside.trace.tokens[: len(want.trace.tokens)], want.trace.tokens)
    with jax.set_mesh(mesh):
        runs["set_mesh"] = dj.generate(model, sharded, **options)
    for name, out in runs.items():
        assert_same(out, want._replace(trace=out.trace and want.trace))
        for leaf in jax.tree.leaves((out.tokens, out.stats)):
            assert leaf.sharding.mesh == mesh, name
            assert leaf.sharding.spec[0] == "dp", name
            assert leaf.addressable_shards[0].data.shape[0] == 2, name


@pytest.mark.parametrize("types", TYPES)
def test_a_program_may_close_over_a_model_on_a_mesh(types):
    """Its own arguments lie on no mesh, and do not divide it."""
    alone = one_device("dream", apart=False)
    model, (prompt, _) = on_mesh(alone, mesh_of(BOTH, TYPES[types])), prompts(alone, (9, 9, 9))
    run = lambda model, prompt: dj.generate(model, prompt, length=8, block=4, policy=policies.DualCache())
    ours = jax.jit(lambda prompt: run(model, prompt))(prompt)
    np.testing.assert_array_equal(ours.tokens, run(alone, prompt).tokens)


@explicit_every_day
def test_full_passes_and_likelihoods_over_a_mesh(types):
    alone, mesh = one_device("llada", apart=False), mesh_of(BOTH, TYPES[types])
    model = on_mesh(alone, mesh)
    prompt, mask = prompts(alone, (9, 6, 8, 9))
    sharded = jax.device_put(prompt, NamedSharding(mesh, PartitionSpec("dp")))
    for function in (dj.forward, dj.hidden_states, jax.jit(lambda *args: dj.forward(*args))):
        ours, want = function(model, sharded, mask), function(alone, prompt, mask)
        np.testing.assert_allclose(ours, want, rtol=1e-4, atol=2e-5)
        assert "dp" in ours.sharding.spec
    answer, _ = prompts(alone, (4,) * 4)
    score = lambda model, prompt: dj.log_likelihood(
        model, prompt, answer[: len(prompt)], prompt_mask=mask[: len(prompt)], draws=16, key=KEY
    )
    np.testing.assert_allclose(score(model, sharded), score(alone, prompt), rtol=1e-4)
    assert score(model, sharded).sharding.spec == PartitionSpec("dp")
    learnt = lambda prompt: Batch(prompt=prompt, answer=answer, prompt_mask=mask)
    loss = lambda model, prompt: masked_diffusion_loss(model, learnt(prompt), KEY)[0]
    np.testing.assert_allclose(loss(model, sharded), loss(alone, prompt), rtol=1e-4)
    with jax.debug_nans(True):  # nor do sequences that only fill a mesh divide by zero
        np.testing.assert_allclose(score(model, prompt[:3]), score(alone, prompt[:3]), rtol=1e-4)


def changes(spec: dj.ModelSpec, scale: float, batch: int = 3) -> tuple[dj.Intervention, ...]:
    """A direction, values of each sequence and kv head at positions of its own, and a zero ablation."""
    drawn = lambda *shape: np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)
    heads = (spec.kv_heads, spec.head_dim)
    at = np.array([[2, 9], [4, 10], [3, 8], [5, 6]])[:batch]
    return (
        dj.Intervention.steer("residual", drawn(spec.width), scale, layers=(0, spec.layers)),
        dj.Intervention.steer("k", drawn(1, batch, 2, *heads), scale, layers=1, positions=at, steps=(0, 2)),
        dj.Intervention.patch("mlp_output", drawn(1, batch, 1, spec.width), layers=0, positions=5),
        dj.Intervention.mask("v", layers=1, positions=7, heads=0),
        dj.Intervention.steer("head_output", drawn(2, spec.head_dim), scale, layers=0, heads=(1, 0)),
    )


SMALL = "dp=2 tp=2", "tp=2", "dp=2"


@pytest.mark.exhaustive
@matrix("mesh, types, family", SMALL, TYPES, FAMILIES, today=[])
def test_interventions_over_a_mesh(mesh, types, family):
    """Of three sequences, which two devices do not divide: each one's values go where its sequence goes."""
    alone = one_device(family)
    model = on_mesh(alone, mesh_of(mesh, TYPES[types]))
    prompt, mask = prompts(alone, (9, 6, 8))
    options = dict(prompt_mask=mask, length=4, block=2, policy=policies.DualCache(), trace=True, widths=WIDE)
    run = lambda model, scale: dj.generate(model, prompt, interventions=changes(alone.spec, scale), **options)
    want, without = run(alone, 2.0), run(alone, 0.0)
    assert_same(run(model, 2.0), want)
    assert not np.array_equal(want.trace.score, without.trace.score), "nothing was changed"


@pytest.mark.exhaustive
@matrix("mesh, types, family", SMALL, TYPES, FAMILIES, today=[])
def test_capture_over_a_mesh(mesh, types, family):
    """Everything that layers compute of padded sequences, under interventions, in chunks of canvases."""
    alone, batch = one_device(family, apart=mesh == "tp=2"), 4 if mesh == "dp=2" else 3
    model = on_mesh(alone, mesh_of(mesh, TYPES[types]))
    tokens, mask = prompts(alone, (11, 8, 10, 9)[:batch])
    canvases = np.stack([tokens, tokens[:, ::-1], (tokens + 1) % 50])
    options = dict(prompt_mask=mask, interventions=changes(alone.spec, 2.0, batch), chunk=2)
    at = np.array([[3, 10], [4, 9], [5, 7], [3, 4]])[:batch]
    ours, want = (
        dj.capture(of, canvases, tuple(dj.analysis.activations.AXES), positions=at, **options)
        for of in (model, alone)
    )
    for name in dj.analysis.activations.AXES:
        np.testing.assert_allclose(getattr(ours, name), getattr(want, name), rtol=1e-4, atol=2e-5)


@pytest.mark.exhaustive
def test_work_per_device_falls_with_the_batch_it_holds(optimized):
    """Floating-point operations of the program of one device, by the compiler's account."""
    alone = tiny("llada", layers=1, width=64, mlp_width=128, **SPLITS)
    prompt, _ = prompts(alone, (24,) * 8)

    def flops(model: dj.Model) -> float:
        request = prepare(model, prompt, length=16, block=8, group=8)  # a step runs all
        placed = place(model, request)
        lowered = denoise.lower(model, placed.inputs, placed.plan)
        return lowered.compile().cost_analysis()["flops"]

    whole = flops(alone)
    part = flops(on_mesh(alone, mesh_of(MORE_DATA)))
    assert whole / 8 <= part < 1.15 * whole / 8, (part, whole)


def test_warmup_compiles_what_a_batch_over_a_mesh_needs():
    model = on_mesh(one_device("llada", apart=False), mesh_of(BOTH))
    options = dict(length=8, block=4, policy=policies.DualCache(), widths=WIDE)
    ladder = dj.buckets.Ladder((16,))
    prompt, _ = prompts(model, (9, 9, 9))
    dj.warmup(model, ladder, batch=3, **options)
    with compilations() as compiled:
        dj.generate(model, prompt, buckets=ladder, **options)
    assert not compiled


def test_loading_takes_the_mesh_of_the_context_and_any_names(tmp_path):
    path = write_hf(tmp_path / "llada", tiny_spec(layers=1))
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with jax.set_mesh(mesh):
        model = dj.load(path)
    assert model.mesh == mesh
    assert model.params["embed"].sharding.spec == PartitionSpec("model", None)
    mine = dj.MeshRules(batch=("x",), heads=("y",), mlp=("y",), vocab=("y",))
    other = dj.load(path, mesh=jax.make_mesh((2, 4), ("x", "y")), rules=mine)
    assert other.params["embed"].sharding.spec == PartitionSpec("y", None)
    sharded = dj.load(path, mesh=jax.make_mesh((8,), ("fsdp",)), separate_layers=True)
    assert sharded.params["layers"][0]["gate"].sharding.spec == PartitionSpec("fsdp", None)
    prompt, _ = prompts(model, (5, 5))
    want = dj.forward(dj.load(path), prompt)
    for placed in (model, other, sharded):
        np.testing.assert_allclose(dj.forward(placed, prompt), want, atol=1e-4)


def test_meshes_that_split_nothing_are_refused_or_warned_of(tmp_path):
    path = write_hf(tmp_path / "llada", tiny_spec())
    with pytest.raises(ValueError, match=r"axes \['x'\], of which none is known: expected some of \['dp'"):
        dj.load(path, mesh=jax.make_mesh((8,), ("x",)))
    refuses(r"axes \['x'\]", dj.abstract, spec("llada"), mesh=jax.make_mesh((8,), ("x",)))
    with pytest.warns(ReplicationWarning, match=r"\['x'\] have no rule"):
        dj.load(path, mesh=jax.make_mesh((2, 4), ("x", "tp")))
    mixed = jax.make_mesh((2, 4), ("dp", "tp"), axis_types=tuple(TYPES.values()))
    allowed = r"{'dp': 'Explicit', 'tp': 'Auto'}; expected all Auto or all Explicit. Use jax.make_mesh"
    refuses(allowed, dj.load, path, mesh=mixed)
    manual = jax.make_mesh((8,), ("dp",), axis_types=(jax.sharding.AxisType.Manual,))
    refuses(r"{'dp': 'Manual'}; expected all Auto or all Explicit", dj.load, path, mesh=manual)
    refuses(allowed, dj.forward, jax.device_put(dj.load(path), NamedSharding(mixed, PartitionSpec())), [[5]])
    refuses(r"mesh axes \['tp'\] are assigned to both batch and heads", dj.MeshRules, batch=("tp",))
    with (
        jax.set_mesh(jax.make_mesh((8,), ("dp",))),
        pytest.raises(ValueError, match=r"is not .* the mesh of jax\.set_mesh"),
    ):
        dj.load(path, mesh=jax.make_mesh((2, 4), ("dp", "tp")))
