"""The predicted costs: anchors worked out by hand, and schedules against what the engine does."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import roofline
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.widths import step_widths
from dllm_jax.nn.parameters import abstract, abstract_vision, count, separate
from dllm_jax.roofline.steps import experts_read, layers_size, pair_size, tower_size
from dllm_jax.vision import AnyRes, Pad
from dllm_jax.vision.tower import encode_pictures, project
from tests.models import families, random_tokens, spec, tiny
from tests.policy_cases import daily, matrix, short, suited

p = dj.policies
LLADA, DREAM = (dj.presets.model_spec(name) for name in ("llada-8b", "dream-7b"))
H100 = roofline.HARDWARE["h100"]
SHORT = dataclasses.replace(LLADA, layers=2)  # where every layer is as any other, and all of them are traced


def step_cost(model: dj.ModelSpec, rows: int, slots: int, candidates: int, batch: int = 1) -> roofline.Cost:
    return roofline.cost(roofline.Step(False, rows, slots, candidates), model, batch, 2)


@pytest.mark.parametrize(
    ("model", "gigabytes", "gigaflops", "kib"), [(LLADA, 14.99, 14.99, 512), (DREAM, 14.14, 14.14, 56)]
)
def test_anchors_of_real_models(model, gigabytes, gigaflops, kib):
    row = step_cost(model, 1, 0, 1)
    assert row.weights / 1e9 == pytest.approx(gigabytes, abs=0.006)
    assert row.dense_flops / 1e9 == pytest.approx(gigaflops, abs=0.006)
    assert 2 * pair_size(model) == kib * 1024
    table = model.vocab * model.width
    size = layers_size(model, 0) + 2 * table + model.width
    assert size == count(abstract(model))


@pytest.mark.parametrize(
    ("name", "gigabytes", "one", "many"),
    [
        ("llada-moe-7b", 14.71, 2.80, 13.89), ("llada2-mini", 32.51, 2.22, 20.79),
        ("sdar-8b", 16.38, 15.14, 15.14),
    ],
)  # fmt: skip
def test_experts_are_read_as_far_as_positions_are_sent_to_them(name, gigabytes, one, many):
    """All parameters; what a step of one position reads, and one of 32, which is sent to most experts."""
    model = dj.presets.model_spec(name)
    block = model.block_size or 32
    held = roofline.work(model, p.Policy(), dj.Layout(64, block, block, block)).memory.weights
    assert held == 2 * count(abstract(model))
    assert held / 1e9 == pytest.approx(gigabytes, abs=0.006)
    few, some = step_cost(model, 1, 0, 1), step_cost(model, 32, 0, 1)
    assert few.weights / 1e9 == pytest.approx(one, abs=0.006)
    assert some.weights / 1e9 == pytest.approx(many, abs=0.006)
    assert some == step_cost(model, 8, 0, 0.25, batch=4)
    # An expert costs what a position is sent through it, also if more is read.
    head = 2 * model.vocab * model.width
    assert some.dense_flops - head == pytest.approx(32 * (few.dense_flops - head))


def test_experts_read_are_those_that_are_drawn():
    rng, model = np.random.default_rng(0), dj.presets.model_spec("llada-moe-7b")
    for tokens in (1, 4, 24):
        drawn = [np.argsort(rng.random((tokens, 64)))[:, :8] for _ in range(200)]
        mean = np.mean([len(np.unique(chosen)) for chosen in drawn])
        assert mean == pytest.approx(experts_read(model, tokens), abs=0.5)


@pytest.mark.parametrize(
    ("hardware", "part", "whole"),
    [
        ("h100", 4.69, 20.3), ("h200", 3.27, 20.3), ("a100", 7.70, 64.3), ("b200", 1.96, 8.92),
        ("v5e", 19.2, 101.8), ("v5p", 5.68, 43.7), ("v6e", 9.58, 21.8), ("v7x", 2.13, 8.7),
    ],
)  # fmt: skip
def test_steps_of_llada(hardware, part, whole):
    """32 rows over 1280 slots, and all 1280 positions with all logits; batches share the weights."""
    hardware = roofline.HARDWARE[hardware]
    assert 1e3 * step_cost(LLADA, 32, 1280, 32).seconds(hardware) == pytest.approx(part, rel=4e-3)
    assert 1e3 * step_cost(LLADA, 1280, 1280, 1280).seconds(hardware) == pytest.approx(whole, rel=4e-3)
    one, many = step_cost(LLADA, 32, 1280, 32), step_cost(LLADA, 32, 1280, 32, batch=8)
    assert (many.flops, many.pairs) == (8 * one.flops, 8 * one.pairs)
    assert many.weights == pytest.approx(one.weights, rel=1e-3)
    assert one.weights - step_cost(LLADA, 32, 1280, 0).weights == 2 * LLADA.width * (LLADA.vocab + 1)


@pytest.mark.parametrize("policy", dj.policies.ALL, ids=lambda p: type(p).__name__)
def test_every_policy_is_cheaper_than_the_exact_decoder(policy):
    layout = dj.Layout(4096, 64, 32, 64)
    exact = roofline.work(SHORT, dj.policies.Policy(), layout).on(H100)
    work = roofline.work(SHORT, policy, layout)
    assert sum(steps for _, steps, _ in work.steps) == 64
    assert work.on(H100).seconds <= exact.seconds
    assert work.memory.cache > 0 or not policy.reuses


SIZE = dj.Layout(12, 16, 8, 16)
SCHEDULED = [
    p.Policy(), p.PrefixCache(), p.DualCache(), p.DKVDecode(refresh_every=4), p.DKVPD(refresh_every=4),
    p.DKVPrefill(), p.DKVGreedy(refresh_every=3), p.DLLMCache(prompt_every=6, response_every=3),
    p.SparseDLLM(), p.MaskKV(prompt_every=6, response_every=3, budget=3),
    p.ElasticCache(window=2, gamma=-1.0), p.D2Cache(k=3, p=0.3), p.EvictPrompt(budget=3),
    p.SPACache(prompt_every=6, response_every=3),
    p.WindowDiffusion(window=6, active=2, refresh_every=5), p.SuffixDropout(keep=p.NearAndLast(2)),
    p.SlidingCache(window=2), p.ESDLLM(prompt_every=6, block_every=2, ratios=(1.0,), depths=(0.0,)),
    p.DyLLM(full_steps=3),
]  # fmt: skip


def variants(policy: dj.policies.Policy, spec: dj.ModelSpec, computed: np.ndarray) -> list[float]:
    """Rows of each step of a trace, rounded up to the width it ran in; infinite: over the canvas."""
    rows = np.sum(computed, axis=1)
    fits = lambda need: min((w for w in step_widths(policy, spec, SIZE) if w >= need), default=math.inf)
    return sorted(math.inf if need == SIZE.length else fits(need) for need in rows)


@families("llada")
@pytest.mark.parametrize("policy", daily(SCHEDULED, p.DualCache, p.DLLMCache), ids=short)
def test_schedule_is_the_engine_s(policy, family):
    """As many steps over the canvas and of each width; of D2Cache, whose nucleus is data, no wider ones."""
    model = tiny(family)
    # Predictions assume masks side by side; which position predicts them is then in the set already.
    in_order = isinstance(policy, p.WindowDiffusion)
    sampler = suited(policy, dj.samplers.Sequential() if in_order else dj.samplers.Confidence())
    out = dj.generate(
        model, random_tokens(model.spec, 1, SIZE.prompt), length=SIZE.response, block=SIZE.block,
        policy=policy, sampler=sampler, key=jax.random.key(0) if sampler.draws else None, trace=True,
    )  # fmt: skip
    assert out.trace is not None
    ran = variants(policy, model.spec, np.asarray(out.trace.computed)[:, 0])
    steps = roofline.schedule(policy, model.spec, SIZE)
    width = lambda step: math.inf if step.full else round(step.rows + step.valued)
    predicted = sorted(width(step) for step, times in steps.items() for _ in range(int(times)))
    if "D2Cache" in repr(policy):
        assert len(ran) == len(predicted)
        assert all(mine <= most for mine, most in zip(ran, predicted, strict=True))
        assert ran.count(math.inf) == 1
    else:
        assert ran == predicted


@matrix(
    "policy, shifted",
    (p.Policy(), p.DualCache()),
    (False, True),
    today=((p.DualCache, True),),
)
def test_schedule_of_a_block_causal_model_is_the_engine_s(policy, shifted):
    """A prefill, a block's steps, a finished block with the next one's first step; the answer ends one."""
    model = tiny("sdar", block_size=4, shifted=shifted)
    prompt, options = random_tokens(model.spec, 1, 11), dict(length=9, block=2, policy=policy)
    plan = prepare(model, prompt, **options).plan
    out = dj.generate(model, prompt, trace=True, **options)
    rows = np.sum(np.asarray(out.trace.computed)[:, 0], axis=-1)
    ran = [min((w for w in plan.widths if w >= need), default=math.inf) for need in rows if need]
    steps = roofline.schedule(policy, model.spec, plan.layout)
    predicted = [math.inf if step.full else step.rows for step, times in steps.items() for _ in range(times)]
    assert sorted(ran) == sorted(predicted)
    assert predicted.count(math.inf) == 1
    assert len({*predicted}) == 3 + isinstance(policy, p.DualCache) - shifted
    assert roofline.work(model.spec, policy, plan.layout, batch=2).tokens == 2 * 9
    with pytest.raises(ValueError, match="block=3 must divide the blocks of sdar, block_size=4"):
        roofline.work(model.spec, policy, dj.Layout(12, 6, 3, 6))


@pytest.mark.parametrize("prompt", [4096, 16384])
@pytest.mark.parametrize(("uneven", "chunks"), [(1, 1), (3, 3), (1000, 32)])
def test_maskkv_reads_what_its_widest_head_keeps(uneven, chunks, prompt):
    """In chunks of 256, up to the pairs of all 32 heads of a layer in one."""
    layout = dj.Layout(prompt, 256, 32, 16)
    policy = dj.policies.MaskKV(budget=256, layers=dj.eviction.UniformLayers())
    steps = roofline.schedule(policy, LLADA, layout, roofline.Assumed(uneven=uneven))
    slots = {step.slots for step in steps if not step.full}
    assert slots == {min(chunks * 256, prompt) + 256}


def test_block_causal_policies_read_and_choose_as_worked_out_by_hand():
    """Of SDAR-8B's shape: pairs attended to, moved besides and written, worked out by hand."""
    model, layout = dataclasses.replace(dj.presets.model_spec("sdar-8b"), layers=4), dj.Layout(4096, 8, 4, 8)
    evicting = p.EvictPrompt(512, dj.eviction.UniformLayers(), policy=p.Policy(), reselect=False)

    def steps(policy: dj.policies.Policy) -> dict[tuple[float, float], tuple[float, ...]]:
        counted = roofline.schedule(policy, model, layout)
        return {(s.rows, s.slots): (count, s.moved, s.written) for s, count in counted.items()}

    length, choice = 4104, 4104 / 2 + 2 * 512  # keys read again; pairs read and written once more
    assert steps(p.MAGE()) == {
        (length, length): (1, choice, length), (4, 516): (6, 0, 4), (8, length + 516): (1, choice, 12),
    }  # fmt: skip
    assert steps(evicting) == {
        (length, length): (1, choice, 512 + 11), (4, 523): (6, 2 * 512, 4), (8, 523): (1, 2 * 512, 8),
    }  # fmt: skip
    # A tenth of 4103, with an exact step in the block before the one that chooses.
    slots, choice = 410 + 4, 4104 / 2 + 2 * 410
    assert steps(p.SparseDLLM(keep=0.1)) == {
        (length, length): (1, choice, length), (4, length + slots): (2, choice, 8), (4, slots): (4, 0, 4),
        (8, length + slots): (1, choice, 12),
    }  # fmt: skip
    # Two masks for each of two that should stay, and what is not settled, fit half a block less.
    wide, layout = dataclasses.replace(model, block_size=32), dj.Layout(64, 64, 32, 64)
    assert {step.rows for step in roofline.schedule(p.FOCUS(), wide, layout)} == {128, 8, 16, 20, 52}
    assert {step.rows for step in roofline.schedule(p.FOCUS(9), wide, layout)} == {128, 8, 16, 32, 64}
    # Of 32 layers 5 run all 64 rows, 4 half of them and 23 a quarter, but in every eighth step.
    steps = roofline.schedule(p.ESDLLM(64, 8), LLADA, dj.Layout(64, 128, 64, 128))
    assert {(step.rows, times) for step, times in steps.items()} == {(192, 2), (64, 14), (25.5, 112)}
    masks = dataclasses.replace(evicting, budget=256, layers=p.MaskKV().layers, votes=p.MaskKV().votes)
    assert roofline.schedule(p.MaskKV(), wide, layout) == roofline.schedule(masks, wide, layout)


def test_copies_and_statistics_are_counted():
    """Per step and layer: pairs moved besides those attended to, keys read again being half of one."""
    layout = dj.Layout(4096, 256, 32, 64)

    def moved(policy: dj.policies.Policy) -> float:
        return next(step.moved for step in roofline.schedule(policy, SHORT, layout) if not step.full)

    for policy in (dj.policies.DualCache(), dj.policies.DLLMCache(), dj.policies.DKVPrefill()):
        assert moved(policy) == 0
    assert moved(dj.policies.SparseDLLM()) == 0  # the block's pairs lie after what is stored
    assert moved(dj.policies.MaskKV(layers=dj.eviction.UniformLayers())) == 2 * 256
    assert moved(dj.policies.ElasticCache()) == 1.5 * 4352
    assert moved(dj.policies.D2Cache()) == 0.5 * 4352


def test_assumptions_of_data_dependent_policies():
    layout = dj.Layout(256, 64, 32, 64)

    def ms(policy: dj.policies.Policy, **assumed: float) -> float:
        return roofline.work(LLADA, policy, layout, assumed=roofline.Assumed(**assumed)).on(H100).ms_per_token

    elastic, d2 = dj.policies.ElasticCache(), dj.policies.D2Cache()
    assert ms(elastic) < ms(elastic, widened=0.5) < ms(elastic, widened=1) <= 1.1 * ms(dj.policies.Policy())
    # A full step of every block, and half of the passes: nearly half of the time where memory bounds a step.
    dual = dj.policies.DualCache()
    assert ms(dual) > ms(dual, branches=4, steps_per_pass=2) > ms(dual, branches=2, steps_per_pass=2)
    assert ms(dual) < ms(dual, branches=64, steps_per_pass=2), "as many rows wait for arithmetic"
    assert ms(d2, nucleus=0) < ms(d2) == ms(d2, nucleus=d2.p) < ms(d2, nucleus=0.9)


def test_refusals():
    ask = lambda **options: roofline.work(spec("llada"), p.Policy(), SIZE, **options)
    for make, reason in (
        (lambda: ask(batch=0), "batch=0"),
        (lambda: roofline.Hardware("none", 1.0, 0.0, 1.0, "", 1.0), "bandwidth"),
        (lambda: H100.times(0), "chips=0"),
        (lambda: roofline.Assumed(widened=2), "widened=2"),
        # NumPy raises an error of its own for each of these dtypes.
        (lambda: ask(dtype="float33"), "dtype=.* is no dtype, such as bfloat16"),
        (lambda: ask(dtype="05,x"), "dtype=.* is no dtype, such as bfloat16"),
        (lambda: ask(dtype=object()), "dtype=.* is no dtype, such as bfloat16"),
        (lambda: roofline.images(LLADA, [(8, 8)]), r"the model \(llada\) has no vision tower"),
        *(
            (lambda size=size: roofline.images(LLADA_V, [size]), "sizes hold .*; expected pairs")
            for size in ((8, 0), 3, (1.5, 5))
        ),
        *(
            (
                lambda asked=asked: roofline.throughput(LLADA, p.Policy(), SIZE, asked, 2, H100),
                "must be blocks",
            )
            for asked in ([], [4, 2], [[0]])
        ),
        (lambda: ask().on("h100"), r'hardware=.* such as HARDWARE\["h100"\]'),
        (lambda: ask(views=1), "has no vision tower"),
        (lambda: roofline.work(LLADA_V, p.Policy(), SIZE, views=-1), "views=-1 must be"),
    ):
        with pytest.raises(ValueError, match=reason):
            make()


def test_memory_is_the_policy_s_and_shared_by_chips():
    layout = dj.Layout(1024, 256, 32, 8)
    of = lambda policy, **options: roofline.work(LLADA, policy, layout, **options)
    dense = of(p.DualCache(), batch=3).memory.cache
    assert dense == 3 * 1280 * 512 * 1024
    assert of(p.DualCache(), dtype=jnp.float32).memory.cache == 2 * 1280 * 512 * 1024
    assert 0 < of(p.MaskKV(budget=256)).memory.cache < 0.7 * dense / 3
    work, chip = of(p.DualCache()), roofline.HARDWARE["v5e"]
    assert [work.memory.fits(hardware) for hardware in (chip, chip.times(2))] == [False, True]
    assert work.on(H100.times(4)).seconds == pytest.approx(work.on(H100).seconds / 4)
    assert H100.times(2).name == "2 x H100 SXM"


LLADA_V = dj.presets.model_spec("llada-v-8b")


@pytest.mark.parametrize(
    ("sizes", "options", "positions", "views"),
    [
        ([(1024, 768)], {}, 3627, 7), ([(1024, 768)] * 2, {}, 2 * 729, 2),
        ([(1024, 768)] * 4, {"several": Pad(newline=True)}, 4 * 730, 4),
        ([(1024, 768), (100, 100)], {"several": AnyRes()}, 3627 + 1485, 7 + 2), ([], {}, 0, 0),
    ],
)  # fmt: skip
def test_images_by_their_sizes(sizes, options, positions, views):
    assert roofline.images(LLADA_V, sizes, **options) == (positions, views)


def test_the_tower_s_work():
    """Parameters by their count; FLOPs by XLA's, which counts the loop over queries in attention once."""
    vision = abstract_vision(LLADA_V, jnp.bfloat16)
    assert tower_size(LLADA_V) == count(vision)
    assert tower_size(LLADA) == 0
    spec = LLADA_V.vision
    assert spec is not None
    params = jax.eval_shape(separate, vision)
    params["layers"] = params["layers"][:2]
    short = dataclasses.replace(LLADA_V, vision=dataclasses.replace(spec, layers=2))
    pixels = jax.ShapeDtypeStruct((8, 384, 384, 3), jnp.float32)
    run = lambda params, pixels: project(params, encode_pictures(params, spec, pixels))
    found = jax.jit(run).lower(params, pixels).cost_analysis()
    ours = roofline.tower_cost(short, 8, 2)
    assert ours.dense_flops < found["flops"] < min(ours.flops, 1.02 * ours.dense_flops)
    assert ours.attention_flops == 8 * 2 * (2 * 2 * 16 * 729 * 729 * 72)

    # A view takes 0.67 TFLOP; views come eight at a time, each time with all weights.
    seven, nine = (roofline.tower_cost(LLADA_V, views, 2) for views in (7, 9))
    assert seven == roofline.tower_cost(LLADA_V, 8, 2)
    assert seven.flops / 8 == pytest.approx(0.673e12, rel=0.001)
    assert nine.flops == 2 * seven.flops
    assert roofline.tower_cost(LLADA_V, 9, 2, at_once=1).flops == pytest.approx(9 / 8 * seven.flops)
    held = 2 * (count(vision) - 2 * 1152 - 4096) + 8 * (4 * 3 * 384**2 + 2 * 729 * 4096)
    assert seven.bytes == held


def test_a_generation_with_images_has_the_tower_in_front():
    made = roofline.images(LLADA_V, [(1024, 768)])
    layout = dj.Layout(64 + made.positions, 32, 32, 16)
    policy = dj.policies.DualCache()
    text, seen = (roofline.work(LLADA_V, policy, layout, batch=2, views=views) for views in (0, made.views))
    assert (text.tower, seen.tower) == (None, roofline.tower_cost(LLADA_V, 2 * made.views, 2))
    assert text.on(H100).tower_ms == 0
    with_images = seen.on(H100)
    tower = 1e-3 * with_images.tower_ms
    assert tower == pytest.approx(seen.tower.seconds(H100))
    assert with_images.seconds == pytest.approx(text.on(H100).seconds + tower)
    assert text.memory.weights == 2 * (count(abstract(LLADA_V)) + tower_size(LLADA_V))
    assert seen.memory.total(H100) - text.memory.total(H100) == 2 * 2 * layout.prompt * 4096


@pytest.mark.parametrize(("steps", "taken"), [(64, 64), (16, 20)])
def test_a_causal_pass_decodes_one_token_of_each_block(steps, taken):
    """After the prompt's; the schedule of four tokens per step takes one step more in each block of 16."""
    layout = dj.Layout(32, 64, 16, steps)
    counted = roofline.schedule(dj.policies.Policy(), spec("nemotron"), layout)
    assert sum(counted.values()) == taken
