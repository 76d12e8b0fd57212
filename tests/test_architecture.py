"""Imports stay where the layers put them, seen from fresh interpreters."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("lightning", "hydra", "omegaconf", "webdataset", "wandb", "diffusers", "transformers", "av")


# what a statement may load
ALLOWED = {
    "import vsa_kernels": set(),
    "import vsa.models.video_dit, vsa.attention.video_sparse, vsa.diffusion.sampler": set(),
    "import vsa.data.shards": {"webdataset"},
    # lightning itself may load transformers
    "import vsa.training.modules.pretrain": {"lightning", "transformers"},
    # None in sys.modules makes every import of the name fail
    "sys.modules['triton'] = None\nimport vsa_kernels, vsa.models.video_dit": set(),
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
                print(json.dumps([statement, [name for name in {HEAVY!r} if name in sys.modules]]), flush=True)
                os._exit(0)
            assert os.wait()[1] == 0, statement
    """
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return {statement: set(names) for statement, names in map(json.loads, result.stdout.splitlines())}


@pytest.mark.parametrize(("statement", "allowed"), ALLOWED.items())
def test_modules_load_only_what_their_layer_may(loaded, statement, allowed):
    assert loaded[statement] - allowed == set()


def test_probe_sees_a_forbidden_import(loaded):
    assert "omegaconf" in loaded[FORBIDDEN]


def test_only_one_file_touches_lightnings_private_state():
    paths = [ROOT / "vsa/data/datamodule.py", *(ROOT / "vsa/training").rglob("*.py")]
    trees = {path.name: list(ast.walk(ast.parse(path.read_text()))) for path in paths}
    uses = {name: [node for node in nodes if isinstance(node, ast.Attribute)] for name, nodes in trees.items()}
    set_in = {name: {ast.unparse(n) for n in nodes if isinstance(n.ctx, ast.Store)} for name, nodes in uses.items()}
    compat = "lightning_compat.py"
    # what a class of ours sets or defines, and private names of hydra and torch
    ours = {text.removeprefix("self.") for name in trees if name != compat for text in set_in[name]}
    ours |= {node.name for name in trees for node in trees[name] if isinstance(node, ast.FunctionDef)}
    ours |= {"_target_", "_cdata", "_foreach_lerp_", "_find_object_source", "_normalize_file_name"}

    def private_names(name: str) -> set[str]:
        imports = [n for n in trees[name] if isinstance(n, ast.ImportFrom) and "lightning" in (n.module or "")]
        private = {node.attr for node in uses[name]} | {alias.name for node in imports for alias in node.names}
        private = {attr for attr in private if attr.startswith("_") and not attr.startswith("__") and attr not in ours}
        loops = {node.attr for node in uses[name] if node.attr.endswith("_loop")}
        return private | loops | {text for text in set_in[name] if text.startswith(("trainer.", "self.trainer."))}

    assert private_names(compat) >= {"_SubprocessScriptLauncher", "_launcher", "fit_loop", "trainer.should_stop"}
    assert {name: private_names(name) for name in trees if name != compat and private_names(name)} == {}
