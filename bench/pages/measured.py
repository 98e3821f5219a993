"""Tables of times, memory and recordings: each has the rows of files of bench/results."""

from typing import Any

import dllm_jax as dj
from bench.pages.sources import RESULTS
from bench.shared import runner
from bench.shared.numbers import rounded
from dllm_jax.eval.run.files import read_json


def _rows(file: str) -> list[dict[str, Any]]:
    return read_json(RESULTS / file)["rows"]


def cpu_speed() -> str:
    """Speed of whole generations on a CPU relative to exact decoding, by policy, fastest first.

    At its defaults a policy of eviction retains the whole prompt here, so those are left out.
    """
    named = ((row["policy"].split("(")[0], row["over_exact"]["median"]) for row in _rows("generate_cpu.json"))
    shown = [found for found in named if found[0] not in ("Policy", "MaskKV", "EvictPrompt")]
    lines = [(f"`{name}`", rounded(ratio, 2)) for name, ratio in sorted(shown, key=lambda pair: -pair[1])]
    return runner.table(("policy", "speed"), "lr", lines)


PEERS = "peer_torch_cpu.json", "peer_torch_xeon_cpu.json", "peer_bonsai_cpu.json"
BLOCK_PEERS = PEERS[:2]
SHAPES = {"sdar-small": "SDAR", "fast-dllm-v2-small": "Fast-dLLM v2", "llada2-small": "LLaDA2"}


def peers() -> str:
    """Time of other implementations of LLaDA relative to ours, where both decode the same tokens, by CPU."""
    lines: dict[tuple[Any, ...], dict[str, str]] = {}
    for document, row in ((run, row) for file in PEERS for run in _runs(file) for row in run["rows"]):
        if row["of"] == "forward" or row["shape"] in SHAPES:
            continue
        same = row["agreeing"] == row["tokens"]
        assert same or row["of"].startswith("bonsai"), "the page says that tokens are the same"
        if same:
            name = "torch" if row["of"] == "generation" else row["of"]
            cells = lines.setdefault((name, _cpu(document), row["shape"], row["prompt"]), {})
            cells[row["policy"].split("(")[0]] = rounded(row["theirs_over_ours"]["median"], 2)
    columns = "exact", "DualCache", "SparseDLLM"
    cells = ([*key, *(found.get(name, "-") for name in columns)] for key, found in lines.items())
    return runner.table(("peer", "CPU", "shape", "prompt", *columns), "lllrrrr", list(cells))


def gemma_peers() -> str:
    """Time of other implementations of DiffusionGemma relative to ours: a canvas, and a denoising step."""
    lines: dict[tuple[str, int], dict[str, str]] = {}
    for row in _rows("peer_gemma_cpu.json"):
        ratio = rounded(row["theirs_over_ours"]["median"], 2)
        lines.setdefault((row["peer"], row["prompt"]), {})[row["of"]] = ratio
    of = "canvas", "denoising step"
    cells = ([*key, *(ratios[name] for name in of)] for key, ratios in lines.items())
    return runner.table(("peer", "prompt", *of), "lrrr", list(cells))


def block_peers() -> str:
    """Time of transformers relative to ours on block-causal models, one token per step, by CPU.

    Several runs of one setting are shown as a range.
    """
    found: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for document, row in ((run, row) for file in BLOCK_PEERS for run in _runs(file) for row in run["rows"]):
        if row["shape"] in SHAPES and row["threshold"] == 1:
            assert row["agreeing"] == row["tokens"], "the page says that tokens are the same"
            name = SHAPES[row["shape"]] + ", peer stores blocks" * document["stores"]
            key = name, row["block"], row["prompt"], document["batch"]
            found.setdefault(key, {}).setdefault(_cpu(document), []).append(row["theirs_over_ours"]["median"])
    cells = ([*key, *(_range(of.get(cpu)) for cpu in ("EPYC", "Xeon"))] for key, of in sorted(found.items()))
    return runner.table(("model", "block", "prompt", "batch", "EPYC", "Xeon"), "lrrrrr", list(cells))


def _cpu(document: dict[str, Any]) -> str:
    return "Xeon" if "Xeon" in document["cpu"] else "EPYC"


def _runs(file: str) -> list[dict[str, Any]]:
    document = read_json(RESULTS / file)
    return document.get("runs", [document])


def _range(values: list[float] | None) -> str:
    shown = [rounded(value, 2) for value in sorted(values or ())]
    return "-" if not shown else shown[0] if len(shown) == 1 else f"{shown[0]} to {shown[-1]}"


FITS = (1024, 1), (1024, 8), (8192, 1), (32768, 1)  # prompt and batch


def fits() -> str:
    """Peak memory per chip of compiled generations of LLaDA-8B under `DualCache`."""
    chips: dict[tuple[str, int], dict[tuple[int, int], str]] = {}
    for row in _rows("compiled_fits.json"):
        if row["policy"] == "DualCache" and row["length"] == 256:
            peak = rounded(row["peak"] / 1e9, 1) if row.get("fits") else "no"
            chips.setdefault((row["target"], row["tp"]), {})[row["prompt"], row["batch"]] = peak
    capacity = lambda target: f"{dj.roofline.HARDWARE[target].capacity / 1e9:.0f}"
    lines = [
        (f"{tp} x {target}", capacity(target), *(of.get(shape, "-") for shape in FITS))
        for (target, tp), of in chips.items()
    ]
    heads = ("chips", "capacity, GB", "prompt 1024", "prompt 1024, batch 8", "prompt 8192", "prompt 32768")
    return runner.table(heads, "lrrrrr", lines)


def free_dave() -> str:
    """Forward passes of a sampler alone and with drafts, and the branches of a pass."""
    lines = []
    for row in _rows("free_dave_cpu.json"):
        eager = ", `eager=True`" if "eager=True" in row["sampler"] else ""
        drafts = row["sampler"].split("branches=")[1].split(",")[0]
        eager += ", `Threshold`" * ("sampler=Threshold" in row["sampler"])
        name = f"`{row['model']}`, `{row['policy'].split('(')[0]}`, {row['block']}{eager}"
        counts = (rounded(row[key], 1) for key in ("forwards_alone", "forwards"))
        lines.append((name, drafts, *counts, rounded(row["branches"] / row["forwards"], 1)))
    heads = "model, policy, block", "branches", "passes without drafts", "with drafts", "branches per pass"
    return runner.table(heads, "lrrrr", lines)


LEARNT = {"sft_lora": "sft", "dpo": "dpo", "dpo --supervised 0": "dpo_alone", "grpo": "grpo"}


def learning() -> str:
    """Accuracy of the examples that fine-tune, by step."""
    lines = []
    for name, file in LEARNT.items():
        curve = read_json(RESULTS / f"learning_{file}_cpu.json")["curve"]
        shown = "; ".join(f"{row['step']}: {rounded(100 * row['accuracy'])}%" for row in curve)
        lines.append((f"`{name}`", shown))
    return runner.table(("example", "step: accuracy on 128 held-out questions"), "ll", lines)


def recordings() -> str:
    """Recorded runs that were replayed, by what they hold; each row with those that agree."""
    found: dict[str, list[bool]] = {}
    for case in (
        case for case in read_json(RESULTS / "replay_cpu.json")["cases"] if case["status"] == "conform"
    ):
        found.setdefault(kind(case["case"]), []).append(case["outcome"] == "ok")
    lines = [(name, len(ok), sum(ok)) for name, ok in sorted(found.items(), key=lambda pair: -len(pair[1]))]
    return runner.table(("recording of", "cases", "agree"), "lrr", lines)


def kind(case: str) -> str:
    """Says what a recording holds, by the folder that it is in."""
    method = case.split("/")[0]
    if method in ("longbench-metrics", "maskkv-scores", "loglik-llada"):
        return "scores and likelihoods, without decoding"
    if method.endswith(("-forward", "-preprocess", "-prompt", "-vision")) or method == "forward":
        return "forward passes and images, to 1e-4 or the recorded dtype"
    return "whole generations, token for token"
