"""The table of published checkpoints: what `dj.load` does with each."""

from bench.pages.policy import markdown_table
from dllm_jax.checkpoint.refused import REFUSED

# "recorded": a tiny model of the layout agrees with traces of the authors' code.
READ = (
    ("`GSAI-ML/LLaDA-8B-Base`, `-Instruct`", "loads as LLaDA; recorded"),
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
        "loads as iLLaDA; recorded; the head may be stored next to the embedding if both are equal",
    ),
    ("`GSAI-ML/LLaDA-V`", "loads as LLaDA-V, its tower included; recorded"),
    ("`inclusionAI/LLaDA-MoE-7B-A1B-Base`, `-Instruct`", "loads as LLaDA-MoE; recorded"),
    (
        "`inclusionAI/LLaDA2.0-mini`, `-flash`, `LLaDA2.1-mini`, `-flash`, LLaDA2.0-CAP",
        "loads as LLaDA2; recorded",
    ),
    ("`Dream-org/Dream-v0-Base-7B`, `-Instruct-7B`", "loads as Dream; recorded"),
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
        "loads as Dream; same architecture; `infill` keeps its length: pass `forbid=[151667]`",
    ),
    (
        "`Dream-org/DreamReasoner-8B` and its base",
        "loads as DreamReasoner; recorded over Qwen3's network; rope in either spelling",
    ),
    (
        "`ByteDance-Seed/Stable-DiffCoder-8B-Base`, `-Instruct`",
        "loads as Stable-DiffCoder, under both of its class names; recorded",
    ),
    (
        "`JetLM/SDAR-*-Chat`, `-A3B-Chat`, `Gen-Verse/TraDo-*`",
        'loads as SDAR, SDAR-MoE; recorded; `recipe("trado-8b-instruct", ...)`',
    ),
    ("`Efficient-Large-Model/Fast_dLLM_v2_*`", "loads as Fast-dLLM v2; recorded"),
    ("`dllm-hub/*-diffusion-mdlm-*`, `-bd3lm-*`", "loads as A2D; recorded"),
    ("`radicalnumerics/RND1-Base-0910`", "loads as RND1; recorded"),
    ("`nvidia/Nemotron-Labs-Diffusion-3B`, `-8B`, `-14B`", "loads as Nemotron-Labs-Diffusion; recorded"),
    (
        "`google/diffusiongemma-26B-A4B-it`",
        "loads as DiffusionGemma; recorded; the vision tower's tensors are kept, and images are not read",
    ),
)


def table() -> str:
    """Makes a row for each checkpoint that is read, then for each that `dj.load` refuses in these words."""
    lines = [f"| {name} | {what} |" for name, what in READ]
    lines += [f"| {model.name} | raises `ValueError`: {model.reason}. {model.instead} |" for model in REFUSED]
    return markdown_table("checkpoint | what happens", lines)
