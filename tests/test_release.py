"""What a release is made of: one version everywhere, workflows that parse, commands that exist."""

import pathlib
import re
import tomllib

import yaml

import dllm_jax as dj

ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()}


def test_versions_agree():
    """A tag is compared with the package's by the workflow itself."""
    version = PROJECT["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    released = re.findall(
        r"^## \[(\d\S*)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    assert released[0] == version


def test_the_changelog_names_every_policy_and_sampler():
    text = (ROOT / "CHANGELOG.md").read_text()
    kinds = [kind for kind in vars(dj.samplers).values() if isinstance(kind, type)]
    samplers = [
        kind for kind in kinds if issubclass(kind, dj.samplers.Sampler) and kind is not dj.samplers.Sampler
    ]
    for kind in (*map(type, dj.policies.ALL), *samplers):
        assert f"`{kind.__name__}`" in text, kind


def test_workflows_pin_what_they_run_and_say_what_they_may():
    for name, workflow in WORKFLOWS.items():
        assert workflow["permissions"] == {"contents": "read"}, name
        for job in workflow["jobs"].values():
            assert job["runs-on"] == "ubuntu-latest"
            used = [step["uses"] for step in job["steps"] if "uses" in step]
            assert all(re.search(r"@(v\d+|release/v\d+)$", action) for action in used), used
    assert WORKFLOWS["release"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}


def test_workflows_install_extras_and_run_files_that_exist():
    """The oldest jax of the tests is the one that the package asks for."""
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    runs = "\n".join(step.get("run", "") for job in jobs for step in job["steps"])
    extras = {extra for named in re.findall(r"\.\[([a-z,]+)\]", runs) for extra in named.split(",")}
    assert extras <= PROJECT["optional-dependencies"].keys()
    oldest, newest = WORKFLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]["include"]
    least = next(need for need in PROJECT["dependencies"] if need.startswith("jax>=")).split(",")[0]
    assert oldest["jax"].split()[0] == least.replace(">=", "==")
    assert newest["tests"].split()
    assert all((ROOT / file).exists() for file in newest["tests"].split())


def test_forms_and_hooks_parse():
    forms = [yaml.safe_load(path.read_text()) for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml")]
    names = [[part.get("id") for part in form["body"]] for form in forms if "body" in form]
    assert any("versions" in ids for ids in names), "a bug is reported with versions"
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert {hook["id"] for repo in hooks["repos"] for hook in repo["hooks"]} >= {"ruff-check", "ruff-format"}
