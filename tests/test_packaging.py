"""What an installation makes importable, and what it must not."""

import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def test_kernels_is_a_source_root_and_no_package():
    # a package of that name would shadow Hugging Face's `kernels`
    assert not (ROOT / "kernels" / "__init__.py").exists()
    assert {p.name for p in (ROOT / "kernels").iterdir()} - {"__pycache__"} == {"vsa_kernels", "README.md"}
    assert not (ROOT / "configs" / "__init__.py").exists()


def test_packages_come_from_this_tree():
    import vsa_kernels

    import vsa

    assert Path(vsa.__file__).parent == ROOT / "vsa"
    assert Path(vsa_kernels.__file__).parent == ROOT / "kernels" / "vsa_kernels"


def test_only_our_two_packages_are_importable_elsewhere(tmp_path):
    try:
        importlib.metadata.distribution("vsa-train")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("vsa-train is not installed (run from the source tree)")
    code = (
        "from importlib.util import find_spec\n"
        "print({name: find_spec(name) is not None for name in ('vsa', 'vsa_kernels', 'tests', 'configs', 'scripts')})\n"
        "spec = find_spec('kernels')\n"
        f"print(spec is None or {str(ROOT)!r} not in str(spec))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    found, foreign = done.stdout.splitlines()
    assert eval(found) == {"vsa": True, "vsa_kernels": True, "tests": False, "configs": False, "scripts": False}
    assert foreign == "True"


def test_no_other_distribution_provides_vsa():
    owners = importlib.metadata.packages_distributions().get("vsa", ["vsa-train"])
    assert set(owners) == {"vsa-train"}


def test_dependencies_have_a_floor():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for requirement in project["dependencies"] + extras["tensorboard"] + extras["wan"] + extras["sweep"]:
        assert ">=" in requirement, requirement
