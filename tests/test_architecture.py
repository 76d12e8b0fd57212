"""Imports stay where the layers put them, seen from fresh interpreters."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("lightning", "hydra", "omegaconf", "webdataset", "wandb", "diffusers", "transformers", "av")


def _loaded_by(statement: str) -> set[str]:
    code = (
        f"import sys\nsys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'kernels')!r}]\n{statement}\n"
        f"print(' '.join(name for name in {HEAVY!r} if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import vsa_kernels", set()),
        ("import vsa.models.video_dit, vsa.attention.video_sparse, vsa.diffusion.sampler", set()),
        ("import vsa.data.shards", {"webdataset"}),
        # lightning itself may load transformers
        ("import vsa.training.modules.pretrain", {"lightning", "transformers"}),
    ],
)
def test_modules_load_only_what_their_layer_may(statement, allowed):
    assert _loaded_by(statement) - allowed == set()


def test_model_and_kernels_import_without_triton():
    # None in sys.modules makes every import of the name fail
    assert _loaded_by("sys.modules['triton'] = None\nimport vsa_kernels, vsa.models.video_dit") == set()


def test_probe_sees_a_forbidden_import():
    assert "omegaconf" in _loaded_by("import omegaconf")
