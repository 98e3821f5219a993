"""Whose code the recorded runs are from that tests replay, by policy, sampler and folder of tests/goldens."""

import json
import re
from pathlib import Path

GOLDENS = Path(__file__).parents[2] / "tests" / "goldens"
NONE = "-"
OURS = "our second implementation"  # written from paper or specification, independent of the library
FOLDERS = {  # of each policy and sampler; those without one have no recording
    **{"Policy": "vanilla-llada", "PrefixCache": "fast-dllm-prefix", "DualCache": "fast-dllm-dual"},
    **{name: f"dkv-{name[3:].lower()}" for name in ("DKVDecode", "DKVGreedy", "DKVPrefill", "DKVPD")},
    **{"DLLMCache": "dllm-cache", "DyLLM": "dyllm", "SparseDLLM": "sparse-dllm", "ESDLLM": "es-dllm"},
    **{"MaskKV": "maskkv", "ElasticCache": "elastic", "D2Cache": "d2cache", "SuffixDropout": "dpad"},
    **{"WindowDiffusion": "window-diffusion", "SlidingCache": "dsb-cache", "MAGE": "mage"},
    **{"FOCUS": "focus"},
    **{"Confidence": "vanilla-llada", "RandomOrder": "vanilla-llada", "DreamSchedule": "vanilla-dream"},
    **{"Threshold": "parallel-threshold", "Factor": "dsb", "EBSampler": "sampler-eb-fixed"},
    **{"KLASS": "sampler-klass", "PCSampler": "sampler-pc", "WINO": "sampler-wino-fixed"},
    **{"LocalLeap": "sampler-localleap", "CertaintyPrior": "certainty-prior", "DAEDAL": "daedal"},
    **{"DreamOn": "dreamon", "FreeDave": "freedave-llada", "S2D2": "s2d2-fast-dllm-v2"},
    **{"Dynamic": "sdar-generate", "Edit": "llada2-generate"},
    **{"SelfSpeculation": "nemotron-generate", "Autoregressive": "nemotron-generate"},
    **{"EntropyNoise": "diffusion-gemma-generate"},
}


def origin(folder: str) -> str:
    """The repository whose code made the recordings of a folder, or `OURS`.

    Raises:
      StopIteration: the folder has no recording.
    """
    case = json.loads(next(iter(sorted((GOLDENS / folder).glob("*/case.json")))).read_text())
    text = str(case.get("source_repo") or case.get("source"))
    if re.match(r"own |written from", text) or "independent" in case.get("origin", ""):
        return OURS
    found = re.match(r"(?:github )?([\w.-]+/[\w.-]+|transformers)", text)
    if found is None:
        raise ValueError(f"{folder}: {text!r} must name a repository")
    return found[1] + " over transformers" * ("over transformers" in text)


def of(name: str) -> str:
    """The origin of the recordings of a policy or sampler; `NONE` if it has none."""
    return origin(FOLDERS[name]) if name in FOLDERS else NONE
