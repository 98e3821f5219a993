"""DiffusionGemma as transformers computes it: single passes, and every step of generations."""

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.nn import gemma
from dllm_jax.samplers import EntropyNoise, RecordedNoise
from dllm_jax.samplers.noise import within_bound
from tests.replay.block import relatively
from tests.replay.case import Case
from tests.replay.compare import closely, exactly
from tests.replay.stepping import states


def forward(case: Case):
    """Three denoising passes, two of them with the logits of the one before, and encoding passes."""
    arrays, model = case.arrays, case.model()
    prompt, canvas, logits = arrays["prompt"], arrays["canvas"], arrays["logits"]
    case.settings.describes("seed")
    behind = np.concatenate([prompt, canvas[1:2]], axis=1)
    for step, context in enumerate((prompt, prompt, behind)):
        found = _denoised(model, context, canvas[step], logits[step - 1] if step else None)
        relatively(f"logits {step}", found, logits[step])
    last = dj.hidden_states(model, behind)[-1, 0]
    hidden = gemma.norm(last, model.params["norm"], model.spec.norm_eps)
    recorded = np.concatenate([arrays["encoder_hidden"], arrays["encoder_hidden_2"]])
    relatively("hidden", hidden, recorded)


def _denoised(model: dj.Model, context: np.ndarray, canvas: np.ndarray, before: np.ndarray | None):
    """Logits of a denoising pass behind a context, with those of the pass before."""
    begins = context.shape[1]
    soft = None
    if before is not None:
        expected = gemma.expected(model.params, jnp.asarray(before)[None])
        soft = jnp.pad(expected, ((0, 0), (begins, 0), (0, 0)))
    ids = np.concatenate([context, canvas[None]], axis=1)
    return dj.forward(model, ids, response=begins, soft=soft)[0, begins:]


def generate(case: Case):
    """What every denoising pass reads, draws and accepts; where canvases end; the answer."""
    settings, arrays, model = case.settings, case.arrays, case.model()
    case.settings.describes("seed", "canvases", "forwards", "tokens_per_forward")
    s, size, prompt = settings["settings"], model.spec.block_size, arrays["prompt"].shape[1]
    sampler = EntropyNoise(
        s["steps"], s["bound"], s["t_max"], s["t_min"], stability=s["stability"], certainty=s["confidence"]
    )
    begins = np.diff(arrays["steps_left"], prepend=0) > 0
    canvas = np.cumsum(begins) - 1
    length = size * (-(-s["new"] // size))
    noise = _recorded(case, sampler, length, begins, prompt + canvas * size)
    options = dict(length=length, sampler=sampler, noise=noise, stop_at_eos=True, trace=True)
    ran = list(states(model, arrays["prompt"], **options))
    denoised = [i for i, state in enumerate(ran[:-1]) if not bool(state.canvas.causal[0, 0])]
    exactly("passes", len(denoised), len(begins))
    read, found = ([ran[i + after].memory for i in denoised] for after in (0, 1))
    exactly("canvas", np.stack([memory.tokens[0] for memory in read]), arrays["canvas"])
    exactly("drawn", np.stack([memory.drawn[0] for memory in found]), arrays["drawn"])
    exactly("argmax", np.stack([memory.best[0, 0] for memory in found]), arrays["argmax"])
    entropy = np.stack([memory.entropy[0] for memory in found])
    closely("entropy", entropy, arrays["entropy"], tolerance=5e-4)
    exactly("accepted", within_bound(jnp.asarray(entropy), s["bound"]), arrays["accepted"])
    ended = np.stack([ran[i + 1].canvas.decoded_at[0].max() == ran[i].canvas.step[0] for i in denoised])
    exactly("stop", ended, (arrays["stop"] == 1) | (arrays["steps_left"] == 1))

    last, first = ran[denoised[-1]], int(ran[denoised[-1]].canvas.block_start[0])
    ids = sampler.read_as(last.canvas, last.memory).tokens[:, : first + size]
    soft = jnp.pad(last.memory.soft, ((0, 0), (first, 0), (0, 0)))
    logits = dj.forward(model, ids, response=first, soft=soft)[0, first:]
    cold = s["t_min"] + (s["t_max"] - s["t_min"]) * arrays["steps_left"][-1] / s["steps"]
    relatively("last logits", logits / cold, arrays["last_logits"])

    # The reference returns whole canvases, and pads what follows an end by an id of its own.
    answer = arrays["answer"]
    ends = np.flatnonzero(np.isin(answer, model.spec.ends))
    shown = ends[0] + 1 if len(ends) else len(answer)
    tokens = np.asarray(dj.generate(model, arrays["prompt"], **options | {"length": s["new"]}).tokens)
    exactly("answer", tokens[0, prompt:][:shown], answer[: min(shown, s["new"])])


def _recorded(case: Case, sampler: EntropyNoise, length: int, begins: np.ndarray, start: np.ndarray):
    """The recorded draws by step of ours, which has a causal pass in front of each canvas."""
    arrays, vocab, size = case.arrays, case.arrays["uniform"].shape[2], case.arrays["canvas"].shape[1]
    steps = np.arange(len(begins)) + np.cumsum(begins)
    most, end = (length // size) * (sampler.steps + 1), case.arrays["prompt"].shape[1] + length
    token, order = np.zeros((most, 1, end, vocab), np.float32), np.zeros((most, 1, end), np.float32)
    ids = iter((arrays["noise"] + 0.5) / vocab)
    for step, first, starts, uniform in zip(steps, start, begins, arrays["uniform"], strict=True):
        here = slice(first, first + size)
        if starts:
            order[step - 1, 0, here] = next(ids)
        token[step, 0, here] = -np.log(-np.log(uniform.astype(np.float64)))
        order[step, 0, here] = next(ids)
    return RecordedNoise(jnp.asarray(token), jnp.asarray(order))


METHODS = {"diffusion-gemma-forward": forward, "diffusion-gemma-generate": generate}
