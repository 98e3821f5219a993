"""How each method's settings read in this library, and what of its recording is compared."""

import warnings
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax.samplers.transfer import dream_times
from dllm_jax.state.inputs import IdleStepsWarning
from tests.replay import d2cache, dkv, dllm_cache, elastic, llada_v, longbench, maskkv, samplers, sparse_dllm
from tests.replay.case import Case
from tests.replay.compare import Skipped, bf16_closely, closely, exactly
from tests.replay.noise import recorded
from tests.replay.research import research_sampler
from tests.replay.steps import compare_logits, compare_steps, left_pads


def forward(case: Case):
    """Logits and residual stream of one pass."""
    arrays, model = case.arrays, case.model()
    case.settings.describes("pad_id")
    key = "attention_mask_2d" if "attention_mask_2d" in arrays else "attention_mask"
    valid = arrays[key].astype(bool) if key in arrays else None
    tokens = jnp.asarray(arrays["input_ids"])
    where = None if valid is None else valid[..., None]
    compare = bf16_closely if case.settings["dtype"] == "bfloat16" else closely
    valid = None if valid is None else jnp.asarray(valid)
    compare("logits", dj.forward(model, tokens, valid).astype(jnp.float32), arrays["logits"], where)
    hidden = dj.hidden_states(model, tokens, valid).astype(jnp.float32)
    if case.settings["dtype"] == "float32":
        closely("hidden", hidden, arrays["hidden"], None if where is None else where[None])


def vanilla_llada(case: Case):
    """LLaDA's generate.py."""
    s = case.settings
    model = case.model(
        mask_id=s["mask_token_id"], eos_id=s["eos_token_id_used"], eot_id=s["eot_token_id_used"]
    )
    kind = {"low_confidence": dj.samplers.Confidence, "random": dj.samplers.RandomOrder}[s["remasking"]]
    sampler = kind(
        temperature=s["temperature"],
        cfg_scale=s["cfg_scale"],
        logits_eos_inf=s["logits_eos_inf"],
        confidence_eos_eot_inf=s["confidence_eos_eot_inf"],
        allow_mask_token=case.restores_oddities,
    )
    out = dj.generate(
        model,
        case.arrays["prompt"],
        prompt_mask=left_pads(case),
        length=s["gen_length"],
        block=s["block_length"],
        steps=s["steps"],
        sampler=sampler,
        noise=recorded(case),
        trace=True,
    )
    compare_steps(case, out.trace, predicted="x0")
    edited = s["cfg_scale"] or s["logits_eos_inf"] or s["confidence_eos_eot_inf"]
    if not edited:
        compare_logits(case, model, shifted=False)


def vanilla_dream(case: Case):
    """Dream's diffusion_generate; prompts that hold masks are templates to fill."""
    s, arrays = case.settings, case.arrays
    s.describes("block_length", "gen_length")  # Dream has one block; templates have their own length
    model = case.model(mask_id=s["mask_token_id"])
    closely("timesteps", dream_times(s["steps"], s["eps"]), arrays["timesteps"], tolerance=0)
    sampler = dj.samplers.DreamSchedule(
        alg=s["alg"],
        eps=s["eps"],
        alg_temp=s["alg_temp"] or 0.0,
        temperature=s["temperature"],
        top_p=s["top_p"],
        top_k=s["top_k"],
        allow_mask_token=case.restores_oddities,
    )
    settings = dict(steps=s["steps"], sampler=sampler, noise=recorded(case), trace=True)
    if (arrays["prompt"] == s["mask_token_id"]).any():
        out = dj.infill(model, arrays["tokens"][0], **settings)
    else:
        mask = left_pads(case)
        out = dj.generate(model, arrays["prompt"], prompt_mask=mask, length=s["gen_length"], **settings)
    if s["alg"] == "origin":
        exactly("tokens", out.trace.tokens, arrays["tokens"])
    else:
        compare_steps(case, out.trace, predicted="x0")
    compare_logits(case, model, shifted=True)


def loglik_llada(case: Case):
    """LLaDA's get_log_likelihood.py with its drawn masks."""
    s, arrays = case.settings, case.arrays
    s.describes("mc_num")  # as many as there are masks
    prompt_length = arrays["prompt"].shape[1]
    masks = arrays["mask"][..., prompt_length:].reshape(-1, 1, arrays["answer"].shape[1])
    ours = dj.log_likelihood(
        case.model(mask_id=s["mask_token_id"]),
        arrays["prompt"],
        arrays["answer"],
        masks=jnp.asarray(masks),
        cfg_scale=s["cfg_scale"],
    )
    # A sum of a hundred weighted terms: the reference's own float32 and float64 results differ by 2e-5.
    closely("loglik", ours[0], arrays["loglik"], tolerance=1e-3)


def fast_dllm(case: Case):
    """Fast-dLLM's LLaDA generators: no cache, prefix cache, dual cache."""
    s = case.settings
    if s["status"] == "optional":
        raise Skipped(s["status_reason"])
    s.only("temperature", 0.0)
    s.describes("algorithm", "eps", "threshold", "factor")
    policy = {
        "none": dj.policies.Policy(),
        "prefix": dj.policies.PrefixCache(),
        "dual": dj.policies.DualCache(),
    }
    sampler = {
        "fixed": lambda: dj.samplers.Confidence(),
        "threshold": lambda: dj.samplers.Threshold(s["threshold"]),
        "factor": lambda: dj.samplers.Factor(s["factor"]),
    }[s["decoding"]]()
    out = dj.generate(
        case.model(mask_id=s["mask_token_id"]),
        case.arrays["prompt"],
        length=s["gen_length"],
        block=s["block_length"],
        steps=s["steps"],
        policy=policy[s["cache"]],
        sampler=sampler,
        trace=True,
    )
    useful = np.ones(case.arrays["tokens"].shape[0] - 1, bool)
    if s["decoding"] == "threshold":  # forwards that find their block already done write nothing
        useful = np.any(np.diff(case.arrays["tokens"], axis=0) != 0, axis=(1, 2))
    compare_steps(case, out.trace, predicted="predicted", computed="computed", useful=useful)
    if s["cache"] == "none":
        compare_logits(case, case.model(), shifted=False)


def research_dllm(case: Case):
    """d2Cache's repository: its vanilla strategy, certainty prior and prefix cache."""
    s, arrays, d = case.settings, case.arrays, case.settings["decoding"]
    sampler = research_sampler(d, arrays.get("token_freq"))
    s.describes("steps")
    policy = dj.policies.Policy()
    if s["cache"]:
        s["cache"].only("type", "prefix")
        policy = dj.policies.DualCache() if s["cache"]["args"]["use_dual"] else dj.policies.PrefixCache()
    model, pad = case.model(mask_id=s["mask_id"]), s["pad_id"]
    padding = arrays["prompt"] != pad if s["left_pad"] else None
    out = dj.generate(
        model,
        arrays["prompt"],
        prompt_mask=padding,
        length=d["gen_length"],
        block=d["block_length"],
        steps=d["gen_length"] // d["num_transfer_tokens"],
        policy=policy,
        sampler=sampler,
        trace=True,
    )
    compare_steps(case, out.trace, predicted="predicted", computed="recomputed")
    exactly("active sequences", out.trace.active, arrays["active_rows"])
    if not s["cache"]:
        compare_logits(case, model, shifted=False)


METHODS: dict[str, Callable[[Case], None]] = {
    "forward": forward,
    "vanilla-llada": vanilla_llada,
    "vanilla-dream": vanilla_dream,
    "loglik-llada": loglik_llada,
    "parallel-threshold": fast_dllm,
    "fast-dllm-prefix": fast_dllm,
    "fast-dllm-dual": fast_dllm,
    "prefix-cache": research_dllm,
    "certainty-prior": research_dllm,
    "sampler-confidence": research_dllm,
    "sampler-eb-fixed": research_dllm,
    "sampler-entropy": research_dllm,
    "sampler-factor": research_dllm,
    "sampler-margin": research_dllm,
    "sampler-pc": research_dllm,
    "sampler-threshold": research_dllm,
    **samplers.METHODS,
    **sparse_dllm.METHODS,
    **dllm_cache.METHODS,
    **maskkv.METHODS,
    **elastic.METHODS,
    **d2cache.METHODS,
    **dkv.METHODS,
    **longbench.METHODS,
    **llada_v.METHODS,
}


def replay(case: Case):
    """Replays a case.

    Raises:
      Differs: something came out otherwise than recorded.
      Skipped: the case is not for this library, for the reason given.
      UnknownSetting: it was made with a setting that its replay does not read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IdleStepsWarning)  # some recorded schedules have such steps
        METHODS[case.method](case)
    case.check_everything_was_read()
