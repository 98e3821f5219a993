"""Command lines: how they read paths, and how they report bad input."""

import contextlib
import difflib
import io
import os
import platform
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

import jax
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from dllm_jax import provenance
from dllm_jax.encoding import SIMILAR_ERRORS
from dllm_jax.options import hints

INTERRUPTED, BROKEN_PIPE = 130, 141  # exit status of what SIGINT or SIGPIPE ended, as in shells
HELP = {"-h", "--help"}
VERSION = "--version"
# How tyro shows the value of an option that is a text, may be None, or is a list.
METAVAR = r"--([a-z-]+) (STR|\{None\}\|[A-Z]+|\[([A-Z]+) \[\3 \.\.\.\]\])(?=[ ,]) *"
PATHS = ConstructorRegistry()  # a shell leaves the `~` of --out=~/runs as it is


def from_word(metavar: str, read: Callable[[str], Any], kind: Any, show: Callable[[Any], str] = str) -> Any:
    """Tells tyro how command lines read and show a value that is one word.

    Args:
      metavar: What help calls the word.
      read: Makes the value of a word.
      kind: Classes of such values.
      show: Writes a default as a word.
    """
    is_instance = lambda value: isinstance(value, kind)
    show_all = lambda value: [show(value)]
    return PrimitiveConstructorSpec(1, metavar, lambda words: read(words[0]), is_instance, show_all)


@PATHS.primitive_rule
def _path(described: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
    """Reads a path whose `~` is the user's home."""
    expanded = lambda word: Path(word).expanduser()
    return from_word("PATH", expanded, Path) if described.type is Path else None


def read_options(function: Callable[..., Any], prog: str | None = None, args: list[str] | None = None) -> Any:
    """Calls a function with the options of a command line, the process's by default, and returns its result.

    A flag that is off has no `--no-` form.

    Args:
      function: Function whose arguments are the options.
      prog: Name of the program in its help.
      args: Words of the command line, after the program.
    """
    return tyro.cli(function, prog=prog, args=args, registry=PATHS, config=(tyro.conf.FlagCreatePairsOff,))


@contextlib.contextmanager
def plain_errors(interrupted: str = "interrupted") -> Iterator[None]:
    """Ends the program with a message in place of a traceback: exit code 2 on bad input, 130 on Ctrl-C.

    A package that is missing counts as bad input: the message names it.

    Args:
      interrupted: Message on Ctrl-C, unless the `KeyboardInterrupt` brings one.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    except KeyboardInterrupt as error:
        print(str(error) or interrupted, file=sys.stderr)
        raise SystemExit(INTERRUPTED) from error


def keep_programs() -> Path:
    """Keeps compiled programs for later runs of a command in JAX's persistent cache, and returns its folder.

    A place that the user has chosen (`JAX_COMPILATION_CACHE_DIR`) stays. The default one is of this machine
    alone, because a program for one CPU may not run on another that shares the home directory.
    """
    chosen = jax.config.values["jax_compilation_cache_dir"]
    if chosen is None:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        chosen = str(caches / "dllm_jax" / platform.node())
        jax.config.update("jax_compilation_cache_dir", chosen)
        jax.config.update("jax_compilation_cache_max_size", 2**30)
        _drop_unfinished(Path(chosen))
    return Path(chosen)


def _drop_unfinished(where: Path):
    """Removes programs without the file of their last use, as a kill between the two leaves them.

    JAX reads that file of every entry before it adds one, and adds none while one is missing.
    """
    if not _unfinished(where):
        return
    import filelock  # slow to import, and seldom used

    # JAX writes both files under this lock: an entry that lacks one now is nobody's.
    with filelock.FileLock(where / ".lockfile"):
        for entry in _unfinished(where):
            entry.unlink()


def _unfinished(where: Path) -> list[Path]:
    """Entries of JAX's cache that lack the file of their last use."""
    last_use = lambda entry: entry.with_name(f"{entry.name.removesuffix('-cache')}-atime")
    return [entry for entry in where.glob("*-cache") if not last_use(entry).exists()]


def kept_programs(where: Path) -> str:
    """Says where compiled programs are kept, and how large they are."""
    size = sum(file.stat().st_size for file in where.glob("*")) if where.is_dir() else 0
    shown = f"~/{where.relative_to(Path.home())}" if where.is_relative_to(Path.home()) else where
    return f"Compiled programs are kept in {shown} ({size / 1e6:.0f} MB), where later runs find them."


def with_new_names(args: list[str], renamed: Mapping[str, str]) -> list[str]:
    """Replaces old names of options by new ones, and says so on standard error.

    Args:
      args: Words of a command line.
      renamed: New names by old ones, with their dashes.
    """
    words = []
    for word in args:
        name, equals, value = word.partition("=")
        new = renamed.get(name.replace("_", "-"), name)
        if new != name:
            print(f"{name} is deprecated: use {new}", file=sys.stderr)
        words.append(f"{new}{equals}{value}")
    return words


@contextlib.contextmanager
def wrapped_help() -> Iterator[None]:
    """Wraps the lines of a help text, which tyro leaves to the terminal to break within words."""
    if HELP.isdisjoint(sys.argv[1:]):
        yield
        return
    # The encoding decides which characters tyro draws with.
    text = io.TextIOWrapper(io.BytesIO(), encoding=sys.stdout.encoding, errors=SIMILAR_ERRORS)
    try:
        with contextlib.redirect_stdout(text):
            yield
    finally:
        width = shutil.get_terminal_size().columns
        text.seek(0)
        # A default of None, or of no values, is told by the help text; boxes keep their width.
        hint = r"\(default:(?:\s*│\n│\s*)?(?: ?None)?\s?\)"
        shown = re.sub(hint, lambda match: re.sub(r"[^\s│]", " ", match[0]), text.read())
        shown = re.sub(METAVAR, _named, re.sub(r"\{None,([^}]*\})", r"{\1     ", shown))
        shown = re.sub(r"^│ +│\n", "", shown, flags=re.MULTILINE)
        for line in re.sub(r"\n{3,}", "\n\n", shown).splitlines():
            indent = "  " if line.startswith("usage:") else ""
            wrapper = textwrap.TextWrapper(
                width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
            print(wrapper.fill(line) if len(line) > width else line)


def _named(match: re.Match) -> str:
    """Names an option's value after the option, as in `--policy POLICY...`, in the width of tyro's name."""
    kind = re.findall(r"[A-Z]{3,}", match[2])[0]
    word = match[1].rpartition("-")[2].upper() if kind == "STR" else kind
    named = f"--{match[1]} {word}{'...' if match[2].startswith('[') else ''}"
    return named.ljust(len(match[0])) if len(named) < len(match[0]) else match[0]


def run_subcommand(
    words: list[str], usage: str, about: str, subcommands: Mapping[str, str], find: Callable[[str], Any]
) -> int:
    """Runs the subcommand that the first word names; after `--help` prints a line for each of them.

    Args:
      words: Words of the command line, after the command.
      usage: Usage of the command, as it is typed: "dllm-jax COMMAND".
      about: Sentence about the command.
      subcommands: Descriptions by name.
      find: Returns the function of a subcommand, whose arguments are its options.

    Returns:
      the status that the function returns, else 0.

    Raises:
      ValueError: there is no such subcommand, or no word, or an option is another library's name for one.
    """
    command, (name, *args) = re.split(r" \[?COMMAND", usage)[0], words or [""]
    if name in HELP:
        print(list_commands(command, usage, about, subcommands))
        return 0
    if name not in subcommands:
        near = difflib.get_close_matches(name, subcommands, 1)
        fix = f"Did you mean {near[0]}?" if near else f"Commands: {', '.join(subcommands)}."
        if not name:
            raise ValueError(f"{command} needs a command. {fix}")
        raise ValueError(f"command={name[:40]!r} is not a command of {command}. {fix}")
    function, prog = find(name), f"{command} {name}"
    _check_options(function, prog, args)
    return read_options(function, prog, args) or 0


def _check_options(function: Any, prog: str, words: list[str]):
    """Raises ValueError, with what to write here, for an option that other libraries have by this name."""
    foreign = [word for word in words if _name_of(word) in hints.NAMES]
    if not foreign or not HELP.isdisjoint(words):
        return
    described = io.StringIO()
    with contextlib.redirect_stdout(described), contextlib.suppress(SystemExit):
        read_options(function, prog, ["--help"])
    known = {_name_of(word) for word in re.findall(r"--[a-z][\w-]*", described.getvalue())}
    for word in foreign:
        _, equals, value = word.partition("=")
        following = [*words[words.index(word) + 1 :], "--"][0]
        value = value if equals else "..." if following.startswith("--") else following
        if (error := hints.unknown_option(prog, _name_of(word), value, known)) is not None:
            raise ValueError(error)


def _name_of(word: str) -> str:
    """The name of an option, as an argument of Python is spelled; "" of a word that is none."""
    return word.partition("=")[0].removeprefix("--").replace("-", "_") if word.startswith("--") else ""


def list_commands(command: str, usage: str, about: str, subcommands: Mapping[str, str]) -> str:
    """Writes the help of a command that has subcommands, with a line for each."""
    indent = max(map(len, subcommands)) + 4
    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns, subsequent_indent=" " * indent, break_on_hyphens=False
    )
    lines = (wrapper.fill(f"  {name:{indent - 2}}{text}") for name, text in subcommands.items())
    last = f"{command} COMMAND --help describes the options of a command, {command} --version the versions."
    return "\n".join([f"usage: {usage}", "", about, "", "commands:", *lines, "", last])


def usable_output():
    """Lets standard output take any text, whatever its encoding, and discards the text of closed outputs."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (until the end)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors=SIMILAR_ERRORS)


def version() -> int:
    """Prints the versions of the library, jax and Python."""
    known = provenance.versions(("dllm-jax", "jax"))
    print(f"dllm_jax {known['dllm-jax']} (jax {known['jax']}, Python {platform.python_version()})")
    return 0


def run(main: Callable[[], object], interrupted: str = "interrupted") -> NoReturn:
    """Runs a command and ends the process with its status: the number that `main` returns, else 0.

    After bad input or Ctrl-C the status is that of `plain_errors`; 141 if nobody reads the output.
    `--version` prints versions in place of it.

    After Ctrl-C the interpreter is not torn down: threads of XLA may still work, and crash without it.
    """
    usable_output()
    try:
        with wrapped_help(), plain_errors(interrupted):
            returned = version() if VERSION in sys.argv[1:] else main()
            status = returned if isinstance(returned, int) else 0
        sys.stdout.flush()
    except SystemExit as ended:
        status = ended.code
    except BrokenPipeError:  # the reader of the output, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = BROKEN_PIPE
    if status == INTERRUPTED:
        sys.stdout.flush()
        os._exit(INTERRUPTED)
    sys.exit(status)
