"""One GPU beside several: the cases of a machine, and the table from their run folders."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from benchmarks import scaling
from benchmarks.scaling import MODELS, STEPS, WARM_UP, Case, Model, cases, run, table
from vsa.data.parallel_dims import ParallelDims
from vsa.training import hydra_guard


def rows(out: Path) -> list[dict[str, str]]:
    """Cells of the table by head."""
    heads, _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table(out)]
    return [dict(zip(heads, cells, strict=True)) for cells in lines]


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 8, 16])
def test_cases_of_a_group_compute_the_same_samples(gpus):
    found = cases(gpus)
    assert len({case.name for case in found}) == len(found)
    assert {case.sequence for case in found if case.model == "120m"} == {n for n in (1, 2, 4, 8, 16) if n <= gpus}
    for case in found:
        own = dict(setting.split("=", 1) for setting in case.settings(Path("out")))
        dims = ParallelDims(replicate=case.copies, shard=case.gpus // case.copies, sequence=case.sequence)
        micro = dims.micro_batch(case.samples, int(own["trainer.accumulate_grad_batches"]))
        assert (micro, dims.ranks) == (MODELS[case.model].micro, int(own.get("trainer.devices", 1)))
    for _, group in groupby(found, key=lambda case: (case.model, case.samples)):
        sizes = [case.gpus for case in group]
        assert sizes[0] == min(sizes)


def test_the_table_compares_with_the_fewest_gpus_and_the_plan(tmp_path):
    def write(case: Case, milliseconds: float, loss: float, gib: float, waits: float) -> None:
        folder = tmp_path / case.name
        folder.mkdir()
        OmegaConf.save(hydra_guard.composed(*case.settings(tmp_path)), folder / "config.yaml")
        # the first steps compile, one is slow, the last ones are traced
        times = [90.0, 9.0, *[milliseconds / 1e3] * (WARM_UP + STEPS - 3), 7.0, *[5.0] * STEPS]
        lines = [f"{i},{loss + 0.5 * (i == 4) * waits},{time},{gib}" for i, time in enumerate(times, 1)]
        heads = "step,train/loss,throughput/step_seconds,throughput/memory_gib"
        (folder / "metrics.csv").write_text("\n".join((heads, *lines, "")), encoding="utf-8")
        kinds = {scaling.COMMUNICATION: {"milliseconds": waits * 2000}} if waits else {}
        profile = {"device": "NVIDIA H100", "profiled_milliseconds": 2000, "kinds": kinds}
        (folder / "profile.json").write_text(json.dumps(profile), encoding="utf-8")

    write(Case(model="wan_1_3b", samples=1, gpus=2, sequence=2), 1516, 2.0, 26.9, 0.07)
    write(Case(model="wan_1_3b", samples=1, gpus=1), 2653, 2.0, 59.8, 0)
    one, two = rows(tmp_path)
    assert (one["GPUs"], one["ms a step"], one["exposed communication"], one["GiB"]) == ("1", "2,653", "0.0%", "59.8")
    assert one["times faster"] == one["losses differ by"] == ""
    expected = {"GPUs a sample": "2", "copies": "1", "times faster": "1.75", "exposed communication": "7.0%"}
    assert {head: two[head] for head in expected} == expected
    # .035 of 2
    assert two["losses differ by"] == "1.8e-02"
    # as published for these runs (docs/benchmarks/training-step.md)
    assert [float(row["by the plan"]) for row in (one, two)] == pytest.approx([58.6, 29.4], abs=0.15)


def test_a_folder_without_runs_is_named(tmp_path):
    with pytest.raises(ValueError, match=rf"^{tmp_path} has no run with a profile.json"):
        list(table(tmp_path))


@pytest.mark.slow
def test_two_processes_are_one_and_nothing_runs_twice(tmp_path, monkeypatch, capsys):
    tiny = (
        "model=dit_tiny", "model.num_attention_heads=4", "model.text_dim=4096", "trainer.accelerator=cpu",
        "task.parallel.compile=false", "task.parallel.activation_checkpointing=none", "tile_thw=[2,2,2]",
        "sparsity.topk=4", "data.num_workers=0",
    )  # fmt: skip
    monkeypatch.setitem(MODELS, "120m", Model(settings=tiny, latent=(16, 4, 16, 16), text=8, micro=2))
    three = [case for case in cases(2) if case.model == "120m"]
    run(tmp_path, three)
    found = rows(tmp_path)
    assert [(row["GPUs"], row["GPUs a sample"]) for row in found] == [("1", "1"), ("2", "1"), ("2", "2")]
    assert all(float(row["losses differ by"]) < 1e-5 for row in found[1:])
    capsys.readouterr()
    run(tmp_path, three)
    assert capsys.readouterr().out == ""
    # control: other weights, whose losses differ
    monkeypatch.setitem(MODELS, "120m", Model(settings=(*tiny, "seed=1"), latent=(16, 4, 16, 16), text=8, micro=2))
    (tmp_path / three[1].name / "profile.json").unlink()
    run(tmp_path, three)
    assert float(rows(tmp_path)[1]["losses differ by"]) > 1e-3
