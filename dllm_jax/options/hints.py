"""Words for people: names that they bring from other libraries, old names, warnings, `help`."""

import contextlib
import dataclasses
import difflib
import functools
import inspect
import re
import shlex
import sys
import textwrap
import types
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

NOTHING: Mapping[str, Any] = types.MappingProxyType({})
SAMPLER = "set it on the sampler: sampler=dj.samplers."
CODE = "not needed: no code of the checkpoint is executed"
BATCH = "not needed: pass a list of that size"
IDS = "pass the token ids after the model: dj.generate(model, ids); dj.chat takes messages"
END = "stop=[[{value}]]; stop_at_eos=True ends at the model's own; dj.chat takes texts"
COPIES = "repeat the prompt: [prompt] * {value}, with key= and a temperature"

# By their name: the library that it comes from, and our argument with the value, or what to do instead. A
# remark follows an argument after a semicolon. Where several are given, the first one whose arguments a
# function has is the one that is meant; what to do instead helps every function.
NAMES: dict[str, tuple[str, tuple[str, ...]]] = {
    "max_new_tokens": ("transformers, Dream", ("length={value}",)),
    "max_tokens": ("vLLM", ("length={value}",)),
    "gen_length": ("LLaDA", ("length={value}",)),
    "max_gen_toks": ("lm-evaluation-harness", ("length={value}",)),
    "max_length": ("transformers", ("length={value}; it counts generated tokens, without the prompt",)),
    "block_length": ("LLaDA, SDAR, Fast-dLLM", ("block={value}",)),
    "block_size": ("Fast-dLLM v2", ("block={value}",)),
    "diffusion_steps": ("Dream", ("steps={value}",)),
    "denoising_steps": ("SDAR", ("steps={value} * blocks; it counts those of all",)),
    "num_steps": ("MDLM", ("steps={value}",)),
    "max_steps": ("transformers", ("steps={value}",)),
    "attention_mask": ("transformers", ("prompt_mask=", "token_mask=")),
    "input_ids": ("transformers", (IDS,)),
    "inputs": ("transformers", (IDS,)),
    "inputs_embeds": ("transformers", ("prompt_embeds=",)),
    "eos_token_id": ("transformers", (END,)),
    "stop_strings": ("transformers", ("stop=dj.StopTexts(tokenizer, [...]); dj.chat takes the texts",)),
    "stop_token_ids": ("vLLM", ("stop=[[id], ...]; dj.chat takes texts",)),
    "pad_token_id": ("transformers", ("not needed: padding is never attended to",)),
    "mask_id": ("LLaDA", ("set it on the model: model.replace_spec(mask_id={value})",)),
    "mask_token_id": ("Dream", ("set it on the model: model.replace_spec(mask_id={value})",)),
    "seed": ("vLLM", ("key=jax.random.key({value})",)),
    "generator": ("diffusers", ("key=jax.random.key(seed)",)),
    "output_scores": ("transformers", ("logprobs=5",)),
    "top_logprobs": ("OpenAI", ("logprobs={value}",)),
    "output_history": ("Dream", ("trace={value}",)),
    "return_dict_in_generate": ("transformers", ("not needed: out.tokens holds the tokens",)),
    "streamer": ("transformers", ("use dj.stream(model, prompt, ...), or dj.stream_chat",)),
    "do_sample": ("transformers", (SAMPLER + "Confidence(temperature=0.7); 0 is greedy",)),
    "temperature": (
        "transformers, LLaDA, Dream, vLLM",
        (SAMPLER + "Confidence(temperature={value}); DiffusionGemma has EntropyNoise(t_max=, t_min=)",),
    ),
    "top_p": ("transformers, Dream, vLLM", (SAMPLER + "Confidence(temperature=1.0, top_p={value})",)),
    "top_k": ("transformers, Dream, vLLM", (SAMPLER + "Confidence(temperature=1.0, top_k={value})",)),
    "cfg_scale": ("LLaDA", (SAMPLER + "Confidence(cfg_scale={value})",)),
    "guidance_scale": ("transformers", (SAMPLER + "Confidence(cfg_scale={value} - 1)",)),
    "logits_eos_inf": ("LLaDA", (SAMPLER + "Confidence(logits_eos_inf={value})",)),
    "confidence_eos_eot_inf": ("LLaDA", (SAMPLER + "Confidence(confidence_eos_eot_inf={value})",)),
    "suppress_tokens": ("transformers", ("forbid={value}",)),
    "bad_words_ids": ("transformers", ("forbid=[id, ...]; it takes single ids",)),
    "remasking": ("LLaDA", (SAMPLER + "Confidence() for 'low_confidence', RandomOrder() for 'random'",)),
    "alg": ("Dream", (SAMPLER + "DreamSchedule(alg={value})",)),
    "alg_temp": ("Dream", (SAMPLER + "DreamSchedule(alg_temp={value})",)),
    "threshold": ("Fast-dLLM", (SAMPLER + "Threshold({value})",)),
    "confidence_threshold": ("SDAR", (SAMPLER + "Dynamic({value})",)),
    "factor": ("Fast-dLLM", (SAMPLER + "Factor({value})",)),
    "num_return_sequences": ("transformers", (COPIES,)),
    "n": ("vLLM", (COPIES,)),
    "num_beams": ("transformers", ("not supported: there is no beam search",)),
    "use_cache": ("transformers, Fast-dLLM", ("choose a cache policy: policy=dj.policies.PrefixCache()",)),
    "dual_cache": ("Fast-dLLM", ("choose a cache policy: policy=dj.policies.DualCache()",)),
    "enable_prefix_caching": ("vLLM", ("prefix=dj.prefill(model, ids)",)),
    "past_key_values": ("transformers", ("choose a cache policy: policy=dj.policies.DualCache()",)),
    "batch_size": ("transformers", ("slots={value}", "batch={value}", BATCH)),
    "max_num_seqs": ("vLLM", ("slots={value}",)),
    "torch_dtype": ("transformers", ("dtype={value}",)),
    "trust_remote_code": ("transformers", (CODE,)),
    "device_map": ("transformers", ("mesh=jax.make_mesh((8,), ('tp',)); it splits a model over devices",)),
    "device": ("transformers", ("choose one by jax.default_device(jax.devices()[0])",)),
    "tensor_parallel_size": ("vLLM", ("mesh=jax.make_mesh(({value},), ('tp',))",)),
    "load_in_8bit": ("transformers", ("weights='int8'",)),
    "quantization": ("vLLM", ("weights='int8'",)),
    "quantization_config": ("transformers", ("weights='int8'",)),
    "attn_implementation": ("transformers", ("implementation=",)),
    "scan_layers": ("MaxText", ("separate_layers=; it means the opposite",)),
    "vocab_size": ("transformers", ("vocab={value}",)),
    "max_model_len": ("vLLM", ("not needed: programs have the length of a request",)),
    "low_cpu_mem_usage": ("transformers", ("not needed: layers are read one by one",)),
    "token": ("transformers", ("set the environment variable HF_TOKEN",)),
    "cache_dir": ("transformers", ("set the environment variable HF_HUB_CACHE",)),
    "r": ("PEFT", ("rank={value}",)),
    "lora_alpha": ("PEFT", ("alpha={value}",)),
    "target_modules": ("PEFT", ("matrices=('q', 'v')",)),
    "lora_dropout": ("PEFT", ("not supported: adapters have no dropout",)),
    "lr": ("PyTorch", ("learning_rate={value}",)),
    "gradient_accumulation_steps": ("transformers", ("accumulate={value}; it divides the batch",)),
    "max_grad_norm": ("transformers", ("clip={value}",)),
    "warmup_steps": ("transformers", ("warmup={value}",)),
    "save_steps": ("transformers", ("save_every={value}",)),
    "gradient_checkpointing": ("transformers", ("remat={value}",)),
}  # fmt: skip

# Names that mean options of a class; those of functions mean others there (`EntropyNoise.steps`).
OF_CLASSES = {
    "LoRA": ("r", "lora_alpha", "target_modules", "lora_dropout"),
    "TrainConfig": (
        "lr", "max_steps", "gradient_accumulation_steps", "max_grad_norm", "warmup_steps", "save_steps",
        "gradient_checkpointing",
    ),
}  # fmt: skip


def unknown_arguments(
    function: str, unknown: Mapping[str, Any], known: Iterable[str], instead: Mapping[str, str] = NOTHING
) -> TypeError:
    """Returns the error of a call with arguments that a function does not have, with a hint for the first.

    Args:
      function: Name of the function or class.
      unknown: Values of the arguments that it does not have, by name.
      known: Names of the arguments that it has.
      instead: What to do instead of some arguments, as sentences by name.
    """
    (name, value), *_ = unknown.items()
    known = sorted(known)
    shown = repr(value) if isinstance(value, bool | int | float | str | None) else "..."
    close = difflib.get_close_matches(name, known, 1)
    if name in instead:
        hint = instead[name]
    elif (fix := fix_for(name, known, function)) is not None:
        hint = _hint(fix.format(value=shown), lambda code: code)
    elif close:
        hint = f"Did you mean {close[0]}=?"
    else:
        hint = f"Arguments: {', '.join(known) or 'none'}."
    return TypeError(f"{function}() got an unexpected argument {name!r}. {hint}")


def unknown_option(command: str, name: str, value: str, known: Iterable[str]) -> str | None:
    """Returns the error of a command line with another library's option; None if there is no hint for it.

    Args:
      command: The command, as it is typed.
      name: Name of the option, as an argument of Python would be spelled.
      value: What follows it; "..." if nothing does.
      known: Names of the options that the command has, in the same spelling.
    """
    known = {*known}
    if name in known or (fix := fix_for(name, known, command)) is None:
        return None
    hint = _hint(fix.format(value=value), lambda code: _as_options(code, known))
    return f"--{name} is not an option of {command}. {hint}"


def fix_for(name: str, known: Iterable[str], owner: str) -> str | None:
    """The entry of `NAMES` that a function, class or command with these arguments means; None if none."""
    if owner[0].isupper() and name not in OF_CLASSES.get(owner, ()):
        return None
    _, fixes = NAMES.get(name, ("", ()))
    # "length=32" helps where there is a length; a sentence without arguments helps everywhere.
    mine = [fix for fix in fixes if arguments_of(fix) <= {*known}]
    return next((fix for fix in mine if arguments_of(fix)), next(iter(mine), None))


def arguments_of(fix: str) -> set[str]:
    """The arguments that advice proposes, of the call itself and not of one inside of it."""
    code, _, _ = fix.partition("; ")
    return set(re.findall(r"(\w+)=", re.sub(r"\(.*\)", "", code)))


def _hint(fix: str, written: Callable[[str], str]) -> str:
    """Says what to do instead, in sentences, with code as `written` has it."""
    if not fix.partition("=")[0].isidentifier():
        return _sentence(written(fix))
    code, _, remark = fix.partition("; ")
    return f"Did you mean {written(code)}?" + (f" {_sentence(remark)}" if remark else "")


def _as_options(text: str, known: set[str]) -> str:
    """Arguments in a text as options of a command line: `length=32` is `--length 32`."""

    def option(match: re.Match) -> str:
        name, value = match[1], match[2]
        if name not in known:
            return match[0]
        plain = re.sub(r"^dj\.(samplers|policies)\.", "", value)
        return f"--{name.replace('_', '-')} {shlex.quote(plain.strip(chr(39)))}".rstrip()

    return re.sub(r"\b(\w+)=((?:dj\.)?[\w.]+(?:\([^()]*\))?|'[^']*'|(?!\[))", option, text)


def _sentence(text: str) -> str:
    """A remark as a sentence; one that begins with code keeps its case."""
    return (text if "=" in text.split()[0] or "." in text.split()[0] else text[0].upper() + text[1:]) + "."


def names_table() -> str:
    """Returns `NAMES` as a table in Markdown: name, library, what to write here."""

    def written(fix: str) -> str:
        code, comma, remark = fix.partition("; ")
        return f"`{code}`{comma}{remark}" if code.partition("=")[0].isidentifier() else fix

    fix = lambda fixes: "; ".join(map(written, fixes))
    lines = [f"| `{name}` | {where} | {fix(fixes)} |" for name, (where, fixes) in NAMES.items()]
    return "\n".join(["| name | library | here |", "|---|---|---|", *lines]).replace("{value}", "...")


# -- old names of public fields, which still work with a `DeprecationWarning` ----------------------


Class = TypeVar("Class", bound=type)


class Renamed:
    """An attribute under its old name: reading it warns and returns the attribute of the new name."""

    def __init__(self, old: str, new: str):
        self.old, self.new = old, new

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        warn_renamed(f"{type(instance).__name__}.{self.old}", self.new)
        return getattr(instance, self.new)


def accepts_old_names(cls: Class) -> Class:
    """Lets a dataclass be constructed with the old names of its `Renamed` fields, with a warning each."""
    construct = cls.__init__

    @functools.wraps(construct)
    def init(self: Any, *args: Any, **fields: Any):
        for old in old_names(cls) & fields.keys():
            warn_renamed(f"{cls.__name__}({old}=...)", vars(cls)[old].new)
        construct(self, *args, **new_names(cls, fields))

    cls.__init__ = init
    return cls


def new_names(cls: type, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns fields with new names in place of the old ones, as files of earlier versions have them."""
    renamed = {vars(cls)[old].new: fields[old] for old in old_names(cls) & fields.keys()}
    return {name: value for name, value in fields.items() if name not in old_names(cls)} | renamed


@functools.cache
def old_names(cls: type) -> frozenset[str]:
    """Returns the old names of a class's fields."""
    return frozenset(old for old, value in vars(cls).items() if isinstance(value, Renamed))


def warn_renamed(old: str, new: str, stacklevel: int = 3):
    """Warns the caller's caller that a name is deprecated."""
    warnings.warn(f"{old} is deprecated: use {new}", DeprecationWarning, stacklevel=stacklevel)


# -- warnings that point at the user's line --------------------------------------------------------


PACKAGE = str(Path(__file__).parents[1])
BETWEEN = contextlib.__file__, functools.__file__, "<string>"  # decorators, and classes that dataclass made


class Notice(NamedTuple):
    """Text and category of a warning that is given later, or not at all."""

    message: str
    category: type[Warning] = UserWarning


def warn(message: str, category: type[Warning] = UserWarning):
    """Warns at the line that called the library."""
    frame, level = sys._getframe(1), 2
    while frame is not None and _is_ours(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    # All of it is the library's where it is run as a command.
    warnings.warn(message, category, stacklevel=2 if frame is None else level)


def tell(notices: Iterable[Notice], told: set[type[Warning]] | None = None):
    """Gives warnings, of each category the first one.

    Args:
      notices: Warnings to give.
      told: Categories that were given in this call already, to which these are added.
    """
    told = set() if told is None else told
    for notice in notices:
        if notice.category not in told:
            told.add(notice.category)  # also where the user's program makes errors of warnings
            warn(*notice)


def _is_ours(file: str) -> bool:
    return file.startswith(PACKAGE) or file in BETWEEN or "/jax/_src/" in file


# -- how `help` shows options ----------------------------------------------------------------------


Function = TypeVar("Function", bound=Callable[..., Any])
SECTION = re.compile(r"^Attributes:\n((?:  .*\n?|\n(?=  ))*)", re.MULTILINE)
ENTRY = re.compile(r"^  (\w+): .*\n?(?:^   +.*\n?)*", re.MULTILINE)


def entries(doc: str | None) -> dict[str, str]:
    """The entries of a docstring's section "Attributes", by the names that they describe."""
    section = SECTION.search(inspect.cleandoc(doc or "") + "\n")
    return {entry[1]: entry[0].rstrip() for entry in ENTRY.finditer(section[1])} if section else {}


def describe_inherited(cls: type):
    """Adds the entries of fields that a class inherits to its docstring, each from the nearest ancestor."""
    if not (doc := vars(cls).get("__doc__")):
        return
    known = entries(doc)
    fields = {name for base in cls.__mro__[1:] for name in vars(base).get("__dataclass_fields__", ())}
    inherited = dict[str, str]()
    for base in cls.__mro__[1:]:
        for name, entry in entries(vars(base).get("__doc__")).items():
            if name in fields and name not in known:
                inherited.setdefault(name, entry)
    if not inherited:
        return
    doc, more = inspect.cleandoc(doc), "\n".join(inherited.values())
    section = SECTION.search(doc + "\n")
    if section is None:
        cls.__doc__ = f"{doc}\n\nAttributes:\n{more}"
        return
    before, after = doc[: section.end()].rstrip(), doc[section.end() :].lstrip("\n")
    cls.__doc__ = f"{before}\n{more}" + (f"\n\n{after}" if after else "")


def call(value: Any, always: tuple[str, ...] = ()) -> str:
    """The constructor call that makes options, without the fields that are at their defaults.

    Args:
      value: a dataclass, a literal, or a function, of which the name is written.
      always: names of fields to write even at their defaults.
    """
    if not dataclasses.is_dataclass(value):
        return value.__name__ if inspect.isfunction(value) else repr(value)
    fields = ((field, getattr(value, field.name)) for field in dataclasses.fields(value))
    arguments = [
        f"{field.name}={call(now)}" for field, now in fields if now != field.default or field.name in always
    ]
    return f"{type(value).__name__}({', '.join(arguments)})"


class ShortSignature(inspect.Signature):
    """A signature that prints its names and defaults in lines of 79 characters, as `help` shows it.

    It has all annotations, but prints none of a parameter: those of arrays are longer than the docstring.
    """

    def __str__(self) -> str:
        """Returns the parameters in brackets, and what is returned."""
        names, starred = [], False
        for parameter in self.parameters.values():
            if parameter.kind is parameter.KEYWORD_ONLY and not starred:
                names, starred = [*names, "*"], True
            name = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
            has_default = parameter.default is not parameter.empty
            name += f"{parameter.name}={call(parameter.default)}" if has_default else parameter.name
            names.append(name)
        lines = textwrap.wrap(", ".join(names), 75, break_long_words=False, break_on_hyphens=False)
        returned = self.return_annotation
        name = "" if returned is self.empty else f" -> {getattr(returned, '__name__', returned)}"
        return "(\n    " + "\n    ".join(lines) + f"\n){name}"

    def format(self, **_: Any) -> str:
        """Returns the same text, for `help` of Python 3.13 and later."""
        return str(self)


def short_help(function: Function) -> Function:
    """Lets `help` begin with a short signature; `inspect.signature` and editors see all annotations."""
    full = inspect.signature(function)
    parameters = list(full.parameters.values())
    setattr(function, "__signature__", ShortSignature(parameters, return_annotation=full.return_annotation))  # noqa: B010
    return function
