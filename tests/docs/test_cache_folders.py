"""docs/benchmarks/how-fast.md names the folders in which torch and Triton keep what they compiled."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch._inductor.runtime import cache_dir_utils

from tests.docs.pages import ROOT

PAGE = (ROOT / "docs" / "benchmarks" / "how-fast.md").read_text(encoding="utf-8")
FOLDERS = dict(re.findall(r"^\| `(\w+_CACHE_DIR)` \| `([^`]+)`", PAGE, re.M))


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.delenv("TRITON_HOME", raising=False)
    for name in FOLDERS:
        monkeypatch.delenv(name, raising=False)


def test_the_folder_of_torch(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("getpass.getuser", lambda: "USER")
    assert cache_dir_utils.default_cache_dir() == FOLDERS["TORCHINDUCTOR_CACHE_DIR"]
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "kept"))
    assert cache_dir_utils.cache_dir() == str(tmp_path / "kept")
    # where torch.compile lets Triton write unless TRITON_CACHE_DIR is set
    assert Path(cache_dir_utils.triton_cache_dir(0)).is_relative_to(tmp_path / "kept")


def test_the_folder_of_triton(monkeypatch, tmp_path):
    knobs = pytest.importorskip("triton").knobs
    # the home folder is read when Triton is imported
    assert knobs.cache.dir == str(Path(FOLDERS["TRITON_CACHE_DIR"]).expanduser())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert knobs.cache.dir == str(tmp_path)


def test_a_cluster_job_keeps_both():
    script = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8").partition("#!/bin/bash")[2].partition("```")[0]
    assert set(re.findall(r"(\w+_CACHE_DIR)=", script)) == set(FOLDERS)
    assert script.index("_CACHE_DIR") < script.index("\nsrun ")
