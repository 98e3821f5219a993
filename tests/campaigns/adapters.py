"""Adapters of PEFT: adapter_config.json with keys, values and names of tensors drawn at random.

An adapter is read as W + s B A, or refused with an error that names the key or the directory. The numbers are
computed here from the files, and by PEFT where it is installed.
"""

import functools
import importlib.util
import itertools
import json
import random
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

import dllm_jax as dj
from dllm_jax import lora
from tests.campaigns.verdicts import Case, Verdict, judge
from tests.checkpoints import tensors, tiny, write_hf

NAME = "adapter configs"
SAMPLE = 60

LAST = {"q": "q_proj", "k": "k_proj", "o": "attn_out", "gate": "ff_proj", "up": "up_proj"}
FINE: dict[str, tuple[Any, ...]] = {  # keys and values that change nothing
    "init_lora_weights": (True, False, None, "gaussian", "Gaussian", "eva", "mica", "orthogonal"),
    "lora_dropout": (0.0, 0.1), "inference_mode": (True, False), "task_type": (None, "CAUSAL_LM"),
    "peft_version": ("0.21.2",), "revision": (None, "main"), "bias": ("none",), "use_dora": (False,),
    "base_model_name_or_path": (None, "some/model"), "auto_mapping": (None,), "megatron_core": ("x",),
    "rank_pattern": ({},), "alpha_pattern": ({},), "modules_to_save": (None, []), "use_qalora": (False,),
    "layers_to_transform": (None, []), "layers_pattern": (None,), "alora_invocation_tokens": (None,),
    "qalora_group_size": (16, 8), "loftq_config": ({}, None), "exclude_modules": (None, ["lm_head"]),
    "a_key_of_tomorrow": (None, False, {}, [], ""), "use_rslora": (False, True, None),
}  # fmt: skip
CHANGING: dict[str, tuple[Any, ...]] = {
    "init_lora_weights": (
        *("pissa", "pissa_niter_4", "olora", "OLoRA", "corda", "loftq", "lora_ga", "lora_ga_x"),
        *("of_tomorrow", 1, 0, [], {}, "PiSSA", ""),
    ),
    "use_dora": (True, 1), "bias": ("all", "lora_only", None, True), "peft_type": ("IA3", "ADALORA", None),
    "use_rslora": (1, "true"), "fan_in_fan_out": (True,), "lora_bias": (True,), "use_qalora": (True,),
    "modules_to_save": (["lm_head"],), "rank_pattern": ({"q_proj": 4},), "alpha_pattern": ({"q_proj": 4},),
    "layers_to_transform": ([0], 0, 1), "layer_replication": ([[0, 2]],), "r": (5, 0, -1, None, "3", 2.5),
    "trainable_token_indices": ([1], {"wte": [1]}), "target_parameters": (["experts.gate_up_proj"],),
    "alora_invocation_tokens": ([1, 2],), "arrow_config": ({"top_k": 3},), "kasa_config": ({"beta": 1e-4},),
    "velora_config": ({"scale": 1.0},), "monteclora_config": ({"num_samples": 8},),
    "use_bdlora": ({"nblocks": 2},), "megatron_config": ({"x": 1},),
    "lora_alpha": (0, -1, None, "8", float("nan")),
    "target_modules": (["other_proj"], "other.*", "("), "exclude_modules": (list(LAST.values()), ".*"),
    "a_key_of_tomorrow": (True, 1, 0, "x", [0], {"a": 1}, 0.5),
}  # fmt: skip
PREFIXES = ("", "_orig_mod.", "module.", "module._orig_mod.", "_fsdp_wrapped_module.")


def cases(seed: int) -> Iterator[Case]:
    """Endless; case n of a seed is the same in every run."""
    for number in itertools.count():
        drawn = random.Random(f"{seed}.{number}")
        changes = {key: drawn.choice(FINE[key]) for key in drawn.sample(sorted(FINE), drawn.randrange(6))}
        bad = drawn.sample(sorted(CHANGING), drawn.choice((0, 0, 1, 1, 2)))
        bad = ["init_lora_weights"] if drawn.random() < 0.2 else bad
        changes |= {key: drawn.choice(CHANGING[key]) for key in bad}
        described = f"{seed}.{number}: {changes}"
        yield Case(described, functools.partial(_run, changes, bad, f"{seed}.{number}"), limit=60.0)


@functools.cache
def base() -> tuple[dj.Model, dict[str, np.ndarray]]:
    """A model and its weights by the names of their modules."""
    spec = tiny(layers=2)
    with tempfile.TemporaryDirectory() as place:
        model = dj.load(write_hf(Path(place) / "base", spec), separate_layers=True)
    return model, {name.removesuffix(".weight"): weight for name, weight in tensors(spec).items()}


def _run(changes: dict[str, Any], bad: list[str], seed: str) -> Verdict:
    drawn = random.Random(seed)
    numbers = np.random.default_rng(drawn.getrandbits(32))
    model, weights = base()
    config = {
        "peft_type": "LORA", "r": drawn.randint(1, 4), "lora_alpha": drawn.choice((1, 8, 16, 2.5)),
        "target_modules": drawn.sample(sorted(LAST.values()), drawn.randint(1, 3)),
    }  # fmt: skip
    factors, rank = {}, config["r"]
    for module in [m for m in weights if m.rsplit(".", 1)[-1] in config["target_modules"]]:
        outputs, inputs = weights[module].shape
        a, b = numbers.standard_normal((rank, inputs)), numbers.standard_normal((outputs, rank))
        factors[module] = a.astype(np.float32), b.astype(np.float32)
    config |= changes
    place, outer, kind = (drawn.choice(of) for of in (PREFIXES, ("model.", ""), ("", ".default", ".mine")))
    spelled = lambda m: "base_model.model." + place + outer + m.removeprefix("model.")
    if config["target_modules"] == changes.get("target_modules"):
        spelled = lambda m: "base_model.model." + m
    with tempfile.TemporaryDirectory() as folder:
        stored = {f"{spelled(m)}.lora_A{kind}.weight": a for m, (a, _) in factors.items()}
        stored |= {f"{spelled(m)}.lora_B{kind}.weight": b for m, (_, b) in factors.items()}
        save_file(stored, Path(folder) / "adapter_model.safetensors")
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        plain = outer == "model." and not place and not kind  # what PEFT itself reads
        check = functools.partial(_fault, factors, config, Path(folder) if plain else None)
        call = lambda: lora.load(model, folder)
        return judge(call, [*bad, folder], valid=not bad, check=check)


def _fault(factors: dict[str, Any], config: dict[str, Any], folder: Path | None, model: dj.Model) -> str:
    """What is wrong with the updates of a model, in words."""
    weights, rank = base()[1], config["r"]
    scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
    expected = {m: weights[m] + scale * b @ a for m, (a, b) in factors.items()}
    if folder is not None and importlib.util.find_spec("peft"):
        theirs = _by_peft(folder, weights)
        if not all(np.allclose(theirs[m], expected[m], rtol=1e-4, atol=1e-4) for m in factors):
            return "PEFT computes other numbers than this campaign"
    names = {last: leaf for leaf, last in LAST.items()}
    for module, wanted in expected.items():
        *_, layer, last = module.split(".")
        matrix = model.params["layers"][int(layer)][names[last]]
        update = np.asarray(matrix.a).reshape(-1, rank) @ np.asarray(matrix.b).reshape(rank, -1)
        ours = np.asarray(matrix.base).reshape(update.shape) + matrix.scale * update
        if not np.allclose(ours.T, wanted, rtol=1e-4, atol=1e-4):
            return f"other numbers in {module}"
    return ""


def _by_peft(folder: Path, weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The weights that PEFT merges an adapter into, by module."""
    import peft  # slow, and not installed everywhere
    import torch

    root = torch.nn.Module()
    root.prepare_inputs_for_generation = None  # which PEFT takes of models of its task CAUSAL_LM
    for name, weight in weights.items():
        *outer, last = name.split(".")
        module = root
        for part in outer:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        layer = torch.nn.Linear(*weight.shape[::-1], bias=False) if weight.ndim == 2 else torch.nn.Module()
        if weight.ndim == 2:
            layer.weight.data = torch.from_numpy(weight.copy())
        module.add_module(last, layer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        merged = peft.PeftModel.from_pretrained(root, folder).merge_and_unload()
    linear = [(n, part) for n, part in merged.named_modules() if isinstance(part, torch.nn.Linear)]
    return {name: part.weight.detach().numpy() for name, part in linear}
