"""What a release is made of: one version everywhere, workflows that parse, a wheel that works elsewhere."""

import pathlib
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest
import yaml

import dllm_jax as dj

ROOT = pathlib.Path(__file__).parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, GROUPS = PYPROJECT["project"], PYPROJECT["dependency-groups"]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").iterdir()}


def test_versions_agree_and_the_changelog_names_every_policy_and_sampler():
    """A tag is compared with the package's by the workflow itself."""
    version = PROJECT["version"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    text = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## \[(\d\S*)\] - (\d{4}-\d\d-\d\d)$", text, re.MULTILINE)[0]
    assert (cited["version"], str(cited["date-released"])) == released
    assert released[0] == version
    kinds = {kind for kind in vars(dj.samplers).values() if isinstance(kind, type)} - {dj.samplers.Sampler}
    for kind in (*map(type, dj.policies.ALL), *(k for k in kinds if issubclass(k, dj.samplers.Sampler))):
        assert f"`{kind.__name__}`" in text, kind


def test_workflows_run_what_exists_and_no_more_than_they_may():
    """Actions are pinned; the oldest jax of the tests is the one that the package asks for.

    Versions of packages are held in pyproject.toml alone.
    """
    assert {name for name, flow in WORKFLOWS.items() if flow["permissions"] != {"contents": "read"}} == set()
    assert WORKFLOWS["release"]["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    # "on" is True in YAML 1.1.
    assert all(WORKFLOWS[name][True]["push"] == {"tags": ["v*"]} for name in ("release", "docs"))
    jobs = [job for workflow in WORKFLOWS.values() for job in workflow["jobs"].values()]
    steps = [step for job in jobs for step in job["steps"]]
    assert all(re.search(r"@(v\d+|release/v\d+)$", step.get("uses", "@v1")) for step in steps)
    runs = "\n".join(step.get("run", "") for step in steps)
    extras = {extra for named in re.findall(r"\.\[([a-z,]+)\]", runs) for extra in named.split(",")}
    assert extras <= PROJECT["optional-dependencies"].keys()
    oldest, newest = WORKFLOWS["ci"]["jobs"]["tests"]["strategy"]["matrix"]["include"]
    least = next(need for need in PROJECT["dependencies"] if need.startswith("jax>=")).split(",")[0]
    assert GROUPS[oldest["jax"]][0] == least.replace(">=", "==")
    assert newest["jax"] in GROUPS
    ci = (ROOT / ".ci/run").read_text()
    assert not re.search(r"[a-z]==\d", runs + ci)
    assert set(re.findall(r"\$\(group (\w+)\)", ci)) == {"torch", "libtpu"} <= GROUPS.keys()
    assert newest["tests"].split()
    assert all((ROOT / file).exists() for file in newest["tests"].split())


USE = """
import pathlib, sys
import dllm_jax as dj
import pallas_kernels
from dllm_jax.demo.command import Arguments  # with all that the demonstration imports
assert pathlib.Path(dj.__file__).is_relative_to(sys.argv[1]), dj.__file__
assert dj.presets.model_spec("llada-8b").layers == 32
assert dj.presets["sparse-dllm/llada-8b-instruct/gsm8k"].policy == dj.policies.SparseDLLM()
model = dj.load(dj.bundled.path("tiny-llada"))
out = dj.generate(model, [[1, 5, 20]], length=4, block=2, policy=dj.policies.DualCache())
assert out.tokens.shape == (1, 7)
assert not [name for name in sys.modules if name.startswith("jax.experimental.pallas")]  # slow to import
print("works")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> pathlib.Path:
    out = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    return next(out.glob("*.whl"))


def test_contents(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    needed = "engine/loop.py", "decoding/watch/page.js", "configs/models/llada-8b.json"
    needed += "configs/generation/llada-8b-instruct.toml", "configs/policies/sparse-dllm.toml"
    needed += ("published/tables.toml",)
    needed += "bundled/tiny-llada/model.safetensors", "bundled/tiny-llada/tokenizer.json"
    assert {f"dllm_jax/{name}" for name in needed} | {"pallas_kernels/__init__.py"} <= set(names)
    assert not [name for name in names if name.startswith(("tests/", "bench/", "convert/"))]


def test_the_description_on_the_package_index_has_no_relative_link(wheel):
    archive = zipfile.ZipFile(wheel)
    metadata = archive.read(next(name for name in archive.namelist() if name.endswith("/METADATA"))).decode()
    targets = re.findall(r"\]\(([^)]+)\)", metadata)
    assert f"github.com/dllm-jax/dllm_jax/blob/v{PROJECT['version']}/docs/quickstart.md" in metadata
    assert [target for target in targets if not re.match(r"https?://|#", target)] == []


def test_works_outside_the_checkout(wheel, tmp_path):
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, sys.argv[1])\n{USE}", str(site)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "works" in run.stdout
