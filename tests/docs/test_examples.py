"""Python on the pages runs or at least imports what there is, and the picture of the house is that of the layers."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib

import pytest
import torch

from tests.docs.pages import FENCE, PAGES, ROOT

EXAMPLES = [
    pytest.param(body, id=f"{page.name}-{i}")
    for page in PAGES
    for i, (language, body) in enumerate(FENCE.findall(page.read_text(encoding="utf-8")))
    if language == "python"
]


def in_page(name: str) -> list[str]:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    return [body for language, body in FENCE.findall(text) if language == "python"]


@pytest.mark.parametrize("body", EXAMPLES)
def test_examples_import_what_there_is(body):
    ours = [
        node
        for node in ast.walk(ast.parse(body))
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("vsa")
    ]
    for node in ours:
        module = importlib.import_module(str(node.module))
        assert [alias.name for alias in node.names if not hasattr(module, alias.name)] == []


def test_the_kernels_alone():
    whole, own, parts = in_page("kernels.md")
    scope: dict = {}
    exec(whole, scope)
    assert scope["result"].out.shape == (1, 1024, 12, 64)
    assert scope["result"].index.kv_num_blocks.unique().tolist() == [4]
    assert all(scope[name].grad.abs().sum() > 0 for name in ("q", "k", "v", "gate"))
    exec(own, scope)
    q, k, v = (scope[name].transpose(1, 2) for name in ("q", "k", "v"))
    block = torch.arange(1024) // 64
    reach = block[:, None] - block
    dense = [
        torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=(reach >= 0) & (reach <= most))
        for most in (1, 2)
    ]
    torch.testing.assert_close(scope["out"].transpose(1, 2), dense[0])
    # control
    assert not torch.allclose(scope["out"].transpose(1, 2), dense[1])
    exec(parts, scope)
    q, k, v = (scope[name].transpose(1, 2).requires_grad_() for name in ("q", "k", "v"))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(scope["out"].transpose(1, 2), out)
    expected = torch.autograd.grad(out, (q, k, v), scope["dout"].transpose(1, 2))
    for name, grad in zip(("dq", "dk", "dv"), expected, strict=True):
        torch.testing.assert_close(scope[name].transpose(1, 2), grad)


def test_the_house_has_the_floors_of_the_layers():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (contract,) = (c for c in settings["tool"]["importlinter"]["contracts"] if c["type"] == "layers")
    rooms = [room for layer in contract["layers"] for room in layer.split(" | ")]
    folders = [room for room in rooms if (ROOT / room.replace(".", "/")).is_dir() or room == "vsa_kernels"]
    labels = re.findall(r'class="room"[^>]*>([^<]+)<', (ROOT / "docs" / "house.svg").read_text(encoding="utf-8"))
    assert labels == folders
    packages = {f"vsa.{path.parent.name}" for path in (ROOT / "vsa").glob("*/__init__.py")}
    assert packages | {"vsa_kernels"} == set(labels)


def test_the_python_of_the_readme_runs(capsys):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    (code,) = (body for language, body in FENCE.findall(readme) if language == "python")
    assert len(code.splitlines()) <= 12
    scope: dict = {}
    exec(code, scope)
    assert (scope["result"].out.shape, int(scope["result"].index.kv_num_blocks.max())) == ((1, 2048, 4, 64), 4)
    assert scope["q"].grad.abs().sum() > 0
    assert "torch.Size([1, 2048, 4, 64])" in capsys.readouterr().out
