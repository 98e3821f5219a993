"""`dj.capture`: what the network computes at each step, against its own functions layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import dllm_jax as dj
from dllm_jax.analysis import activations
from dllm_jax.nn.layer import walk
from dllm_jax.nn.model import full_pass
from dllm_jax.testing.runs import compilations
from tests import refuses
from tests.models import FAMILIES, prompts, random_tokens, separate, tiny

LENGTH = 4


@pytest.fixture(scope="module", params=FAMILIES[1:])
def run(request):
    """A model, left-padded prompts, their mask, and a traced generation under a policy with a cache."""
    model = tiny(request.param)
    prompt, mask = prompts(model, (7, 4))
    policy = dj.policies.DualCache()
    out = dj.generate(model, prompt, prompt_mask=mask, length=LENGTH, block=2, policy=policy, trace=True)
    return model, mask, out


def by_hand(model, tokens, valid):
    """Residual streams, weights, K and V of all layers from the layer's own functions, softmax in float64."""
    position, mask, rope = full_pass(model.spec, tokens, valid)
    stream = dj.hidden_states(model, tokens, valid)
    found = {"residual": np.asarray(stream), "attention": [], "k": [], "v": []}

    def one(layer, x):
        q, k = (np.asarray(a, np.float64) for a in layer.qk(stream[layer.index], position))
        k = np.repeat(k, q.shape[2] // k.shape[2], axis=2)
        scores = np.einsum("bqhd,bshd->bhqs", q, k) / np.sqrt(q.shape[-1])
        if mask is not None:
            scores = np.where(np.asarray(mask), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e9))
        found["attention"].append(weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30))
        found["k"].append(np.asarray(layer.qk(stream[layer.index], position)[1]))
        found["v"].append(np.asarray(layer.value(stream[layer.index])))
        return x

    walk(separate(model).params, model.spec, rope, one, ())
    return {name: np.stack(parts) for name, parts in found.items()}


def test_everything_of_every_step_is_what_the_layers_compute(run):
    model, mask, out = run
    tokens = np.asarray(out.trace.tokens)
    valid = np.pad(mask, ((0, 0), (0, LENGTH)), constant_values=True)
    seen = dj.capture(model, out, chunk=2)  # its trace says what is padding; the last chunk is not full
    assert seen.steps.tolist() == list(range(len(tokens)))
    assert seen.residual.shape[1] == model.spec.layers + 1
    assert seen.attention_output is seen.mlp_output is None
    np.testing.assert_array_equal(seen.tokens, tokens)
    np.testing.assert_array_equal(seen.valid, valid)
    for step in (0, 2, len(tokens) - 1):
        wanted = by_hand(model, jnp.asarray(tokens[step]), jnp.asarray(valid))
        for name, array in wanted.items():
            ours = getattr(seen, name)[step]
            axis = 2 if name == "attention" else 1  # of positions, after those of layers and heads
            for sequence in range(2):
                pick = lambda a, s=sequence, axis=axis: np.compress(valid[s], a[:, s], axis=axis)
                np.testing.assert_allclose(pick(ours), pick(array), atol=2e-5, err_msg=name)
    assert (seen.attention[:, :, 1, :, 3:, :3] == 0).all()  # nothing attends to padding


def test_chosen_activations_are_a_part_of_all(run):
    model, mask, out = run
    everything = activations.AXES
    every = dj.capture(model, out, tuple(everything), prompt_mask=mask)
    at = np.array([[0, 6, 9], [3, 8, 10]])
    chosen = dict(layers=1, steps=(3, 0), positions=at, chunk=1)
    some = dj.capture(model, out, tuple(everything), prompt_mask=mask, **chosen)
    sequence = np.arange(2)[:, None]
    for name in everything:
        whole = getattr(every, name)[np.array([3, 0])][:, 1:2]
        moved = np.moveaxis(whole, {"attention": 4}.get(name, 3), 3)  # [t n b l ..]
        picked = np.moveaxis(moved[:, :, sequence, at], 3, {"attention": 4}.get(name, 3))
        np.testing.assert_allclose(getattr(some, name), picked, rtol=1e-5, atol=1e-5, err_msg=name)
        assert list(some.coordinates(name)) == list(everything[name])
    assert some.coordinates("k")["layer"].tolist() == [1]
    assert every.coordinates("residual")["layer"].tolist() == [0, 1, 2]
    np.testing.assert_array_equal(some.steps, [3, 0])
    np.testing.assert_array_equal(some.predicts - some.positions, int(model.spec.shifted))
    silent = (dj.Intervention.mask("head_output", layers=0, heads=1),)
    seen = dj.capture(model, out, "head_output", prompt_mask=mask, interventions=silent).head_output[:, 0]
    assert not seen[..., 1, :].any()
    assert seen[..., 0, :].any()
    heads = np.einsum("tbjhd,hdm->tbjm", every.head_output[:, 0], model.params["layers"]["o"][0])
    np.testing.assert_allclose(every.attention_output[:, 0], heads, atol=1e-5)
    added = every.attention_output[:, 0] + every.mlp_output[:, 0]
    np.testing.assert_allclose(every.residual[:, 1] - every.residual[:, 0], added, atol=1e-5)


def test_token_arrays_and_separate_layers():
    model = tiny("dream")
    tokens = random_tokens(model.spec, 3, 6)
    one = dj.capture(model, tokens, "k")
    assert one.k.shape == (1, 2, 3, 6, 2, 8)
    assert one.attention is None
    apart = dj.capture(separate(model), jnp.asarray(tokens), ("k",))
    np.testing.assert_allclose(apart.k, one.k, atol=1e-5)
    causal = tiny("nemotron")  # a pass over token ids
    seen = dj.capture(causal, [[5, 6, 7]], "residual", layers=2)
    answer = dj.generate(causal, [[5, 6, 7]], length=4, sampler=dj.samplers.Autoregressive()).tokens[0]
    logits = dj.logit_lens(causal, seen.residual)[0, 0, 0]
    assert logits[seen.predicts[0] == 3].argmax(axis=-1).tolist() == [answer[3]]
    last = dj.capture(model, tokens, ("residual",), layers=2)
    np.testing.assert_allclose(last.residual[0, 0], dj.hidden_states(model, tokens)[-1], atol=1e-5)


@pytest.mark.parametrize("family", ["llada", "sdar"])
def test_single_passes_take_the_lists_that_generate_takes(family):
    """Each sequence is computed as alone; what a tokenizer returns, with and without its own padding."""
    model = tiny(family)
    rows = [[5, 6, 7], [8], [9, 10, 11]]
    mask = [[1, 1, 1], [0, 0, 1], [1, 1, 1]]
    encoded = {"input_ids": [[5, 6, 7], [3, 3, 8], [9, 10, 11]], "attention_mask": mask}
    ragged = {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}
    alone = [np.asarray(dj.forward(model, np.asarray([row]))[0]) for row in rows]
    streams = [np.asarray(dj.hidden_states(model, np.asarray([row]))[:, 0]) for row in rows]
    arrays = {name: np.asarray(value) for name, value in encoded.items()}
    for tokens in (rows, tuple(map(np.asarray, rows)), encoded, ragged, arrays):
        logits, stream = dj.forward(model, tokens), dj.hidden_states(model, tokens)
        captured = dj.capture(model, tokens, "residual").residual[0]
        for i, row in enumerate(rows):
            np.testing.assert_allclose(logits[i, -len(row) :], alone[i], atol=2e-5)
            np.testing.assert_allclose(stream[:, i, -len(row) :], streams[i], atol=2e-5)
            np.testing.assert_allclose(captured[:, i, -len(row) :], streams[i], atol=2e-5)
    if family == "sdar":
        assert dj.prefill(model, ragged | {"input_ids": rows[0], "attention_mask": mask[0]}).tokens == (
            5,
            6,
            7,
        )
        refuses("a prefix is one sequence", dj.prefill, model, rows)
    for one in (rows[0], np.asarray(rows[0]), {"input_ids": rows[0]}, [rows[0]]):
        np.testing.assert_allclose(dj.forward(model, one), alone[0][None], atol=2e-5)
    np.testing.assert_allclose(dj.forward(model, [[3, 8]], [[False, True]])[:, 1:], alone[1][None], atol=2e-5)


def test_other_layers_steps_and_positions_compile_nothing():
    model = tiny("llada")
    tokens = random_tokens(model.spec, 5, 1, 6)
    options = dict(what=("attention",), chunk=2)
    dj.capture(model, tokens, layers=0, positions=(1, 2), **options)
    with compilations() as compiled:
        dj.capture(model, tokens, layers=1, steps=(4, 1, 2), positions=(0, 5), **options)
    assert not compiled


@pytest.mark.parametrize(
    ("family", "length", "sampler", "reason"),
    [
        ("nemotron", 4, dj.samplers.Confidence(), "blocks_from='response' is not supported here: nemotron"),
        ("sdar", 8, dj.samplers.Confidence(), "run ends within a block of sdar, block_size=12: its last 11"),
        ("sdar", 9, dj.samplers.Autoregressive(), r"run has causal passes, as of Autoregressive\(\) or S2D2"),
        ("sdar", 9, dj.samplers.S2D2(causal_storage=False), "run has causal passes, as of"),
    ],
)
def test_canvases_that_do_not_show_what_they_attended_to_are_refused(family, length, sampler, reason):
    """The passes of `capture` and `trajectory_log_probs` would be others than those of the run."""
    model = tiny(family)
    out = dj.generate(model, [[5, 6, 7]], length=length, sampler=sampler, trace=True)
    for again in (dj.capture, dj.trajectory_log_probs):
        refuses(reason, again, model, out)
        refuses(reason, again, model, out.trace)


@pytest.mark.usefixtures("unannotated")
def test_bad_input_is_refused():
    model = tiny("llada")
    without = dj.generate(model, np.ones((1, 3), int), length=2)
    for options, message in (
        (dict(layers=2), r"layers=2 is out of range: the model has the layers 0 to 1"),
        (dict(layers=3, what=("residual",)), r"layers=3 is out of range: the model has the layers 0 to 2"),
        (dict(layers=-1), "layers=-1 must be whole numbers of at least 0"),
        (dict(layers=(0, 0)), r"layers=\[0, 0\] hold a number twice"),
        (dict(layers=()), r"layers=\(\) must be whole numbers"),
        (dict(steps=1), r"steps=1 is out of range: the canvases are 0 to 0"),
        (dict(positions=6), r"positions=6 is out of range: the canvas has the positions 0 to 5"),
        (dict(positions=[[1], [2], [3]]), r"positions has shape \(3, 1\); expected \(j,\) or \(2, j\)"),
        (dict(what=("keys",)), r"what=\('keys',\) must be some of residual, attention, "),
        (dict(chunk=0), "chunk=0 must be a whole number of at least 1"),
        (dict(prompt_mask=np.ones((2, 9))), "prompt_mask has 9 positions; the canvas has 6"),
        (dict(source=np.zeros(4, int)), r"source must be an Output .*got shape \(4,\)"),
        (dict(source="text"), "source must be an Output .*got str"),
        (dict(source=np.full((1, 4), 99)), "source holds id 99, outside the vocabulary"),
        (dict(source=without), "the output has no trace"),
    ):
        with pytest.raises(ValueError, match=message):
            dj.capture(model, **{"source": np.ones((2, 6), int)} | options)
    with pytest.raises(ValueError, match="cannot be called inside jit"):
        jax.jit(lambda t: dj.capture(model, t).k)(jnp.ones((1, 4), jnp.int32))


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_lens_of_the_last_layer_is_the_forward_pass(family):
    """And of each layer, final norm and head in float64."""
    model = tiny(family)
    ids = random_tokens(model.spec, 2, 7)
    seen = dj.capture(model, ids, "residual")
    logits = dj.logit_lens(model, seen.residual)
    np.testing.assert_allclose(logits[0, -1], dj.forward(model, ids), rtol=1e-5, atol=1e-5)
    stream = np.asarray(seen.residual, np.float64)
    normed = stream / np.sqrt(np.mean(stream**2, axis=-1, keepdims=True) + model.spec.norm_eps)
    head = model.params["embed" if model.spec.tied else "head"]
    expected = (normed * np.float64(model.params["norm"])) @ np.float64(head).T
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    one = dj.logit_lens(model, seen.residual[0, 1, 0, 2])
    np.testing.assert_allclose(one, logits[0, 1, 0, 2], rtol=1e-4, atol=1e-5)
    refuses(r"residual has shape \(2, 7\)", dj.logit_lens, model, ids)
    refuses("model=3 must be", dj.logit_lens, 3, seen.residual)
