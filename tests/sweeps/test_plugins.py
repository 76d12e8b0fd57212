"""Sweeps with the real packages of the extra `sweep`: trials of optuna, and jobs that submitit starts."""

from __future__ import annotations

import pytest

from tests.sweeps.test_sweep import TINY, forked, own_sweep, record  # noqa: F401

EXTRA = "needs the extra `sweep`: pip install 'vsa-train[sweep]'"


@pytest.mark.slow
def test_optuna_proposes_the_trials_of_a_search(command_line, forked, tmp_path):  # noqa: F811
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason=EXTRA)
    words = [o for o in TINY if not o.startswith("optim.lr=")] + [f"output_dir={tmp_path}", "hydra/launcher=queue"]
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.n_trials=2",
        "hydra.sweeper.n_jobs=1",
        "hydra.sweeper.sampler.seed=1",
    ]
    status, _, err = command_line("train.py", "-m", *search, *words, "optim.lr=interval(1e-4,1e-2)")
    assert status == 0, err
    points = record(tmp_path / "pretrain" / "search")
    assert [point["status"] for point in points.values()] == ["finished", "finished"]
    rates = [float(point["overrides"][0].removeprefix("++optim.lr=")) for point in points.values()]
    assert rates[0] != rates[1]
    assert all(1e-4 <= rate <= 1e-2 for rate in rates)


@pytest.mark.slow
def test_submitit_runs_the_points_of_a_sweep_on_this_machine(command_line, tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason=EXTRA)
    words = [*own_sweep(tmp_path, "variants:\n  a: []\n  b: [sparsity.sparsity=0.75]\n"), *TINY]
    words += [f"output_dir={tmp_path / 'out'}", "sweep.control=false", "hydra/launcher=submitit_local"]
    status, _, err = command_line("sweep", "mine", *words)
    assert status == 0, err
    points = record(tmp_path / "out" / "pretrain" / "mine")
    assert {name: point["status"] for name, point in points.items()} == {"a": "finished", "b": "finished"}
    # submitit's own record of each job
    assert len(list(tmp_path.rglob("*_result.pkl"))) == 2
