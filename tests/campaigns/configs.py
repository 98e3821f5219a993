"""config.json as tools write it: one spec in many spellings, and keys that must be refused by name.

Each case draws a family and some changes. A change is a spelling, whose spec is known, or a fault. What is
read must equal the expected spec, and come back from what an export writes; a fault must be named.
"""

import dataclasses
import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from dllm_jax.checkpoint.config import Config
from dllm_jax.checkpoint.families import config_to_spec, spec_to_config, spec_to_generation
from dllm_jax.nn.spec import ModelSpec, RopeScaling
from tests.campaigns.verdicts import Case, Outcome, Verdict, judge
from tests.test_load_config import EVERY

NAME = "spellings of config.json"
SAMPLE = 60
BLOCKS = ("block_size", "block_length", "bd_size")
# DiffusionGemma's keys stand in `text_config`: its spellings have tests of their own (test_diffusion_gemma).
FLAT = sorted(name for name, config in EVERY.items() if "text_config" not in config)


@dataclasses.dataclass
class Drawn:
    """A config.json and generation_config.json, the fields that they mean, and a word that refusals name."""

    values: dict[str, Any]
    fields: dict[str, Any]
    generation: dict[str, Any] = dataclasses.field(default_factory=dict)
    fault: str = ""


def cases(seed: int) -> Iterator[Case]:
    """Endless; case n of a seed is the same in every run."""
    for number in itertools.count():
        drawn = random.Random(f"{seed}.{number}")
        family = drawn.choice(FLAT)
        changes = drawn.sample(CHANGES, drawn.randint(1, 4)) + drawn.choice([[], [], FAULTS])[:1]
        names = ", ".join(change.__name__ for change in changes)
        run = functools.partial(_run, family, changes, f"{seed}.{number}")
        yield Case(f"{seed}.{number}: {family}: {names}", run, limit=10.0)


def _run(family: str, changes: "list[Change]", seed: str) -> Verdict:
    drawn = random.Random(seed)
    plain = config_to_spec(Config("plain", dict(EVERY[family])))
    case = Drawn(dict(EVERY[family]), {})
    for change in changes:
        change(case, plain, drawn)
    config = Config("here/config.json", case.values, case.generation)
    if case.fault:
        return judge(lambda: config_to_spec(config), [case.fault], valid=False)
    expected = dataclasses.replace(plain, **case.fields)
    verdict = judge(lambda: _read(config), [], valid=True, check=lambda spec: _unlike(spec, expected))
    if verdict.outcome is not Outcome.RIGHT:
        return verdict
    # An export of it, changed or not, reads as what was exported.
    other = dataclasses.replace(expected, eos_id=11, stop_ids=drawn.choice([None, (12, 13)]))
    for spec in (expected, other):
        back = lambda spec=spec: _read(
            Config("written", spec_to_config(spec, "float32", config), spec_to_generation(spec, config))
        )
        verdict = judge(back, [], valid=True, check=lambda found, spec=spec: _unlike(found, spec))
        if verdict.outcome is not Outcome.RIGHT:
            return verdict
    return verdict


def _read(config: Config) -> ModelSpec:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return config_to_spec(config)


def _unlike(found: ModelSpec, expected: ModelSpec) -> str:
    names = [field.name for field in dataclasses.fields(ModelSpec)]
    unlike = [name for name in names if getattr(found, name) != getattr(expected, name)]
    return "; ".join(f"{name}: {getattr(found, name)} / {getattr(expected, name)}" for name in unlike)


def rope(case: Drawn, plain: ModelSpec, drawn: random.Random):
    """Rotary embedding in one of its spellings, plain or scaled."""
    # Nemotron's code knows no linear scaling, iLLaDA's none at all.
    kinds = {"nemotron": ("default", "yarn"), "illada": ("default",)}.get(
        plain.family, ("default", "linear", "yarn")
    )
    kind, base = drawn.choice(kinds), drawn.choice((1e4, 5e5, 1e6, 10**7))
    inner: dict[str, Any] = {} if kind == "default" else {"factor": drawn.choice((0.25, 2, 4.0, 16.0))}
    own = dict(
        beta_fast=48, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.5, attention_factor=1.25, truncate=False
    )
    if kind == "yarn":
        inner["original_max_position_embeddings"] = drawn.choice((16, 1024))
        inner |= {key: own[key] for key in drawn.sample(sorted(own), drawn.randint(0, 4))}
    fields = {("original" if "original" in key else key): value for key, value in inner.items()}
    scaling = None if kind == "default" else RopeScaling(kind=kind, **fields)
    reach = 0 if scaling is None or scaling.original is None else int(scaling.original * scaling.factor)
    case.fields |= {"rope_base": float(base), "rope_scaling": scaling}
    case.fields["positions"] = max(plain.positions or 0, reach) or None
    typed = {drawn.choice(("type", "rope_type")): kind} | inner
    # The older keys alone, which mean nothing to Nemotron's code.
    if plain.family != "nemotron" and drawn.random() < 0.4:
        case.values.pop("rope_parameters", None)
        case.values |= {
            "rope_theta": base,
            "rope_scaling": typed if inner else drawn.choice((None, False, typed)),
        }
        return
    stale = {"rope_theta": 7.0, "rope_scaling": {"rope_type": "yarn", "factor": 9.0}}
    for key in stale:
        case.values.pop(key, None)
    case.values |= drawn.choice(({}, stale))
    whole = {"rope_theta": base} | typed
    if "partial_rotary_factor" in case.values:
        whole["partial_rotary_factor"] = case.values["partial_rotary_factor"]
    by_kind = whole if plain.family == "nemotron" else {"full_attention": whole}
    case.values["rope_parameters"] = drawn.choice((whole, by_kind))


def ends(case: Drawn, plain: ModelSpec, drawn: random.Random):
    """Ends in lists of either file."""
    ids = drawn.sample(range(20, 40), drawn.randint(1, 4))
    written = ids if len(ids) > 1 or drawn.random() < 0.5 else ids[0]
    case.fields |= {"eos_id": ids[0], "stop_ids": tuple(ids[1:]) or None}
    if "eot_token_id" not in case.values:
        case.fields["eot_id"] = ids[1] if len(ids) > 1 else None
    place = drawn.choice(("config", "generation", "both"))
    if place == "config":
        case.values["eos_token_id"] = written
    elif place == "generation":
        case.values["eos_token_id"] = None
        case.generation["eos_token_id"] = written
    else:
        case.values["eos_token_id"], case.generation["eos_token_id"] = written, drawn.sample(ids, len(ids))


def mask(case: Drawn, plain: ModelSpec, drawn: random.Random):
    """The mask token in the other file."""
    case.values["mask_token_id"], case.generation["mask_token_id"] = None, plain.mask_id


def defaults(case: Drawn, plain: ModelSpec, drawn: random.Random):
    """Keys at the defaults of their classes that are left out."""
    case.values.pop("hidden_act", None)
    tie = "weight_tying" if plain.family == "llada" else "tie_word_embeddings"
    if plain.tied == (plain.family == "llada"):
        case.values.pop(tie, None)


def nothing(case: Drawn, plain: ModelSpec, drawn: random.Random):
    """False where null is meant, and keys that mean nothing."""
    case.values |= {"sliding_window": False, "quantization_config": False, "use_cache": True}
    case.values["layer_types"] = drawn.choice((False, None, ["full_attention"] * plain.layers))
    case.values["dtype"] = "float32"


def blocks(case: Drawn, plain: ModelSpec, drawn: random.Random):
    """The block size under another name."""
    if plain.block_size:
        for key in BLOCKS:
            case.values.pop(key, None)
        case.fields["block_size"] = size = drawn.choice((1, 8, 64))
        case.values |= dict.fromkeys(drawn.sample(BLOCKS, drawn.randint(1, 3)), size)


def fault(case: Drawn, plain: ModelSpec, drawn: random.Random):
    """A key that is refused."""
    # All layers of A2D attend everywhere, unlike those of the model that it is made from.
    other = "chunked_attention" if plain.family.startswith("a2d") else "sliding_attention"
    faults: dict[str, dict[str, Any]] = {
        "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "longrope": {"rope_parameters": {"type": "longrope", "factor": 2.0}}
        if plain.family == "nemotron"
        else {"rope_parameters": None, "rope_scaling": {"type": "longrope", "factor": 2.0}},
        "llama3": {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
        "rope_parameters": {"rope_parameters": drawn.choice(([], "yarn", 3, {"rope_type": "linear"}))},
        "short_factor": {"rope_parameters": {"rope_type": "default", "short_factor": [1.0]}},
        "eos_token_id": {"eos_token_id": drawn.choice((["x"], -1, 2.5, [[3]], True, "3"))},
        "layer_types": {"layer_types": drawn.choice(([other], "full", [None]))},
    }
    case.fault = drawn.choice(sorted(faults))
    case.values |= faults[case.fault]


Change = Callable[[Drawn, ModelSpec, random.Random], None]
CHANGES: list[Change] = [rope, ends, mask, defaults, nothing, blocks]
FAULTS: list[Change] = [fault]
