"""An installation outside of the repository trains: from a wheel, and editable."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("vsa", "kernels", "configs", "pyproject.toml", "setup.py", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a distribution is made of: building leaves files beside it."""
    folder = tmp_path_factory.mktemp("sources")
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            shutil.copytree(path, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, folder)
    return folder


def pip(*words: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("way", ["wheel", "editable"])
def test_an_installation_trains_outside_of_the_repository(sources, tmp_path, tiny_overrides, way):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    (site,) = (tmp_path / "env").glob("lib/python3*/site-packages")
    # what we depend on, without the installation of this tree that a `.pth` in there may point to
    (site / "shared.pth").write_text(sysconfig.get_paths()["purelib"])
    target = sources
    if way == "wheel":
        pip("wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, sources)
        (target,) = tmp_path.glob("*.whl")
        names = set(zipfile.ZipFile(target).namelist())
        assert {"vsa/configs/train.yaml", "vsa/configs/experiment/quickstart.yaml"} <= names
        assert "vsa_kernels/configs.json" in names
        assert not [name for name in names if name.startswith(("tests", "benchmarks", "scripts", "configs"))]
    options = ("-e",) if way == "editable" else ()
    pip("--python", python, "install", "--no-deps", "--no-build-isolation", "--ignore-installed", *options, target)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*words: str | Path) -> str:
        command = [str(word) for word in words]
        result = subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return result.stdout

    where = Path(run(python, "-c", "import vsa; print(vsa.__file__)").strip())
    assert where.is_relative_to(site if way == "wheel" else sources)
    run(python.parent / "vsa", "train", *tiny_overrides, "trainer.max_steps=1", "callbacks.checkpoint.every_n_steps=1")
    assert (tmp_path / "outputs/pretrain/default/checkpoints/step-00000001").is_dir()
