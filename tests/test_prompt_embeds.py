"""Prompts that hold inputs in the place of token ids."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax import eviction, policies, samplers
from dllm_jax.decoding.watch.recording import Recording
from dllm_jax.testing.runs import assert_same_run, of_sequence
from tests import refuses
from tests.models import FAMILIES, families, random_tokens, tiny
from tests.policy_cases import EVERY, KEY, daily, matrix, short, suited
from tests.test_watch import data

LENGTHS = (9, 5)
OPTIONS = dict(length=8, block=4, steps=4, key=KEY, trace=True)
GUIDED = samplers.Confidence(cfg_scale=0.7)


def prompts(model) -> tuple[np.ndarray, np.ndarray]:
    """Left-padded ids of two sequences, and their mask."""
    ids = random_tokens(model.spec, len(LENGTHS), max(LENGTHS), seed=3)
    return ids, np.arange(max(LENGTHS)) >= max(LENGTHS) - np.asarray(LENGTHS)[:, None]


def embedded(model, ids, where, seed=None) -> tuple[np.ndarray, np.ndarray]:
    """The ids with places for inputs, and these: the table's own rows, or random ones; NaN is never read."""
    rows = np.asarray(model.params["embed"])[ids]
    if seed is not None:
        rows = np.random.default_rng(seed).standard_normal(rows.shape, np.float32) * rows.std()
    return np.where(where, dj.EMBEDS_PLACEHOLDER, ids), np.where(where[..., None], rows, np.float32(np.nan))


def assert_equal_responses(ours, theirs, prompt: int):
    for name in ("tokens", "computed", "score", "proposed"):
        one, other = (np.asarray(getattr(run.trace, name)) for run in (ours, theirs))
        last = slice(prompt, None) if name == "tokens" else slice(None)
        np.testing.assert_array_equal(one[..., last], other[..., last], err_msg=name)


ONLINE = dict(budget=3, layers=eviction.OnlineLayers())  # budgets are measured by a pass over the inputs
MEASURED = policies.MaskKV(prompt_every=3, response_every=3, **ONLINE), policies.EvictPrompt(**ONLINE)


@matrix("policy, family", (*EVERY, *MEASURED), FAMILIES, today=[(policies.SparseDLLM, "dream")])
def test_rows_of_the_table_in_the_place_of_ids_change_nothing(policy, family):
    """Padded, with guidance: the second stream's prompt is masked, whatever stands in it."""
    model = tiny(family)
    ids, mask = prompts(model)
    where = mask & (np.arange(ids.shape[1]) % 3 != 1)
    options = OPTIONS | dict(policy=policy, sampler=suited(policy, GUIDED), prompt_mask=mask)
    theirs = dj.generate(model, ids, **options)
    given, rows = embedded(model, ids, where)
    ours = dj.generate(model, given, prompt_embeds=rows, **options)
    assert_equal_responses(ours, theirs, ids.shape[1])
    np.testing.assert_array_equal(np.asarray(ours.tokens)[:, : ids.shape[1]], given)


@pytest.mark.exhaustive
@matrix("policy, family", EVERY, FAMILIES, today=[])
def test_a_batch_equals_its_sequences_alone_and_a_bucket_changes_nothing(policy, family):
    model = tiny(family)
    ids, mask = prompts(model)
    given, rows = embedded(model, ids, mask & (np.arange(ids.shape[1]) < 8), seed=1)
    options = OPTIONS | dict(policy=policy, sampler=suited(policy, samplers.Confidence()))
    options["key"] = jax.random.split(KEY, 2)
    batch = dj.generate(model, given, prompt_mask=mask, prompt_embeds=rows, **options)
    for i, length in enumerate(LENGTHS):
        own = options | {"key": options["key"][i : i + 1]}
        if i:
            own |= {"buckets": dj.buckets.Ladder((9,))}
        alone = dj.generate(model, given[i, -length:], prompt_embeds=rows[i, -length:], **own)
        assert_same_run(of_sequence(batch.trace, i, length + 8), alone.trace, computed=True)
    plain = dj.generate(model, np.where(given < 0, ids, given), prompt_mask=mask, **options)
    same = lambda name: np.array_equal(getattr(plain.trace, name), getattr(batch.trace, name))
    assert not (same("score") and same("proposed")), "the inputs were not read"


@families("dream")
def test_full_passes_take_inputs_too_and_have_their_gradient(family):
    model = tiny(family)
    ids, mask = prompts(model)
    given, rows = embedded(model, ids, mask & (np.arange(9) > 5))
    for function in (dj.forward, dj.hidden_states):
        want = function(model, ids, mask)
        np.testing.assert_array_equal(function(model, given, mask, embeds=rows), want)
    loss = lambda rows: jnp.sum(dj.forward(model, given, mask, embeds=rows)[mask] ** 2)
    gradient = np.asarray(jax.grad(loss)(jnp.nan_to_num(rows)))
    np.testing.assert_array_equal(np.any(gradient != 0, axis=-1), given == dj.EMBEDS_PLACEHOLDER)


@pytest.mark.exhaustive
def test_a_shadow_block_sees_the_inputs():
    model = tiny("llada")
    ids, mask = prompts(model)
    given, rows = embedded(model, ids, mask)
    wino = samplers.WINO(wide_in=0.0, narrow_out=1.0, fewest=3, cfg_scale=0.7)
    options = OPTIONS | dict(block=8, policy=policies.DualCache(), sampler=wino, prompt_mask=mask)
    theirs = dj.generate(model, ids, **options)
    masks = np.asarray(theirs.trace.tokens) == model.spec.mask_id
    assert (~masks[:-1] & masks[1:]).any(), "nothing was taken back"
    assert_equal_responses(dj.generate(model, given, prompt_embeds=rows, **options), theirs, ids.shape[1])


ANY = policies.Policy(), policies.DualCache(), policies.DLLMCache(3)


@pytest.mark.parametrize("policy", daily(ANY, policies.Policy), ids=short)
def test_interventions_act_on_the_inputs(policy):
    """Others are given; at the first layer the right ones are put in their place."""
    model = tiny("llada")
    ids, mask = prompts(model)
    where = mask & (np.arange(ids.shape[1]) == 6)
    given, rows = embedded(model, ids, where, seed=4)
    right = np.asarray(model.params["embed"])[ids[:, 6]][None, :, None]
    patch = (dj.Intervention.patch("residual", right, layers=0, positions=6),)
    options = OPTIONS | dict(policy=policy, prompt_mask=mask)
    ours = dj.generate(model, given, prompt_embeds=rows, interventions=patch, **options)
    assert_equal_responses(ours, dj.generate(model, ids, **options), ids.shape[1])
    full = dj.forward(model, given, mask, patch, embeds=rows)
    np.testing.assert_allclose(np.asarray(full)[mask], dj.forward(model, ids, mask)[mask], atol=1e-5)
    assert not np.allclose(dj.forward(model, given, mask, embeds=rows)[mask], full[mask], atol=1e-3)


def test_a_trace_of_embedded_prompts_has_positions_and_tokens():
    """Positions and tokens; what the network computed of inputs that it does not keep is refused."""
    model = tiny("llada")
    ids, mask = prompts(model)
    given, rows = embedded(model, ids, mask)
    out = dj.generate(model, given, prompt_mask=mask, prompt_embeds=rows, **OPTIONS)
    refuses("does not keep what was passed as prompt_embeds=", dj.capture, model, out, prompt_mask=mask)
    refuses(r"run.tokens holds id -1.*prompt_embeds", dj.trajectory_log_probs, model, out, prompt_mask=mask)
    (panel,) = data(out.to_html())
    assert panel["pieces"]["-1"] == ["▦", False]
    record = Recording.of(out.trace, 0)
    assert (record.mask_id, record.to_fill.tolist()) == (model.spec.mask_id, list(range(9, 17)))
    still = out.trace._replace(tokens=out.trace.tokens[:1].repeat(2, 0), proposed=out.trace.proposed[:0])
    still = still._replace(score=out.trace.score[:0], computed=out.trace.computed[:0])
    assert not Recording.of(still._replace(active=out.trace.active[:0]), 0).to_fill.size


def test_inside_of_jit_and_over_a_mesh():
    model = tiny("llada")
    ids, mask = prompts(model)
    given, rows = embedded(model, ids, mask, seed=2)
    options = dict(length=8, block=4, policy=policies.DualCache())
    want = dj.generate(model, given, prompt_mask=mask, prompt_embeds=rows, **options).tokens
    run = lambda model, *arrays: (
        dj.generate(model, arrays[0], prompt_mask=arrays[1], prompt_embeds=arrays[2], **options).tokens
    )
    np.testing.assert_array_equal(jax.jit(run)(model, given, mask, rows), want)
    with jax.set_mesh(jax.make_mesh((4,), ("dp",), axis_types=(jax.sharding.AxisType.Auto,))):
        split = jax.device_put(model, jax.sharding.PartitionSpec())
        np.testing.assert_array_equal(run(split, given, mask, rows), want)


def test_embeddings_that_do_not_fit_are_refused(unannotated):
    floats = lambda *shape: np.zeros(shape, np.float32)
    for prompt, embeds, message in (
        ([[1, -1]], None, r"prompt holds id -1, outside the vocabulary \[0, 61\); -1 is for .*prompt_embeds"),
        ([[1, -2]], floats(1, 2, 32), r"prompt holds id -2, outside"),
        ([[1, 2]], floats(1, 2, 32), "nothing of prompt_embeds would be read"),
        ([[1, -1]], floats(1, 3, 32), r"prompt_embeds of dtype float32 and shape \(1, 3, 32\) must be .*"),
        ([[1, -1]], floats(1, 2, 31), r"must be floats \[batch, positions, width\] = \[1, 2, 32\]"),
        ([[1, -1]], np.zeros((1, 2, 32), np.int32), "prompt_embeds of dtype int32"),
        ([[1, -1]], "text", "prompt_embeds='text' must be floats"),
    ):
        refuses(message, dj.generate, tiny("llada"), prompt, prompt_embeds=embeds, length=4)
    refuses("embeds of dtype float32", dj.forward, tiny("llada"), np.array([[1, -1]]), embeds=floats(1, 2, 3))
