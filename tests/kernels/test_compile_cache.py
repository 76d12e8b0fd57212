"""The caches of torch.compile on disk and a changed version of the operators."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import vsa_kernels
from vsa_kernels.compile_cache import VARIABLE, source_hash, tag_caches

from tests.limits import HANGS

PACKAGE = Path(vsa_kernels.__file__).parent

GRADIENT = """
import torch
from vsa_kernels import residual_norm

x = torch.arange(12.0).view(1, 3, 4).cos().requires_grad_()
weight, bias = torch.ones(4), torch.zeros(4)
function = torch.compile(lambda x: residual_norm(x, None, None, weight, bias, eps=1e-3, backend="triton")[1])
function(x).square().sum().backward()
print(x.grad.abs().sum().item())
"""


KEYS = """
import os
import torch
from torch._inductor.compile_worker.subproc_pool import SubprocPool
from torch._inductor.runtime.autotune_cache import AutotuneCache
{preparation}

pool = SubprocPool(1)
print(pool.submit(AutotuneCache._prepare_key, "/x/kernel.py").result() == AutotuneCache._prepare_key("/x/kernel.py"))
pool.shutdown()
os._exit(0)
"""


def test_importing_the_package_tags_the_caches():
    assert f"vsa_kernels-{source_hash(PACKAGE)}" in torch.compiler.config.cache_key_tag
    assert os.environ[VARIABLE] == torch.compiler.config.cache_key_tag


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preparation", "agree"),
    [("import vsa_kernels", True), ("torch.compiler.config.cache_key_tag = 'of this process'", False)],
)
def test_compile_processes_have_the_cache_keys_of_their_parent(preparation, agree):
    """They store the best of several configurations, which this process looks up in the next start."""
    command = [sys.executable, "-c", KEYS.format(preparation=preparation)]
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    environment["PYTHONPATH"] = str(PACKAGE.parent)
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANGS)
    assert result.stdout.strip() == str(agree), result.stderr


def test_a_tag_of_the_user_is_kept_and_ours_is_set_once(monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
    monkeypatch.setenv(VARIABLE, "mine")
    for _ in range(2):
        tag_caches(PACKAGE)
    expected = f"mine vsa_kernels-{source_hash(PACKAGE)}"
    assert torch.compiler.config.cache_key_tag == os.environ[VARIABLE] == expected


def test_the_hash_depends_on_names_and_contents_of_source_files(tmp_path):
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    (tmp_path / "inner" / "b.py").write_text("")
    hashes = [source_hash(tmp_path)]
    (tmp_path / "inner" / "b.py").write_text("x = 2\n")
    hashes.append(source_hash(tmp_path))
    (tmp_path / "inner" / "b.py").rename(tmp_path / "inner" / "c.py")
    hashes.append(source_hash(tmp_path))
    assert len(set(hashes)) == 3
    (tmp_path / "inner" / "notes.txt").write_text("no source")
    assert source_hash(tmp_path) == hashes[-1]


@pytest.mark.slow
def test_a_changed_backward_is_not_taken_from_the_cache(tmp_path):
    """Torch's key of a graph has the names of operators, but not their gradients."""
    if shutil.which("g++") is None:
        pytest.skip("torch compiles for a CPU with g++")
    shutil.copytree(PACKAGE, tmp_path / "vsa_kernels", ignore=shutil.ignore_patterns("__pycache__"))
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": str(tmp_path),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache"),
    }

    def gradient() -> float:
        command = [sys.executable, "-c", GRADIENT]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path, timeout=HANGS)
        assert result.returncode == 0, result.stderr
        return float(result.stdout)

    first = gradient()
    op = tmp_path / "vsa_kernels" / "residual_norm" / "op.py"
    old = "    return dx, of_update"
    assert op.read_text().count(old) == 1
    op.write_text(op.read_text().replace(old, "    return 3 * dx, of_update"))
    assert gradient() == pytest.approx(3 * first)
