"""Imports stay where the layers put them, seen from fresh interpreters."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("lightning", "hydra", "omegaconf", "webdataset", "wandb", "diffusers", "transformers", "av")
VIDEO_DIT = "vsa.models.video_dit"
WATCHED = (*HEAVY, VIDEO_DIT)
WHOLE_TRAINING = """
import importlib, pkgutil, vsa.training
for module in pkgutil.walk_packages(vsa.training.__path__, "vsa.training."):
    importlib.import_module(module.name)
"""


# what a statement may load
ALLOWED = {
    "import vsa_kernels": set(),
    "import vsa.models.video_dit, vsa.attention.video_sparse, vsa.diffusion.sampler": {VIDEO_DIT},
    "import vsa.data.shards": {"webdataset"},
    # lightning itself may load transformers
    "import vsa.training.modules.pretrain": {"lightning", "transformers"},
    # None in sys.modules makes every import of the name fail
    "sys.modules['triton'] = None\nimport vsa_kernels, vsa.models.video_dit": {VIDEO_DIT},
    # a network is known by its protocol
    WHOLE_TRAINING: set(HEAVY),
}
FORBIDDEN = "import omegaconf"


@pytest.fixture(scope="module")
def loaded() -> dict[str, set[str]]:
    """Heavy packages that each statement loads: one interpreter that has torch, its compiler too, which our operators
    load and which takes longer than all the rest, forks for every statement."""
    code = f"""if True:
        import json, os, sys
        sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "kernels")!r}]
        import torch._dynamo

        for statement in {[*ALLOWED, FORBIDDEN]!r}:
            if os.fork() == 0:
                exec(statement)
                print(json.dumps([statement, [name for name in {WATCHED!r} if name in sys.modules]]), flush=True)
                os._exit(0)
            assert os.wait()[1] == 0, statement
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {statement: set(names) for statement, names in map(json.loads, result.stdout.splitlines())}


@pytest.mark.slow
@pytest.mark.parametrize(("statement", "allowed"), ALLOWED.items())
def test_modules_load_only_what_their_layer_may(loaded, statement, allowed):
    assert loaded[statement] - allowed == set()


@pytest.mark.slow
def test_probe_sees_a_forbidden_import(loaded):
    assert "omegaconf" in loaded[FORBIDDEN]
