"""Does the suite notice a fault? Eighty-nine of them, one after the other, and the tests that should.

    python -m tests.mutants                                    all of them by the quick suite, on this tree
    python -m tests.mutants --full                             by every test, as `pytest --full` has them
    python -m tests.mutants --revision after --json FILE       kept in FILE, beside other revisions

A mutant of `tests/data/mutants.json` is a piece of code that occurs once in `dllm_jax/`, in whatever file,
what stands there instead, and the tests that are expected to fail, the cheapest first. Nothing is drawn: two
revisions of the library are compared by the same faults. Where one of them words a line in another way, "or"
has the pair of code and replacement for it. A copy of the tree is changed, never the tree.
"""

import argparse
import functools
import json
import os
import pathlib
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parents[1]
TABLE = HERE / "tests/data/mutants.json"
NO_TESTS = 4, 5  # pytest's exit codes: files that are not there, and nothing that was selected
PIPED: dict = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)


def main(arguments: list[str] | None = None) -> int:
    """Runs mutants; returns 1 if one survives or cannot be made."""
    parser = argparse.ArgumentParser("python -m tests.mutants", description=__doc__.split("\n")[0])
    parser.add_argument("--names", nargs="+", metavar="NAME", help="mutants or rooms; all by default")
    parser.add_argument("--tree", type=pathlib.Path, default=HERE, help="of the library and its tests")
    parser.add_argument("--full", action="store_true", help="with the tests that the quick suite leaves out")
    parser.add_argument("--limit", type=int, default=90, help="CPU seconds of a test run")
    parser.add_argument("--json", type=pathlib.Path, help="file to add the results to")
    parser.add_argument("--revision", default="this tree", help="what the results are called in the file")
    options = parser.parse_args(arguments)
    mutants = chosen(options.names)
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(options.tree.resolve(), pathlib.Path(folder) / "tree")
        for number, mutant in enumerate(mutants, start=1):
            results[mutant["name"]] = found = attempt(
                tree, mutant, number, options.limit, ["--full"] * options.full
            )
            told = f"killed by {found['by']}" if found["killed"] else f"SURVIVED {found.get('problem', '')}"
            print(f"{number:2} of {len(mutants)}  {mutant['name']}: {told}", flush=True)
            if options.json is not None:
                keep(options.json, options.revision, options.tree, {mutant["name"]: found})
    show(mutants, results)
    return int(any(not result["killed"] for result in results.values()))


def chosen(names: list[str] | None) -> list[dict]:
    """The mutants of these names or rooms, in the table's order; all of them if there are no names."""
    rooms = json.loads(TABLE.read_text())
    mutants = [{"room": room, **mutant} for room, of_room in rooms.items() for mutant in of_room]
    known = {mutant[key] for mutant in mutants for key in ("name", "room")}
    if unknown := set(names or ()) - known:
        raise SystemExit(f"no such mutants: {', '.join(sorted(unknown))}")
    return [m for m in mutants if not names or m["name"] in names or m["room"] in names]


def copied(tree: pathlib.Path, scratch: pathlib.Path) -> pathlib.Path:
    """A copy of the files that git knows, with the tree's cache of compiled programs."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=tree, check=True, **PIPED)
    for name in filter(None, listed.stdout.split("\0")):
        if (tree / name).is_file():
            (scratch / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, scratch / name)
    (scratch / ".jax_cache").symlink_to((tree / ".jax_cache").resolve())
    return scratch


def attempt(tree: pathlib.Path, mutant: dict, number: int, limit: float, suite: list[str]) -> dict:
    """Whether the tests notice one mutant; says so where it cannot be made or nobody looks."""
    files = {path: path.read_text() for path in (tree / "dllm_jax").rglob("*.py")}
    forms = ((mutant["code"], mutant["instead"]), *mutant.get("or", ()))
    found = [(p, text, code, new) for code, new in forms for p, text in files.items() if code in text]
    if len(found) != 1 or found[0][1].count(found[0][2]) != 1:
        return {"killed": False, "problem": f"its code does not occur once: amend {TABLE.name}"}
    ((path, text, code, new),) = found
    # A time of its own for each version: Python tells by time and size whether its compiled file is current.
    write(path, text.replace(code, new), 2 * number)
    try:
        return noticed(tree, mutant["tests"], limit, suite)
    finally:
        write(path, text, 2 * number + 1)


def noticed(tree: pathlib.Path, targets: list[str], limit: float, suite: list[str]) -> dict:
    """The first test that fails of those that should, and the CPU seconds of the tests that ran."""
    seconds, passed = 0.0, False
    for target in targets:
        file, *selection = shlex.split(target)
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-rfE", "-p", "no:cacheprovider"]
        code, output, spent = run([*command, *suite, f"tests/{file}", *selection], tree, limit)
        seconds = round(seconds + spent, 1)
        if code is None:
            return {"killed": False, "problem": "time limit", "seconds": seconds}
        passed |= code == 0
        if code and code not in NO_TESTS:
            failed = FAILED.findall(output)
            by = failed[0] if failed else output.strip().splitlines()[-1]
            return {"killed": True, "by": by.removeprefix("tests/"), "seconds": seconds}
    return {"killed": False, "seconds": seconds} | (
        {} if passed else {"problem": "none of its tests is there"}
    )


def run(command: list[str], tree: pathlib.Path, limit: int) -> tuple[int | None, str, float]:
    """Exit code, output and CPU seconds of a command; no code if it reached the limit, in CPU seconds too."""
    before = os.times()
    limited = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (limit, limit))
    ended = subprocess.run(command, cwd=tree, preexec_fn=limited, check=False, **PIPED)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    return None if ended.returncode == -signal.SIGKILL else ended.returncode, ended.stdout, spent


def write(path: pathlib.Path, text: str, version: int):
    """A file of a time that tells its version."""
    path.write_text(text)
    os.utime(path, (version, version))


def show(mutants: list[dict], results: dict[str, dict]):
    """Prints how many of each room were killed."""
    for room in dict.fromkeys(mutant["room"] for mutant in mutants):
        own = [results[mutant["name"]] for mutant in mutants if mutant["room"] == room]
        seconds = sum(result.get("seconds", 0) for result in own)
        print(f"{room:12} {sum(r['killed'] for r in own):3} of {len(own)} killed, {seconds:.0f} CPU seconds")


def keep(file: pathlib.Path, revision: str, tree: pathlib.Path, results: dict[str, dict]):
    """Adds results to a file, a line each, in the place of earlier ones of the same mutants and revision."""
    content = json.loads(file.read_text()) if file.exists() else {}
    earlier = content.get(revision, {}).get("mutants", {})
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=tree, check=True, **PIPED)
    content[revision] = {"commit": commit.stdout.strip(), "mutants": earlier | results}
    text = json.dumps(content, indent=1)
    file.write_text(re.sub(r"\{\s+(\"killed\"[^}]+?)\s+\}", r"{\1}", text).replace("\n    ", " ") + "\n")


if __name__ == "__main__":
    sys.exit(main())
