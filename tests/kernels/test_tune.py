"""`scripts/tune.py` writes what `configs.json` reads."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from vsa_kernels import launch

from scripts import tune
from tests.kernels.interpreted import INTERPRETED

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="needs a machine without a GPU; once is enough")
def test_tuning_without_a_gpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune.py", "fwd"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / "tune.py"), run_name="__main__")
    assert stop.value.code == 1
    assert capsys.readouterr().err == "error: tuning needs a CUDA device, but torch finds none\n"


def test_tuned_configurations_are_written_as_they_are_read(tmp_path):
    text = launch.CONFIGS.read_text()
    assert tune.dump(json.loads(text)) == text
    path = tmp_path / "configs.json"
    path.write_text(text)
    config = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1, "DESC": 0, "maxnreg": None}
    tune.write(path, "fwd", 100, 16, 96, config)
    table, before = json.loads(path.read_text()), json.loads(text)
    assert list(table["fwd"]) == ["80", "90", "100"]
    assert list(table["fwd"]["100"]["16"]) == ["64", "96", "112", "128", "256"]
    assert table["fwd"]["100"]["16"].pop("96") == config
    assert table["fwd"].pop("100") == before["fwd"]["90"]
    assert table == before


def test_candidates_hold_the_pinned_one_and_what_the_grid_does_not_know():
    pinned_config = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "DESC": 1, "maxnreg": None}
    pinned_config |= {"DP_FIRST": 0, "NEW": 3}
    configs = tune.candidates("dkv", torch.bfloat16, 90, pinned_config)
    assert configs[0] == pinned_config
    assert configs.count(pinned_config) == 1
    assert all(config["NEW"] == 3 and config["DP_FIRST"] in (0, 1) for config in configs)
    assert all(config.keys() == pinned_config.keys() for config in configs)
    assert all(config["DESC"] == 0 for config in tune.candidates("fwd", torch.float16, 80, {})[1:])


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_candidates_are_checked_in_the_interpreter():
    for kernel in tune.KERNELS:
        config = launch.config(kernel, 16, torch.float32, CPU)
        p = tune.problem(kernel, 16, torch.float32, CPU, tokens=32, topk=2, heads=1, block=8)
        tune.checked(p, config, torch.float32)
        with pytest.raises(ValueError, match="wrong result"):
            tune.checked(p._replace(want=tuple(1.01 * x for x in p.want)), config, torch.float32)
