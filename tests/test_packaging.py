"""What an installation makes importable, and what it must not."""

import ast
import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent


def test_kernels_is_a_source_root_and_no_package():
    # a package of that name would shadow Hugging Face's `kernels`
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert {p.name for p in (ROOT / "kernels").iterdir()} - {"__pycache__"} == {"vsa_kernels", "README.md"}
    assert not (ROOT / "configs" / "__init__.py").exists()


def test_only_our_two_packages_are_installed(tmp_path):
    try:
        importlib.metadata.distribution("vsa-train")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vsa-train is not installed (run from the source tree)")
    code = (
        "import json\n"
        "from importlib.util import find_spec\n"
        "found = {name: find_spec(name) for name in ('vsa', 'vsa_kernels', 'tests', 'configs', 'scripts')}\n"
        "print(json.dumps({name: spec and spec.origin for name, spec in found.items()}))\n"
        "spec = find_spec('kernels')\n"
        f"print(spec is None or {str(ROOT)!r} not in str(spec))\n"
    )
    # what pytest and a shell add to the path would hide an installation of another tree
    command = [sys.executable, "-I", "-c", code]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    origins, foreign = result.stdout.splitlines()
    ours = {"vsa": ROOT / "vsa", "vsa_kernels": ROOT / "kernels" / "vsa_kernels"}
    others = dict.fromkeys(("tests", "configs", "scripts"))
    assert json.loads(origins) == {name: str(path / "__init__.py") for name, path in ours.items()} | others
    assert foreign == "True"


def test_no_other_distribution_provides_vsa():
    owners = importlib.metadata.packages_distributions().get("vsa", ["vsa-train"])
    assert set(owners) == {"vsa-train"}


def test_dependencies_are_imported_somewhere():
    files = [ROOT / "train.py", *(p for name in ("vsa", "kernels", "scripts") for p in (ROOT / name).rglob("*.py"))]
    nodes = [node for file in files for node in ast.walk(ast.parse(file.read_text()))]
    modules = {alias.name.partition(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    modules |= {str(n.module).partition(".")[0] for n in nodes if isinstance(n, ast.ImportFrom) and n.level == 0}
    owners = importlib.metadata.packages_distributions()
    packages = {canonical(owner) for module in modules for owner in owners.get(module, [module])}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = {canonical(re.split(r"[^\w.-]", requirement)[0]) for requirement in project["dependencies"]}
    assert requirements <= packages


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_dependencies_have_a_floor():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in project["dependencies"] + extras["tensorboard"] + extras["wan"] + extras["sweep"]:
        assert ">=" in requirement, requirement


def test_the_image_has_pinned_parts_of_this_checkout():
    text = (ROOT / "Dockerfile").read_text()
    stages = set(re.findall(r"^FROM \S+ AS (\S+)$", text, re.M))
    bases = set(re.findall(r"^FROM (\S+)", text, re.M)) - stages
    assert bases
    assert all(re.fullmatch(r"[\w/]+:\d+\.\d+\.\d+-[\w.-]+", base) for base in bases)
    copied = {name for line in re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M) for name in line.split()}
    assert copied == set(re.findall(r"^!(\S+)$", (ROOT / ".dockerignore").read_text(), re.M))
    # the wheel of these files alone is the one that `make wheel` tries
    (archived,) = re.findall(r"archive HEAD (.+) \\$", (ROOT / "scripts" / "check_wheel.sh").read_text(), re.M)
    assert set(archived.split()) == copied
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    pinned = re.findall(r"\b(torch|triton)==([\d.]+)", text)
    assert [name for name, version in pinned if ranges[name].contains(version)] == ["torch", "triton"]


@pytest.mark.parametrize("fails", [False, True])
def test_natten_that_cannot_be_installed_is_one_line(tmp_path, fails):
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\necho noise\necho noise >&2\nexit {int(fails)}\n')
    python.chmod(0o755)
    (tmp_path / ".installed").touch()
    result = subprocess.run(["make", "natten", f"VENV={tmp_path}"], cwd=ROOT, capture_output=True, text=True)
    (requirement,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["natten"]
    assert (result.returncode, result.stderr) == (0, "")
    assert [line for line in result.stdout.splitlines() if not line.startswith("make")] == [
        f"{requirement} could not be installed, its tests are skipped"
    ] * fails
    calls = (tmp_path / "calls").read_text()
    assert ("--no-build-isolation --no-deps " + requirement in calls) != fails
