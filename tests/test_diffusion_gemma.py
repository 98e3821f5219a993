"""DiffusionGemma: layers of two kinds, a second input, and what has no meaning without a mask."""

import dataclasses
import functools
import itertools
import json
import pathlib
import re
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import lora, policies, training
from dllm_jax.checkpoint import save_hf
from dllm_jax.decoding.placement import place
from dllm_jax.decoding.request import prepare
from dllm_jax.engine.beginning import empty_cache
from dllm_jax.engine.loop import denoise
from dllm_jax.nn.answers import answer_logits
from dllm_jax.nn.parameters import abstract, count
from dllm_jax.policies.base import for_model
from dllm_jax.published.presets import presets
from dllm_jax.roofline import steps
from dllm_jax.roofline.predict import work
from dllm_jax.samplers import EntropyNoise
from dllm_jax.samplers.noise import within_bound
from dllm_jax.state.cache import KV, Cache
from dllm_jax.state.layout import Layout
from dllm_jax.state.rows import full_rows
from dllm_jax.training.batch import checked
from dllm_jax.training.loss import draw
from tests import refuses
from tests.checkpoints import rewrite
from tests.models import WIDE, spec, tiny
from tests.replay.stepping import states
from tests.test_mesh import mesh_of, on_mesh

FAMILY, TOKENS = "diffusion-gemma", np.arange(20)[None] % 50
MODEL = pathlib.Path(__file__).parent / "goldens" / "models" / "diffusion-gemma-tiny"


def test_a_causal_pass_reads_nothing_later_and_a_canvas_everything_in_its_window():
    """Of the layers, the last one sees all; a window alone bounds what the first position changes."""
    model = tiny(FAMILY, layers=1, gemma=dataclasses.replace(spec(FAMILY).gemma, full=()))
    run = lambda tokens, **options: np.asarray(dj.forward(model, tokens, **options))[0]
    plain, begins, window = run(TOKENS), 12, model.spec.gemma.window
    changed = lambda at, **options: np.flatnonzero(
        np.any(run(TOKENS, **options) != run(np.where(np.arange(20) == at, 55, TOKENS), **options), axis=1)
    )
    np.testing.assert_allclose(plain[:5], run(TOKENS[:, :5]), atol=1e-4)
    assert changed(3).tolist() == [*range(3, 3 + window)]
    assert changed(15, response=begins).tolist() == [*range(begins, 20)]
    assert changed(begins - window + 1, response=begins)[-1] == 19
    assert changed(begins - window, response=begins)[-1] < begins


def test_each_kind_of_pass_has_its_scalars_and_denoising_alone_reads_expectations():
    model = tiny(FAMILY)
    soft = jnp.asarray(np.random.default_rng(0).standard_normal((1, 20, 32)), jnp.float32)
    run = lambda **options: np.asarray(dj.forward(model, TOKENS, **options))[0]
    plain, read = run(response=12), run(response=12, soft=soft)
    assert np.array_equal(plain[:12], read[:12])
    assert np.array_equal(run(), run(soft=soft))
    assert np.all(np.any(plain[12:] != read[12:], axis=1))
    other = [layer | {"causal_scalar": layer["causal_scalar"] * 2} for layer in model.params["layers"]]
    twice = dataclasses.replace(model, params=model.params | {"layers": other})
    assert np.any(np.asarray(dj.forward(twice, TOKENS))[0] != run())


def test_a_mesh_int8_and_updates_compute_what_they_should(tmp_path):
    model = tiny(FAMILY)
    plain = dj.forward(model, TOKENS, response=12)
    matrices = ("q", "k", "v", "o", "gate", "up", "down")
    adapted = lora.attach(model, lora.LoRA(rank=2, matrices=matrices), jax.random.key(0))
    assert "v" not in adapted.params["layers"][2]
    assert np.array_equal(dj.forward(adapted, TOKENS, response=12), plain)
    moved = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf + 0.1 if getattr(path[-1], "name", "") == "b" else leaf, adapted.params
    )
    changed = dataclasses.replace(adapted, params=moved)
    ours = dj.forward(changed, TOKENS, response=12)
    merged = dj.forward(lora.merge(changed), TOKENS, response=12)
    assert np.abs(ours - plain).max() > 0.1
    np.testing.assert_allclose(merged, ours, atol=1e-3)
    refuses("adapters in PEFT's files are not supported by diffusion-gemma", lora.save, changed, tmp_path)


def test_gradients_reach_every_parameter_of_a_pass():
    model = tiny(FAMILY)
    soft = jnp.ones((1, 20, 32))
    loss = lambda params: jnp.sum(
        dj.forward(dataclasses.replace(model, params=params), TOKENS, response=12, soft=soft) ** 2
    )
    found = jax.grad(loss)(model.params)
    chex.assert_tree_all_finite(found)
    assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(found))


def test_methods_that_need_a_mask_are_refused_by_name():
    model, calls = tiny(FAMILY), "does not support diffusion-gemma: it denoises uniform noise and has no mask"
    refuses(f"infill {calls}", dj.infill, model, [[1, 2, 3]])
    refuses(f"log_likelihood {calls}", dj.log_likelihood, model, [[1]], [[2]])
    refuses(f"prefill {calls}", dj.prefill, model, [1, 2, 3])
    refuses(f"calibrate {calls}", dj.eviction.calibrate, model, [[1, 2, 3]], 4)
    refuses("rope_factor=2.0 is not supported by diffusion-gemma", dj.load, MODEL, rope_factor=2.0)
    refuses("ValueProxy does not support diffusion-gemma", policies.ValueProxy.of, model, 2)
    refuses("soft is not supported by llada", dj.forward, tiny("llada"), TOKENS, soft=jnp.zeros((1, 20, 32)))
    steer = dj.Intervention.mask("k")
    refuses("are of several shapes", dj.forward, model, TOKENS, interventions=(steer,))
    of_full = dj.Intervention.mask("k", layers=2)
    assert np.any(dj.forward(model, TOKENS, interventions=(of_full,)) != dj.forward(model, TOKENS))


def test_a_full_step_has_no_logits_as_it_never_denoises():
    """A width for the canvas is added to those that are asked for; answers are those of other widths."""
    model = tiny(FAMILY)
    for widths, products in ((None, 1), ((4,), 2), (WIDE, 1)):
        options = {**OPTIONS, "widths": widths, "key": KEYS[:1]}
        placed = place(model, prepare(model, [PROMPTS[0]], **options))
        program = str(denoise.trace(placed.model, placed.inputs, placed.plan).jaxpr)
        logits = re.findall(rf"f32\[1,[1-9],{model.spec.vocab}\] = dot_general", program)
        assert len(logits) == products, widths
        found = dj.generate(model, [PROMPTS[0]], **options)
        np.testing.assert_array_equal(np.asarray(found.tokens)[0, -20:], answers()[0])


def test_costs_count_every_parameter_and_windows_bound_what_is_read():
    for of in (spec(FAMILY), presets.model_spec("diffusiongemma-26b-a4b")):
        counted = steps.layers_size(of, of.experts.count) + of.vocab * of.width + of.width
        assert counted == count(abstract(of))
    short, long = (steps.cost(steps.Step(False, 256, slots, 256), of, 1, 2).pairs for slots in (1279, 32768))
    assert long / short < 5  # one layer in six reads all of a context
    # Denoising reads the embedding twice; a causal pass reads no table, and of the last layer its K matrix.
    table, layers = 2 * (of.vocab * of.width), steps.layers_size(of, of.experts.count)
    of_step = lambda full, candidates: steps.cost(steps.Step(full, 1280, 1280, candidates), of, 1, 2)
    assert of_step(False, 256).weights - of_step(False, 0).weights == 2 * table + 2 * of.width
    assert of_step(False, 256).dense_flops - of_step(False, 0).dense_flops == 2 * 256 * table
    left_out = of_step(False, 0).weights - of_step(True, 0).weights
    assert left_out == pytest.approx(2 * layers / of.layers, rel=0.02)
    described = dj.abstract("diffusiongemma-26b-a4b", weights="int8")
    assert count(described.params) == counted
    layout = Layout(prompt=1024, response=1024, block=256, steps=4 * 48)
    for policy, fewest, slots in ((policies.Policy(), 256, 1280), (policies.D2Cache(), 64, 2048)):
        found = work(of, policy, layout)
        rows = {kind.step.rows: kind.count for kind in found.steps}
        assert (rows[2048], min(rows), sum(rows.values())) == (1, fewest, 4 * 49)
        pairs = 4 * (slots * 25 * 8 * 256 + 2048 * 5 * 2 * 512)  # bytes of keys and values
        assert pairs <= found.memory.cache < 1.001 * pairs


# -- decoding ---------------------------------------------------------------------------------------------

SAMPLER = EntropyNoise(steps=4, bound=2.0, certainty=10.0)
PROMPTS, KEYS = ([3, 1, 4, 1, 5, 9, 2, 6], [7, 8], [5] * 13), jax.random.split(jax.random.key(3), 3)
OPTIONS = dict(length=20, sampler=SAMPLER, widths=WIDE)


@functools.cache
def answers() -> np.ndarray:
    return np.asarray(dj.generate(tiny(FAMILY), PROMPTS, key=KEYS, **OPTIONS).tokens)[:, -20:]


def test_a_batch_of_unequal_prompts_equals_each_alone_however_it_is_asked_for():
    model = tiny(FAMILY)
    for i, prompt in enumerate(PROMPTS):
        alone = dj.generate(model, [prompt], key=KEYS[i : i + 1], **OPTIONS)
        np.testing.assert_array_equal(np.asarray(alone.tokens)[0, -20:], answers()[i])
    *_, last = dj.stream(model, PROMPTS, key=KEYS, every=1, **OPTIONS)
    np.testing.assert_array_equal(np.asarray(last.tokens)[:, -20:], answers())
    requests = [{"prompt": prompt, "key": key} for prompt, key in zip(PROMPTS, KEYS, strict=True)]
    for index, out in dj.generate_many(model, requests, slots=2, buckets=None, **OPTIONS):
        alone = dj.generate(model, [PROMPTS[index]], key=KEYS[index], **OPTIONS)
        np.testing.assert_array_equal(out.tokens, alone.tokens)
    dj.generate_many(model, PROMPTS, length=20, key=KEYS[0]).close()  # the model's own sampler draws too


class StoresAll(policies.Policy):
    def init(self, spec, layout, batch, dtype):
        return Cache(KV.zeros(spec, batch, layout.length, dtype), shared=())


def test_layers_with_a_window_store_that_and_a_canvas():
    """Of prompts shorter and longer than it, in batches, whatever widths are asked for."""
    model, prompts = tiny(FAMILY), ([7, 8], [5] * 13, [*range(1, 31)])
    layout = Layout.of(30, 24, 8)
    for policy, slots in ((policies.Policy(), 6 + 8), (policies.D2Cache(), 54)):
        stored = jax.eval_shape(lambda p=policy: empty_cache(model, for_model(p, model.spec), layout, 1))
        assert [pairs.k.shape[1] for pairs in stored.layers] == [slots, slots, 54]
    computed = full_rows(jnp.asarray([[False, True, True, True, True, True]]))
    assert computed.in_ring(3).index.tolist() == [[3, 3, 3, 0, 1, 2]]
    every = dj.generate(model, prompts, key=KEYS, policy=StoresAll(), **OPTIONS).tokens
    for widths in ((), (3,), (20,)):
        out = dj.generate(model, prompts, key=KEYS, **{**OPTIONS, "widths": widths})
        np.testing.assert_array_equal(out.tokens, every)
    for i, prompt in enumerate(prompts):
        alone = dj.generate(model, [prompt], key=KEYS[i : i + 1], **OPTIONS)
        np.testing.assert_array_equal(np.asarray(alone.tokens)[0, -20:], np.asarray(every)[i, -20:])


def test_a_mesh_decodes_what_one_device_does():
    """Sequences, heads and experts are divided, and what layers store."""
    gemma = dataclasses.replace(spec(FAMILY).gemma, kv_heads=2)
    model = tiny(FAMILY, vocab=64, mask_id=64, gemma=gemma)
    run = lambda of: np.asarray(dj.generate(of, PROMPTS, key=KEYS, **OPTIONS).tokens)
    np.testing.assert_array_equal(run(on_mesh(model, mesh_of("dp=4 tp=2"))), run(model))


def test_canvases_are_denoised_by_their_rule_and_stored_causally():
    """Against full passes over everything, in plain NumPy."""
    model, prompt, key = tiny(FAMILY), np.asarray([PROMPTS[0]]), KEYS[:1]
    ran = list(states(model, prompt, key=key, **OPTIONS))
    best, taken = None, 0
    for before, after in itertools.pairwise(ran):
        if bool(before.canvas.causal[0, 0]):
            best, taken = [], 0
            continue
        begins = int(before.canvas.block_start[0])
        read = SAMPLER.read_as(before.canvas, before.memory).tokens[:, : begins + 8]
        soft = jnp.pad(before.memory.soft, ((0, 0), (begins, 0), (0, 0)))
        logits = np.asarray(dj.forward(model, read, response=begins, soft=soft))[0, begins:]
        cold = 0.4 + 0.4 * (4 - taken) / 4
        share = np.exp(logits / cold - jax.nn.logsumexp(logits / cold, axis=-1, keepdims=True))
        entropy = -np.sum(share * np.log(share), axis=1)
        np.testing.assert_allclose(after.memory.entropy[0], entropy, atol=1e-4)
        best.append(logits.argmax(axis=1))
        order, taken = np.argsort(entropy), taken + 1
        accepted = np.zeros(8, bool)
        accepted[order] = np.cumsum(entropy[order]) - entropy[order] <= 2
        np.testing.assert_array_equal(np.asarray(within_bound(jnp.asarray(entropy)[None], 2.0))[0], accepted)
        kept = np.asarray(after.memory.tokens == after.memory.drawn)[0]
        assert kept[accepted].all()
        over = taken == 4 or (taken > 1 and np.array_equal(best[-2], best[-1]) and entropy.mean() < 10)
        assert bool(after.canvas.decoded_at.max() == before.canvas.step[0]) == over
        if over:
            np.testing.assert_array_equal(after.canvas.tokens[0, begins : begins + 8], best[-1])


def test_ends_stops_and_forbidden_tokens():
    model, end = tiny(FAMILY), int(answers()[0, 3])
    ended = model.replace_spec(eos_id=end, eot_id=None)
    out = np.asarray(dj.generate(ended, PROMPTS, key=KEYS, stop_at_eos=True, **OPTIONS).tokens)[:, -20:]
    first = answers()[0].tolist().index(end)
    assert (out[0, first:] == end).all()
    np.testing.assert_array_equal(out[0, :first], answers()[0, :first])
    stopped = np.asarray(dj.generate(model, PROMPTS, key=KEYS, stop=[[end]], **OPTIONS).tokens)[0, -20:]
    assert (stopped[first:] == model.spec.eos_id).all()
    others = dj.generate(model, PROMPTS, key=KEYS, forbid=[end], **OPTIONS).tokens
    assert end not in np.asarray(others)[:, -20:]
    assert all(end not in prompt for prompt in PROMPTS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(steps=4), "steps=4 is not supported by diffusion-gemma: a canvas may end early"),
        (dict(block=4), "block=4 is not supported by diffusion-gemma: it denoises canvases of 8 tokens"),
        (dict(suffix=[1]), "suffix=.* is not supported by diffusion-gemma"),
        (dict(allow=[[1]] * 8), "allow=.* is not supported by diffusion-gemma"),
        (
            dict(sampler=dj.samplers.Threshold()),
            "Threshold does not support .*has no mask token. Use Entropy",
        ),
        (
            dict(policy=policies.DualCache()),
            "DualCache does not support diffusion-gemma: it decodes parts",
        ),
        (dict(policy=policies.DKVDecode()), "DKVDecode does not support diffusion-gemma: it goes by"),
        (dict(policy=policies.FOCUS()), "FOCUS does not support diffusion-gemma: it goes by"),
        (
            dict(policy=policies.ESDLLM(evict=policies.SparseDLLM())),
            "evict=.* is not supported by diffusion-gemma: no step computes both",
        ),
        (dict(policy=policies.SuffixDropout()), r"drops masks after .* Use Policy\(\)\."),
        (dict(key=None), "draws random numbers: pass key="),
    ],
)
def test_options_without_a_meaning_are_refused_by_name(options, message):
    refuses(message, dj.generate, tiny(FAMILY), [PROMPTS[0]], **{"length": 8, "key": KEYS[:1], **options})


def test_a_sampler_of_noise_takes_its_settings_from_the_checkpoint(tmp_path):
    folder = shutil.copytree(MODEL, tmp_path / "model")
    said = {"max_denoising_steps": 12, "t_max": 0.9, "stability_threshold": 2, "confidence_threshold": None}
    bounded = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 0.2}
    (folder / "generation_config.json").write_text(json.dumps({**said, "sampler_config": bounded}))
    found = EntropyNoise(12, 0.2, 0.9, stability=2)
    assert dj.generation_defaults(dj.load(folder))["sampler"] == found
    assert prepare(dj.load(folder), [[1, 2]], key=KEYS[0], length=8).plan.sampler == found
    assert dj.generation_defaults(dj.load(MODEL))["sampler"] == EntropyNoise()
    rewrite(folder / "generation_config.json", sampler_config={"_cls_name": "Other"})
    refuses("sampler_config=.* is not supported; supported: EntropyBoundSamplerConfig", dj.load, folder)
    refuses("temperature=0.5 is not supported by EntropyNoise", EntropyNoise, temperature=0.5)
    refuses("EntropyNoise does not support llada: .* Use Threshold", dj.generate, tiny("llada"), [[1]],
            length=8, sampler=SAMPLER, key=KEYS[0])  # fmt: skip


def test_a_smaller_vocabulary_has_no_mask_token_either(tmp_path):
    ids = np.arange(24)[None]
    whole, cut = (dj.load(MODEL, vocab=vocab) for vocab in (None, 90))
    logits = dj.forward(cut, ids, response=8)
    assert logits.shape[2] == cut.spec.vocab == cut.spec.mask_id == 90
    np.testing.assert_allclose(logits, dj.forward(whole, ids, response=8)[..., :90], atol=1e-4)
    assert dj.load(save_hf(cut, tmp_path / "cut")).spec == cut.spec


# -- training ---------------------------------------------------------------------------------------------


def test_a_training_pass_predicts_each_canvas_as_denoising_does():
    """From clean earlier canvases, whatever stands in their noisy copies, with a window and without."""
    model, rng = tiny(FAMILY), np.random.default_rng(0)
    prompt, answer, noisy = (rng.integers(0, 50, (2, length)) for length in (9, 16, 16))
    soft = jnp.asarray(rng.standard_normal((2, 16, 32)), jnp.float32)
    tokens = jnp.asarray(np.concatenate([prompt, noisy], axis=1))
    found = answer_logits(model, tokens, jnp.asarray(answer), soft=soft)
    for first in (0, 8):
        context, here = np.concatenate([prompt, answer[:, :first]], axis=1), slice(first, first + 8)
        ids, begins = np.concatenate([context, noisy[:, here]], axis=1), context.shape[1]
        read = jnp.pad(soft[:, here], ((0, 0), (begins, 0), (0, 0)))
        plain = dj.forward(model, ids, response=begins, soft=read)[:, begins:]
        np.testing.assert_allclose(found[:, here], plain, atol=1e-3)
    # Of one canvas there is no clean copy to compute.
    program = jax.make_jaxpr(lambda *of: answer_logits(model, *of))
    assert "2,17,32" in str(program(tokens[:, :17], answer[:, :8]))
    assert "2,25,32" not in str(program(tokens[:, :17], answer[:, :8]))
    alone = answer_logits(model, tokens[:, :17], jnp.asarray(answer[:, :8]), soft=soft[:, :8])
    np.testing.assert_allclose(alone, found[:, :8], atol=1e-3)


def test_noise_is_drawn_by_canvas_and_answers_end_in_whole_canvases():
    of, prompt = spec(FAMILY), np.zeros((64, 3), np.int32)
    batch = checked(training.Batch(prompt, np.full((64, 11), 5)), of)
    drawn = draw(batch, jax.random.key(0), of)
    assert drawn.answer.shape == (64, 16)
    assert (np.asarray(drawn.answer)[:, 11:] == of.eos_id).all()
    assert drawn.masked.all()
    assert not (np.asarray(drawn.tokens) == of.mask_id).any()
    changed = np.asarray(drawn.tokens[:, 3:] != drawn.answer).reshape(64, 2, 8).mean(axis=2)
    assert np.abs(np.corrcoef(changed[:, 0], changed[:, 1])[0, 1]) < 0.5
    assert 0.4 < changed.mean() < 0.6
    assert changed.std() > 0.25
    assert 0.3 < np.asarray(drawn.conditioned).mean() < 0.7


def test_an_answer_is_filled_to_its_own_last_canvas_and_ignored_tokens_are_not_learnt():
    """Whatever others of the batch need: what is learnt of an example does not depend on them."""
    of, answers = spec(FAMILY), [[5] * 11, [5, -100, 5], [-100] * 3, [5] * 8]
    drawn = draw(checked(training.Batch([[1, 2]] * 4, answers), of), jax.random.key(0), of)
    wanted = np.arange(16) < np.asarray([[16], [8], [0], [8]])
    wanted[1, 1] = False
    np.testing.assert_array_equal(drawn.learnt, wanted)
    np.testing.assert_array_equal(drawn.masked, wanted)
    np.testing.assert_array_equal(np.asarray(drawn.valid)[:, 2:], wanted)
    assert (np.asarray(drawn.answer)[1, [3, 7]] == of.eos_id).all()


def test_a_model_learns_to_denoise_one_answer():
    """The objective's gradient is of the decoder's own passes: what is learnt is decoded."""
    batch = training.Batch(np.asarray([[1, 2, 3]] * 4), np.asarray([[7, 8, 9, 10, 11, 12, 13, 14]] * 4))
    config = training.TrainConfig(steps=80, warmup=2, decay=30, learning_rate=1e-2)
    source = training.Batches(lambda step: batch)
    run = training.train(tiny(FAMILY), source, config, progress=False)
    loss = lambda model: training.masked_diffusion_loss(model, batch, jax.random.key(1))[0]
    assert loss(run.model) < 0.3 * loss(tiny(FAMILY))
    out = dj.generate(run.model, [[1, 2, 3]], length=8, sampler=EntropyNoise(steps=6), key=jax.random.key(0))
    assert np.asarray(out.tokens)[0, 3:].tolist() == [7, 8, 9, 10, 11, 12, 13, 14]


# -- caches in the canvas ---------------------------------------------------------------------------------

EXACT = [
    policies.DLLMCache(response_every=1),
    policies.DLLMCache(ratio=1.0),
    policies.D2Cache(p=1),
    policies.SPACache(prompt_every=1),
    policies.DyLLM(full_steps=4),
    policies.ESDLLM(block_every=1),
    policies.SparseDLLM(keep=1.0, delay=0),
    policies.MAGE(keep=1.0),
]
PARTIAL = [
    policies.DLLMCache(response_every=3, ratio=0.5),
    policies.D2Cache(k=3),
    policies.SPACache(response_every=3, ratio=0.5),
    policies.DyLLM(tau=0.5, full_steps=1),
    policies.ESDLLM(alpha=0.0, compare="query", depths=(0.0, 0.3, 0.6)),
    policies.SparseDLLM(keep=0.2, delay=0),
    policies.MAGE(keep=2),
]


@pytest.mark.parametrize("policy", EXACT, ids=repr)
def test_caches_in_the_canvas_equal_exact_decoding_at_their_limits(policy):
    found = dj.generate(tiny(FAMILY), PROMPTS, key=KEYS, policy=policy, **OPTIONS)
    np.testing.assert_array_equal(np.asarray(found.tokens)[:, -20:], answers())


def all_steps(policy: policies.Policy, prompts=PROMPTS, keys=KEYS, **options) -> dj.Output:
    """As many steps under every policy."""
    sampler = dataclasses.replace(SAMPLER, certainty=0.0)
    options = {**OPTIONS, "sampler": sampler, **options}
    return dj.generate(tiny(FAMILY), prompts, key=keys, policy=policy, **options)


exact_steps = functools.cache(lambda: all_steps(policies.Policy()))


@pytest.mark.parametrize("policy", PARTIAL, ids=repr)
def test_partial_steps_in_the_canvas_leave_batch_mates_alone_and_compute_less(policy):
    batch, exact = all_steps(policy), exact_steps()
    assert np.any(batch.tokens != exact.tokens)
    answers_of = lambda out: np.asarray(out.tokens)[:, -20:]
    alone = all_steps(policy, PROMPTS[:1], KEYS[:1], widths=None)
    np.testing.assert_array_equal(answers_of(alone), answers_of(batch)[:1])
    # With other mates in the same program.
    mates = all_steps(policy, (PROMPTS[1], *PROMPTS[1:]))
    np.testing.assert_array_equal(answers_of(mates)[1:], answers_of(batch)[1:])
    computed = np.asarray(batch.stats.computed_tokens + batch.stats.widened_tokens)
    fewer = computed < np.asarray(exact.stats.computed_tokens)
    assert fewer.all() == isinstance(policy, policies.D2Cache | policies.ESDLLM)  # others save in layers


@pytest.mark.parametrize("policy", [policies.Policy(), policies.D2Cache(k=3)], ids=repr)
def test_log_probs_are_of_the_step_that_last_predicted_a_position(policy):
    """Which may not be the one that ends the canvas: others of it are not computed there."""
    out = all_steps(policy, logprobs=2, trace=True)
    kept = jax.tree.map(lambda array: np.asarray(array)[:, -20:], out.logprobs)
    np.testing.assert_array_equal(kept.top_tokens[..., 0], np.asarray(out.tokens)[:, -20:])
    np.testing.assert_allclose(kept.log_prob, kept.top_log_probs[..., 0], rtol=1e-6)
    computed = np.asarray(out.trace.computed) & ~np.asarray(out.trace.causal)[..., None]
    steps = np.arange(len(computed))[:, None, None]
    np.testing.assert_array_equal(kept.decoded_at, np.max(np.where(computed, steps, -1), axis=0)[:, -20:])
    options = {**OPTIONS, "sampler": dataclasses.replace(SAMPLER, certainty=0.0), "policy": policy}
    for snapshot in dj.stream(tiny(FAMILY), PROMPTS, key=KEYS, logprobs=0, every=3, **options):
        masked = snapshot.tokens == spec(FAMILY).mask_id
        assert (np.isnan(snapshot.confidence) | np.isfinite(snapshot.confidence)).all()
        assert np.isnan(snapshot.confidence[masked]).all()
        assert (snapshot.logprobs.decoded_at[masked] == -1).all()
    np.testing.assert_array_equal(snapshot.output.logprobs.decoded_at, out.logprobs.decoded_at)


def test_a_causal_pass_stores_no_outputs_and_so_computes_no_last_experts():
    def flops(policy: policies.Policy) -> float:
        request = prepare(tiny(FAMILY), [[5] * 40], key=KEYS[0], length=8, sampler=SAMPLER, policy=policy)
        placed = place(tiny(FAMILY), request, [[5] * 40])
        return denoise.lower(placed.model, placed.inputs, placed.plan).compile().cost_analysis()["flops"]

    exact = flops(policies.Policy())
    assert flops(policies.DLLMCache(ratio=0.5)) < 1.1 * exact
    assert flops(policies.DyLLM()) < 1.4 * exact


def test_positions_that_a_step_leaves_out_keep_their_tokens():
    options = {**OPTIONS, "sampler": dataclasses.replace(SAMPLER, certainty=0.0)}
    ran = list(states(tiny(FAMILY), [PROMPTS[0]], key=KEYS[:1], policy=policies.D2Cache(k=3), **options))
    left_out = 0
    for before, after in itertools.pairwise(ran):
        begins = int(before.canvas.block_start[0])
        waits = ~np.asarray(before.need)[0, begins : begins + 8]
        if bool(before.canvas.causal[0, 0]) or before.canvas.block_start != after.canvas.block_start:
            continue
        left_out += waits.sum()
        for name in ("tokens", "entropy", "drawn", "soft"):
            old, new = (np.asarray(getattr(state.memory, name))[0] for state in (before, after))
            np.testing.assert_array_equal(new[waits], old[waits])
    assert left_out


def test_d2cache_computes_noise_and_the_most_uncertain_of_a_canvas():
    """Of each position as it was last computed: whether it read what it predicts, and its entropy."""
    sampler = EntropyNoise(steps=6, bound=5.0, t_max=0.1, t_min=0.1, certainty=0.0)
    options = {**OPTIONS, "sampler": sampler, "policy": dj.policies.D2Cache(k=3, p=0.0)}
    noise, chosen = np.zeros(8, bool), []
    for before, after in itertools.pairwise(states(tiny(FAMILY), [PROMPTS[0]], key=KEYS[:1], **options)):
        begins = int(before.canvas.block_start[0])
        if bool(before.canvas.causal[0, 0]) or before.canvas.block_start != after.canvas.block_start:
            continue
        here = slice(begins, begins + 8)
        read, best = np.asarray(before.memory.tokens)[0], np.asarray(after.memory.best)[0, 0]
        noise = np.where(np.asarray(before.need)[0, here], read != best, noise)
        uncertain = np.argsort(-np.where(noise, np.inf, np.asarray(after.memory.entropy)[0]), kind="stable")
        wanted, found = noise | np.isin(np.arange(8), uncertain[:3]), np.asarray(after.need)[0, here]
        assert found[wanted].all()
        assert sum(found & ~wanted) <= 1  # the most influential of the others
        chosen.append(sum(wanted))
    assert 3 <= min(chosen) < 7
