"""Who may import whom, names that do not collide, and what a user sees of the package."""

import ast
import csv
import dataclasses
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import dllm_jax as dj
from dllm_jax.engine.generation import Plan

ROOT = Path(dj.__file__).parent
APPLICATIONS = {"check", "commands", "demo", "bundled", "eval", "nnx", "roofline", "tasks", "training"}
NETWORK = {"traced", "options", "xla", "nn"}
STATE = NETWORK | {"state"}
SHARED_NAMES = 22  # public functions and classes whose names stand in two files
POLICIES = STATE | {"eviction", "policies"}
MAY_IMPORT = {
    "traced": set(), "options": {"traced", "options"}, "provenance": set(), "xla": {"xla"},
    "command_line": {"encoding", "options", "provenance"},
    "encoding": set(), "interrupts": set(), "locks": set(),
    "nn": NETWORK, "state": STATE,
    "samplers": STATE | {"samplers"},  # a sampler never imports a policy, nor a policy a sampler
    "eviction": STATE | {"eviction"}, "policies": POLICIES,
    # The pure program never imports the public functions that run it.
    "engine": POLICIES | {"samplers", "engine"},
    "decoding": POLICIES | {"samplers", "engine", "decoding", "encoding", "interrupts"},
    "analysis": POLICIES | {"engine", "decoding", "analysis"},
    "testing": POLICIES | {"samplers", "engine", "decoding", "testing"},
    "expressions": POLICIES | {"samplers"},
    # Published settings are read with the families' names of checkpoints.
    "checkpoint": STATE | {"samplers", "expressions", "checkpoint", "locks", "processes", "provenance"},
    "vision": STATE | {"checkpoint", "vision"},
}  # fmt: skip


def imported(path: Path) -> set[str]:
    """Modules of the package that a file imports, as dotted names below it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "dllm_jax":
            module = (node.module or "").split(".")[1:]
            for alias in node.names:
                longer = [*module, alias.name]
                found.add(".".join(longer if is_module(longer) else module))
        if isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] for a in node.names if a.name.startswith("dllm_jax.")}
    return found - {""}


def is_module(parts: list[str]) -> bool:
    place = ROOT.joinpath(*parts)
    return place.is_dir() or place.with_suffix(".py").is_file()


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


GRAPH = {name_of(path): imported(path) for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py"}


def test_layers_import_only_what_lies_below():
    for module, found in GRAPH.items():
        layer = module.split(".")[0]
        if layer in MAY_IMPORT:
            above = {other for other in found if other.split(".")[0] not in MAY_IMPORT[layer]}
            assert not above, f"dllm_jax.{module} imports {above}"
        if layer not in {*APPLICATIONS, "__main__"}:
            above = {other for other in found if other.split(".")[0] in APPLICATIONS}
            assert not above, f"dllm_jax.{module} imports {above}"


def test_only_applications_import_the_package_by_its_public_names():
    for path in ROOT.rglob("*.py"):
        by_name = any(
            isinstance(node, ast.Import) and any(alias.name == "dllm_jax" for alias in node.names)
            for node in ast.walk(ast.parse(path.read_text()))
        )
        assert not by_name or name_of(path).split(".")[0] in APPLICATIONS, path


def test_applications_and_what_is_slow_to_import_wait_until_they_are_asked_for():
    waiting = {f"dllm_jax.{name}" for name in APPLICATIONS - {"bundled"}}
    waiting |= {"flax", "optax", "orbax", "transformers", "huggingface_hub", "matplotlib", "lm_eval", "torch"}
    waiting |= {"rich", "tqdm", "tyro", "PIL", "tunix"}
    code = (
        f"import sys, dllm_jax; print(*sorted({waiting} & set(sys.modules)))\n"
        "print(callable(dllm_jax.tune), 'dllm_jax.eval' in sys.modules, hasattr(dllm_jax, 'no_such_name'))"
    )
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert found.stdout.splitlines() == ["", "True True False"]


def test_modules_do_not_import_each_other_in_circles():
    state: dict[str, str] = {}

    def visit(module: str, path: tuple[str, ...]):
        assert state.get(module) != "open", f"circle: {' -> '.join((*path, module))}"
        if module in state or module not in GRAPH:
            return
        state[module] = "open"
        for other in sorted(GRAPH[module]):
            if other != module and not module.startswith(f"{other}."):  # a package's own modules aside
                visit(other, (*path, module))
        state[module] = "done"

    for module in sorted(GRAPH):
        visit(module, ())


def test_no_public_name_shadows_a_module():
    """`import dllm_jax.a.b as b` gives the module, whatever the packages export."""
    for info in pkgutil.walk_packages([str(ROOT)], "dllm_jax."):
        if info.name.endswith("__main__") or ".harness." in info.name:
            continue
        package, _, leaf = info.name.rpartition(".")
        exported = getattr(importlib.import_module(package), leaf, None)
        if exported is not None:
            assert exported is importlib.import_module(info.name), f"{package} exports a {leaf} of its own"


def test_the_package_shows_public_names_and_packages_only():
    packages = {path.name for path in ROOT.iterdir() if (path / "__init__.py").is_file()}
    assert set(dir(dj)) - packages == {*dj.__all__, "__version__"} - packages
    for name in dir(dj):
        assert getattr(dj, name) is not None
    assert "options" not in dir(dj)
    assert (ROOT / "py.typed").is_file()
    assert dj.__version__.count(".") == 2


def test_the_policy_interface_has_at_most_16_members():
    """What a subclass may override, whether or not its name has an underscore."""
    plain = {"promises", "_returns", "__module__", "__doc__"} | {
        name for name in vars(dj.policies.Policy) if "__" in name
    }
    members = {
        n: m for n, m in vars(dj.policies.Policy).items() if n not in plain and not n.startswith("_abc")
    }
    sealed = {n for n, m in members.items() if getattr(getattr(m, "fget", m), "__final__", False)}
    assert len(members.keys() - sealed) <= 16, sorted(members.keys() - sealed)


def test_samplers_have_at_most_32_members_flags_and_fields():
    members = {
        name: member
        for name, member in vars(dj.samplers.Sampler).items()
        if not name.startswith("_") and name != "promises"
    }
    sealed = {n for n, m in members.items() if getattr(getattr(m, "fget", m), "__final__", False)}
    assert len(members.keys() - sealed) <= 32, sorted(members.keys() - sealed)


def test_a_plan_has_at_most_10_fields():
    """What a request adds to a step is one of the plan's features (`engine.features`)."""
    assert len(dataclasses.fields(Plan)) <= 10


def test_a_plain_call_enters_two_modules_of_features_at_most():
    code = (
        "import sys, dllm_jax as dj; files = set()\n"
        "model = dj.load(dj.bundled.path('tiny-llada'))\n"
        "sys.setprofile(lambda frame, *_: files.add(frame.f_code.co_filename))\n"
        "dj.generate(model, [[40, 41]], length=4, block=4, policy=dj.policies.DualCache())\n"
        "sys.setprofile(None)\n"
        "print(*sorted(f.rsplit('/', 1)[1] for f in files if '/engine/features/' in f.replace('\\\\', '/')))"
    )
    entered = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert entered.stdout.split() == ["assembly.py", "counts.py"]


def test_no_file_of_the_engine_tells_policies_or_samplers_by_their_class():
    kinds = {*dj.policies.__all__, *dj.samplers.__all__}
    for path in (ROOT / "engine").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "isinstance":
                names = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
                assert not names & kinds, f"{path}: {names & kinds}"


def test_one_function_says_which_positions_are_undecided():
    """Models without a mask token have other rules, so that nothing compares ids with `mask_id` by itself."""
    says = {("nn/spec.py", "_check_gemma"), ("nn/spec.py", "undecided")}
    says.add(("decoding/watch/recording.py", "undecided"))  # of a trace, which has no spec
    compare = set()
    for path in ROOT.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef):
                asked = [node for node in ast.walk(function) if isinstance(node, ast.Compare)]
                if any(re.search(r"\bmask_id\b(?! is)", ast.unparse(node)) for node in asked):
                    compare.add((path.relative_to(ROOT).as_posix(), function.name))
    assert compare == says


def test_the_canvas_has_at_most_15_fields_of_which_3_are_optional():
    """What one kind of model or answer needs is a field of its own kind of canvas (`state.contexts`)."""
    fields = dataclasses.fields(dj.state.Canvas)
    assert len(fields) <= 15
    assert sum(field.default is None for field in fields) <= 3


PLAIN = {"Rules", "partitioned_over"}  # of `dllm_jax.xla`, which say nothing to a compiler


def test_functions_for_xla_say_what_they_cost_and_which_test_fails_without_them():
    """Symptom, where it was seen, with which jaxlib, before and after; unless they see another one."""
    for path in (ROOT / "xla").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.FunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            text = ast.get_docstring(node) or ""
            if node.name in PLAIN or re.search(r"see `\w+`\.$", text):
                continue
            assert re.search(r"^Symptom: .*^Seen on: .*jaxlib 0.*^Cost: ", text, re.M | re.S), node.name
            file, name = re.findall(r"^Test: (test_\w+\.py)::(test_\w+)$", text, re.M)[0]
            assert f"def {name}(" in (Path(__file__).parent / file).read_text(), f"{node.name}: {name}"


def members() -> dict[str, set[str]]:
    """Classes of the packages, each with the names of its own members."""
    found: dict[str, set[str]] = {}
    for package in (ROOT, ROOT.parent / "pallas_kernels"):
        for node in (n for path in package.rglob("*.py") for n in ast.walk(ast.parse(path.read_text()))):
            if isinstance(node, ast.ClassDef):
                own = {n.name for n in node.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
                own |= {
                    n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                }
                found.setdefault(node.name, set()).update(own)
    return found


def test_names_with_a_path_in_pages_for_developers_exist():
    """Files, tests and definitions by their file, modules, and members of classes."""
    places, known, missing = (
        (ROOT.parent, ROOT, ROOT.parent / "tests", ROOT.parent / "docs/dev"),
        members(),
        [],
    )
    for page in (ROOT.parent / "docs/dev").glob("*.md"):
        text = page.read_text()
        for name in {
            *re.findall(r"`([\w./:]+)`", text),
            *re.findall(r"\b[\w/]+/\w+\.(?:py|json|csv)\b", text),
        }:
            path, _, inside = name.partition(":")
            parts, file = path.split("."), [place / path for place in places if (place / path).exists()]
            if "/" in path or parts[-1] in ("py", "md", "json", "csv"):
                code = file[0].read_text() if file and file[0].is_file() else ""
                defined = rf"^ *(def |class |)({inside.strip(':')})\b( =|\(|:)"
                fine = bool(file) and (not inside or bool(re.search(defined, code, re.M)))
            elif parts[0] in ("xla", "nn", "state", "engine", "decoding", "dllm_jax", "pallas_kernels"):
                start = parts if parts[0] in ("dllm_jax", "pallas_kernels") else ["dllm_jax", *parts]
                fine = pkgutil.resolve_name(".".join(start)) is not None
            else:
                fine = len(parts) < 2 or parts[0] not in known or parts[1] in known[parts[0]]
            missing += [] if fine else [f"{page.name}: {name}"]
    assert not missing


def test_a_public_function_or_class_has_a_name_of_its_own():
    """`main` of a command aside; 22 of packages and of the engine are left."""
    places: dict[str, set[Path]] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, set()).add(path.relative_to(ROOT))
    shared = {name: sorted(map(str, files)) for name, files in places.items() if len(files) > 1}
    assert len(shared.keys() - {"main"}) <= SHARED_NAMES, shared


def test_attempts_are_rows_that_a_script_prints():
    folder = ROOT.parent / "docs/dev"
    with (folder / "attempts.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert re.fullmatch(r"2026-\d\d-\d\d", row["date"]), row
        assert re.fullmatch(r"[0-9a-f]{8}", row["commit"]), row
        assert all((row["topic"], row["change"])), row
        assert None not in row.values(), row
    command = [sys.executable, str(folder / "attempts.py"), "EvictPrompt", "votes"]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    expected = [
        row for row in rows if "EvictPrompt" in " ".join(row.values()) and "votes" in " ".join(row.values())
    ]
    assert len(expected) == sum(line.startswith("2026-") for line in printed.splitlines()) > 0


def test_files_that_docstrings_name_exist():
    files = [path.as_posix() for path in (ROOT.parent).rglob("*.*") if ".git" not in path.parts]
    missing = [
        f"{path.name}: {name}"
        for package in ("dllm_jax", "pallas_kernels", "bench", "convert", "examples", "tests")
        for path in (ROOT.parent / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)
        for name in re.findall(r"`([\w/.]+\.(?:py|md|toml))`", ast.get_docstring(node) or "")
        if not any(file.endswith(f"/{name}") for file in files)
    ]
    assert missing == []
