"""`dllm-jax`, or `python -m dllm_jax`: runs the subcommand that the command line names."""

import ast
import importlib
import runpy
import sys
from pathlib import Path

from dllm_jax.command_line import HELP, keep_programs, list_commands, run, run_subcommand, with_new_names

COMMANDS = {  # by name: module, and what `--help` says
    "demo": ("dllm_jax.demo.command", "a bundled model answers; what policies cost (default)"),
    "chat": ("dllm_jax.demo.chatting", "a conversation with a checkpoint"),
    "generate": ("dllm_jax.commands.generate", "answer a file of prompts, one per line"),
    "check": ("dllm_jax.check.command", "check correctness and speed on this device"),
    "convert": ("dllm_jax.commands.convert", "convert a Hugging Face checkpoint, or quantize it to int8"),
    "export": ("dllm_jax.commands.export", "write a converted checkpoint back as a Hugging Face directory"),
    "verify": ("dllm_jax.commands.verify", "compare two checkpoints, or one with its hashes"),
    "eval": ("dllm_jax.eval.__main__", "evaluate and tune policies; lm-evaluation-harness"),
    "bench": ("bench", "run a benchmark, such as `bench generate` (needs a clone)"),
}  # fmt: skip
USAGE = "dllm-jax [COMMAND] [OPTIONS]      (or python -m dllm_jax)"
BENCH = "dllm-jax bench COMMAND [OPTIONS]      (or python -m bench.COMMAND)"
ABOUT = "Diffusion language models in JAX, with training-free KV-cache policies."
CLONE = Path(__file__).parents[1]


def command():
    """Runs the `dllm-jax` command and ends the process."""
    run(main)


def main() -> int:
    """Runs a subcommand; options without a name are those of `demo`."""
    name, *args = sys.argv[1:] or ["demo"]
    if name.startswith("-") and name not in HELP:
        name, args = "demo", sys.argv[1:]
    keep_programs()
    # These two have subcommands of their own.
    if name == "bench":
        return bench(args)
    if name == "eval":
        sys.argv[1:] = args
        return importlib.import_module(COMMANDS[name][0]).main()
    args = with_new_names(args, {"--prompts": "--limit"}) if name == "demo" else args
    told = {name: text for name, (_, text) in COMMANDS.items()}
    find = lambda name: importlib.import_module(COMMANDS[name][0]).main
    return run_subcommand([name, *args], USAGE, ABOUT, told, find)


def bench(args: list[str]) -> int:
    """Runs `python -m bench.NAME`, which only a clone has.

    Raises:
      ValueError: without a clone, or no such program.
    """
    programs = {path.stem: path for path in sorted((CLONE / "bench").glob("*")) if _is_program(path)}
    if not programs:
        raise ValueError("command='bench' needs a clone of the repository: it is not part of the package")
    if args and args[0] in HELP:
        print(
            list_commands(
                "dllm-jax bench", BENCH, COMMANDS["bench"][1], {n: _about(p) for n, p in programs.items()}
            )
        )
        return 0
    if not args or args[0] not in programs:
        raise ValueError(f"bench needs one of {', '.join(programs)}")
    sys.path.insert(0, str(CLONE))
    sys.argv = [f"dllm-jax bench {args[0]}", *args[1:]]
    runpy.run_module(f"bench.{args[0]}", run_name="__main__")
    return 0


def _about(path: Path) -> str:
    """The first line of a program's docstring."""
    file = path / "__main__.py" if path.is_dir() else path
    return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def _is_program(path: Path) -> bool:
    return (path / "__main__.py").exists() or (path.suffix == ".py" and path.stem != "__init__")


if __name__ == "__main__":
    command()
