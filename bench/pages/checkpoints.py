"""The table of published checkpoints: what `dj.load` does with each."""

import re

from bench.pages.policy import markdown_table
from bench.pages.recorded import origin
from dllm_jax.checkpoint.refused import REFUSED

# "recorded[FOLDER]": a tiny model of the layout agrees with recordings of that folder of tests/goldens.
READ = (
    ("`GSAI-ML/LLaDA-8B-Base`, `-Instruct`", "loads as LLaDA; recorded[vanilla-llada]"),
    ("`GSAI-ML/LLaDA-1.5`, UltraLLaDA", "loads as LLaDA; same architecture"),
    ("LongLLaDA", "a method and no checkpoint: `dj.load(..., rope_factor=4)`"),
    (
        "`Zigeng/dParallel-LLaDA-8B-instruct`, `Zigeng/dParallel_Dream_7B_Instruct`",
        "loads as LLaDA, as Dream; same architecture; "
        '`recipe("dparallel-llada-8b-instruct", ...)`, `"dparallel-dream-7b-instruct"`',
    ),
    (
        "`d3LLM/d3LLM_LLaDA`, `d3LLM/d3LLM_Dream`",
        'loads as LLaDA, as Dream; same architecture; `recipe("d3llm-llada-8b", ...)`',
    ),
    (
        "`GSAI-ML/iLLaDA-8B-Base`, `-Instruct`",
        "loads as iLLaDA; recorded[illada-generate]; a tied head may be stored twice",
    ),
    ("`GSAI-ML/LLaDA-V`", "loads as LLaDA-V, its tower included; recorded[llada-v-generate]"),
    ("`inclusionAI/LLaDA-MoE-7B-A1B-Base`, `-Instruct`", "loads as LLaDA-MoE; recorded[llada-moe-generate]"),
    (
        "`inclusionAI/LLaDA2.0-mini`, `-flash`, `LLaDA2.1-mini`, `-flash`, LLaDA2.0-CAP",
        "loads as LLaDA2; recorded[llada2-generate]",
    ),
    ("`Dream-org/Dream-v0-Base-7B`, `-Instruct-7B`", "loads as Dream; recorded[vanilla-dream]"),
    (
        "`Dream-org/Dream-Coder-v0-Base-7B`, `-Instruct-7B`",
        'loads as Dream; same architecture; `recipe("dream-coder-7b", ...)`',
    ),
    (
        "`apple/DiffuCoder-7B-Base`, `-Instruct`, `-cpGRPO`",
        'loads as Dream; same architecture; `recipe("diffucoder-7b", ...)`',
    ),
    (
        "`Dream-org/DreamOn-v0-7B`",
        "loads as Dream; same architecture; `infill(.., sampler=DreamOn())`; others need `forbid=[151667]`",
    ),
    (
        "`Dream-org/DreamReasoner-8B` and its base",
        "loads as DreamReasoner; recorded[dream-reasoner-generate]; rope in either spelling",
    ),
    (
        "`ByteDance-Seed/Stable-DiffCoder-8B-Base`, `-Instruct`",
        "loads as Stable-DiffCoder, under both of its class names; recorded[stable-diffcoder-generate]",
    ),
    (
        "`JetLM/SDAR-*-Chat`, `-A3B-Chat`, `Gen-Verse/TraDo-*`",
        "loads as SDAR; recorded[sdar-generate]; SDAR-MoE has no recording; "
        '`recipe("trado-8b-instruct", ...)`',
    ),
    ("`Efficient-Large-Model/Fast_dLLM_v2_*`", "loads as Fast-dLLM v2; recorded[fast-dllm-v2-generate]"),
    ("`dllm-hub/*-diffusion-mdlm-*`, `-bd3lm-*`", "loads as A2D; recorded[a2d-mdlm]"),
    ("`radicalnumerics/RND1-Base-0910`", "loads as RND1; recorded[rnd1-generate]"),
    (
        "`nvidia/Nemotron-Labs-Diffusion-3B`, `-8B`, `-14B`",
        "loads as Nemotron-Labs-Diffusion; recorded[nemotron-generate]",
    ),
    (
        "`google/diffusiongemma-26B-A4B-it`",
        "loads as DiffusionGemma; recorded[diffusion-gemma-generate]; the vision tower's tensors are kept, "
        "and images are not read",
    ),
)


def table() -> str:
    """Makes a row for each checkpoint that is read, then for each that `dj.load` refuses in these words."""
    named = lambda what: re.sub(r"recorded\[(\S+)\]", lambda m: f"recorded from {origin(m[1])}", what)
    lines = [f"| {name} | {named(what)} |" for name, what in READ]
    lines += [f"| {model.name} | raises `ValueError`: {model.reason}. {model.instead} |" for model in REFUSED]
    return markdown_table("checkpoint | what happens", lines)
