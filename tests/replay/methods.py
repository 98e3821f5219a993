"""How each method's settings read in this library, and what of its recording is compared."""

import json
import warnings
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np

import dllm_jax as dj
from dllm_jax import policies, samplers
from dllm_jax.checkpoint.config import MaskTokenWarning
from dllm_jax.decoding.report import LengthWarning
from dllm_jax.eval.benchmarks.longbench import TASKS, metrics
from dllm_jax.samplers.transfer import dream_times
from dllm_jax.state.inputs import IdleStepsWarning
from tests.replay import (
    a2d,
    block,
    block_policies,
    d2cache,
    diffusion_gemma,
    dkv,
    dllm_cache,
    dyllm,
    elastic,
    es_dllm,
    lengths,
    llada_v,
    maskkv,
    nemotron,
    of_2026,
    sparse_dllm,
    verified,
)
from tests.replay.case import Case
from tests.replay.compare import Skipped, bf16_closely, closely, compare_logits, compare_steps, exactly
from tests.replay.research import only_its_settings, research_sampler
from tests.replay.stepping import states, trace_of


def forward(case: Case):
    """Logits and residual stream of one pass."""
    arrays, model = case.arrays, case.model()
    case.settings.describes("pad_id")
    found = arrays.get("attention_mask_2d", arrays.get("attention_mask"))
    valid = None if found is None else jnp.asarray(found, bool)
    tokens, where = jnp.asarray(arrays["input_ids"]), None if found is None else found.astype(bool)[..., None]
    compare = bf16_closely if case.settings["dtype"] == "bfloat16" else closely
    compare("logits", dj.forward(model, tokens, valid).astype(jnp.float32), arrays["logits"], where)
    hidden = dj.hidden_states(model, tokens, valid).astype(jnp.float32)
    if case.settings["dtype"] == "float32":
        closely("hidden", hidden, arrays["hidden"], None if where is None else where[None])


def vanilla_llada(case: Case):
    """LLaDA's generate.py."""
    s = case.settings
    model = case.model(eos_id=s["eos_token_id_used"], eot_id=s["eot_token_id_used"])
    edits = {name: s[name] for name in ("cfg_scale", "logits_eos_inf")}
    edits["confidence_eos_eot_inf"] = s["confidence_eos_eot_inf"]
    kind = {"low_confidence": samplers.Confidence, "random": samplers.RandomOrder}[s["remasking"]]
    sampler = kind(temperature=s["temperature"], allow_mask_token=case.restores_oddities, **edits)
    shape = dict(length=s["gen_length"], block=s["block_length"], steps=s["steps"])
    out = case.generate(model, sampler=sampler, noise=case.noise(), **shape)
    compare_steps(case, out.trace, predicted="x0")
    if not any(edits.values()):
        compare_logits(case, model)


def vanilla_dream(case: Case):
    """Dream's diffusion_generate; prompts that hold masks are templates to fill."""
    s, arrays, model = case.settings, case.arrays, case.model()
    s.describes("block_length", "gen_length")  # Dream has one block; templates have their own length
    closely("timesteps", dream_times(s["steps"], s["eps"]), arrays["timesteps"], tolerance=0)
    sampler = samplers.DreamSchedule(
        alg=s["alg"], eps=s["eps"], alg_temp=s["alg_temp"] or 0.0, temperature=s["temperature"],
        top_p=s["top_p"], top_k=s["top_k"], allow_mask_token=case.restores_oddities,
    )  # fmt: skip
    settings = dict(steps=s["steps"], sampler=sampler, noise=case.noise())
    if (arrays["prompt"] == case.mask_id).any():
        out = dj.infill(model, arrays["tokens"][0], trace=True, **settings)
    else:
        out = case.generate(model, length=s["gen_length"], **settings)
    if s["alg"] == "origin":
        exactly("tokens", out.trace.tokens, arrays["tokens"])
    else:
        compare_steps(case, out.trace, predicted="x0")
    compare_logits(case, model, shifted=True)


def loglik_llada(case: Case):
    """LLaDA's get_log_likelihood.py with its drawn masks."""
    s, arrays = case.settings, case.arrays
    s.describes("mc_num")  # as many as there are masks
    prompt, answer = arrays["prompt"], arrays["answer"]
    masks = jnp.asarray(arrays["mask"][..., prompt.shape[1] :].reshape(-1, 1, answer.shape[1]))
    ours = dj.log_likelihood(case.model(), prompt, answer, masks=masks, cfg_scale=s["cfg_scale"])
    # A sum of a hundred weighted terms: the reference's own float32 and float64 results differ by 2e-5.
    closely("loglik", ours[0], arrays["loglik"], tolerance=1e-3)


def fast_dllm(case: Case):
    """Fast-dLLM's LLaDA generators: no cache, prefix cache, dual cache."""
    s, tokens = case.settings, case.arrays["tokens"]
    if s["status"] == "optional":
        raise Skipped(s["status_reason"])
    s.only("temperature", 0.0)
    s.describes("algorithm", "eps", "threshold", "factor")
    policy = {"none": policies.Policy, "prefix": policies.PrefixCache, "dual": policies.DualCache}[s["cache"]]
    sampler = {
        "fixed": lambda: samplers.Confidence(),
        "threshold": lambda: samplers.Threshold(s["threshold"]),
        "factor": lambda: samplers.Factor(s["factor"]),
    }[s["decoding"]]()
    shape = dict(length=s["gen_length"], block=s["block_length"], steps=s["steps"])
    out = case.generate(case.model(), policy=policy(), sampler=sampler, **shape)
    useful = np.ones(len(tokens) - 1, bool)
    if s["decoding"] == "threshold":  # forwards that find their block already done write nothing
        useful = np.any(np.diff(tokens, axis=0) != 0, axis=(1, 2))
    compare_steps(case, out.trace, predicted="predicted", computed="computed", useful=useful)
    if s["cache"] == "none":
        compare_logits(case, case.model())


def research_dllm(case: Case):
    """d2Cache's repository: its vanilla strategy, certainty prior and prefix cache."""
    s, arrays, d, model = case.settings, case.arrays, case.settings["decoding"], case.model()
    sampler, policy = research_sampler(d, arrays.get("token_freq")), policies.Policy()
    s.describes("steps", "pad_id")
    if s["cache"]:
        s["cache"].only("type", "prefix")
        policy = policies.DualCache() if s["cache"]["args"]["use_dual"] else policies.PrefixCache()
    shape = dict(length=d["gen_length"], block=d["block_length"])
    steps = d["gen_length"] // d["num_transfer_tokens"]
    out = case.generate(model, policy=policy, sampler=sampler, steps=steps, **shape)
    compare_steps(case, out.trace, predicted="predicted", computed="recomputed")
    if not s["cache"]:
        compare_logits(case, model)


def klass(case: Case):
    """Every step, with the divergences and which positions are stable."""
    s, arrays, d, model = case.settings, case.arrays, case.settings["decoding"], case.model()
    if d["threshold"] is None:
        raise Skipped(s["status_reason"])
    only_its_settings(case, "klass")
    rule = dict(confidence_threshold=d["threshold"], divergence=d["kl_threshold"])
    sampler = samplers.KLASS(history=d["kl_history_length"], **rule)
    options = dict(length=d["gen_length"], block=d["block_length"], sampler=sampler)
    options |= dict(prompt_mask=case.prompt_mask, trace=True)
    ran = list(states(model, arrays["prompt"], **options))
    compare_steps(case, trace_of(ran), predicted="predicted", computed="recomputed")
    compare_logits(case, model)

    # What is remembered after each step, where it predicted: the first prediction has nothing to differ from.
    masked = arrays["tokens"][:-1, :, arrays["prompt"].shape[1] :] == case.mask_id
    divergences = np.stack([state.memory.divergences for state in ran[1:]])
    later = masked & (np.arange(len(masked)) > 0)[:, None, None]
    closely("divergences", divergences[..., 0], arrays["kl"], where=later)
    stable = (divergences < d["kl_threshold"]).all(axis=-1)
    exactly("stable", stable, arrays["stable"] > 0, where=masked)


def wino(case: Case):
    """Every step, with what is decoded and taken back; the range is always the whole block."""
    s, arrays, d = case.settings, case.arrays, case.settings["decoding"]
    if s["status"] == "optional":
        raise Skipped(s["status_reason"])
    d.only("threshold")
    d.describes("pad_token_id")
    only_its_settings(case, "wino")
    sampler = samplers.WINO(wide_in=d["wide_in_thres"], narrow_out=d["narrow_out_thres"])
    shape = dict(length=d["gen_length"], block=d["block_length"])
    trace, response = case.generate(case.model(), sampler=sampler, **shape).trace, arrays["prompt"].shape[1]
    exactly("tokens", trace.tokens, arrays["tokens"])
    masked = np.asarray(trace.tokens)[..., response:] == case.mask_id
    exactly("decoded", masked[:-1] & ~masked[1:], arrays["unmasked"])
    exactly("taken back", ~masked[:-1] & masked[1:], arrays["remasked"])
    score = np.asarray(trace.score)[..., response:]
    closely("confidence", score, arrays["verify_confidence"], where=np.isfinite(score))


def longbench(case: Case):
    """LongBench's metrics, without decoding: pairs' scores per reference and in all, and the data set's."""
    s = case.settings
    s.describes("metric", "first_line_only")  # what `TASKS` has under the name of the data set
    task, classes, scores = TASKS[s["dataset"]], s.get("all_classes") or (), []
    for pair in s["pairs"]:
        name, prediction = json.dumps(pair["prediction"]), pair["prediction"]
        for reference, recorded in zip(pair["references"], pair["per_reference"], strict=True):
            closely(name, task.score(prediction, [reference], classes), recorded, tolerance=1e-12)
        scores.append(task.score(prediction, pair["references"], classes))
        closely(name, scores[-1], pair["score"], tolerance=1e-12)
        if "score_levenshtein" in pair:
            similarity = metrics.edit_similarity(prediction, pair["references"][0], alignment="indel")
            closely(f"{name} (Levenshtein)", similarity, pair["score_levenshtein"], tolerance=1e-12)
    closely("data set", round(100 * sum(scores) / len(scores), 2), s["dataset_score"], tolerance=1e-9)


METHODS: dict[str, Callable[[Case], None]] = {
    "forward": forward, "vanilla-llada": vanilla_llada, "vanilla-dream": vanilla_dream,
    "loglik-llada": loglik_llada, "longbench-metrics": longbench, "sampler-klass": klass,
    "sampler-wino-fixed": wino, "sparse-dllm": sparse_dllm.sparse_dllm, "dllm-cache": dllm_cache.dllm_cache,
    "elastic": elastic.elastic, "d2cache": d2cache.d2cache, "maskkv": maskkv.maskkv,
    "maskkv-scores": maskkv.scores, "evict-baselines": maskkv.baselines,
    "window-diffusion": of_2026.window_diffusion, "dpad": of_2026.dpad,
    "sampler-prophet": of_2026.prophet, "dsb": of_2026.dsb, "dsb-cache": of_2026.dsb,
    "llada-v-preprocess": llada_v.preprocess, "llada-v-vision": llada_v.vision,
    "llada-v-prompt": llada_v.prompt, "llada-v-generate": llada_v.generate,
    **dict.fromkeys(("llada-moe-generate", "illada-generate"), block.llada_moe),
    "illada-var-generate": block.illada_var, **dict.fromkeys(block.FORWARD, block.forward),
    **dict.fromkeys(block.GENERATE, block.generate), **a2d.METHODS, **nemotron.METHODS,
    **diffusion_gemma.METHODS,
    **block_policies.METHODS, **verified.METHODS, **lengths.METHODS, **es_dllm.METHODS,
    "dyllm": dyllm.dyllm,
    **dict.fromkeys(dkv.POLICIES, dkv.dkv),
    **dict.fromkeys(("parallel-threshold", "fast-dllm-prefix", "fast-dllm-dual"), fast_dllm),
    **dict.fromkeys(("prefix-cache", "certainty-prior"), research_dllm),
    **dict.fromkeys(("sampler-confidence", "sampler-eb-fixed", "sampler-entropy"), research_dllm),
    **dict.fromkeys(("sampler-factor", "sampler-margin", "sampler-pc", "sampler-threshold"), research_dllm),
}  # fmt: skip


def replay(case: Case):
    """Replays a case.

    Raises:
      Differs: something came out otherwise than recorded.
      Skipped: the case is not for this library, for the reason given.
      UnknownSetting: it was made with a setting that its replay does not read.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", IdleStepsWarning)  # some recorded schedules have such steps
        warnings.simplefilter("ignore", LengthWarning)  # answers that reach the largest length
        warnings.simplefilter("ignore", MaskTokenWarning)  # a single pass needs no mask
        METHODS[case.method](case)
    case.check_everything_was_read()
