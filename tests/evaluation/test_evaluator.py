"""`vsa evaluate` as a user runs it: numbers, files, bars, following a run that writes and removes checkpoints."""

from __future__ import annotations

import csv
import json
import math
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from tests.pictures import drawn, pictures_left_out  # noqa: F401
from tests.states import rewrite_state
from tests.tiny_runs import vsa_command
from vsa.attention.kept_tiles import KeptTiles
from vsa.checkpoints.run_checkpoint import read_checkpoint, write_checkpoint
from vsa.config import build
from vsa.data.codecs import HaarCodec
from vsa.data.plan import split_ids
from vsa.data.toy_videos import captions_of, clip_attributes
from vsa.evaluation import evaluator as evaluation
from vsa.evaluation import follow
from vsa.evaluation.bars import Bar
from vsa.evaluation.evaluator import EvaluationSettings, Evaluator, validation_loss
from vsa.evaluation.video_metrics import psnr, ssim
from vsa.sampling.pipeline import generate, load_run
from vsa.training import train as run_module
from vsa.training.hydra_guard import composed

ROOT = Path(__file__).parents[2]
QUICK = ("--prompt", "a red circle", "--prompt", "a blue square", "--steps", "1", "--device", "cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, tiny_overrides: tuple[str, ...]) -> Path:
    """Folder of a run of 4 steps with a validation and a checkpoint every 2."""
    output = tmp_path_factory.mktemp("trained")
    prompts = "callbacks.samples.prompts=[a red circle,a blue square]"
    overrides = ["trainer.val_check_interval=2", "callbacks.samples.steps=1", "callbacks.samples.seed=3", prompts]
    run_module.train(composed(*tiny_overrides, *overrides, f"output_dir={output}"))
    return output / "pretrain" / "default"


@pytest.fixture
def tiny(write_tiny_run: Callable[..., Path], tmp_path: Path) -> Path:
    """Folder of a run with random weights, one checkpoint of step 7 and no data."""
    return write_tiny_run(tmp_path / "tiny")


def rows_of(path: Path) -> dict[int, dict[str, str]]:
    with open(path, newline="") as file:
        return {int(row["step"]): row for row in csv.DictReader(file)}


def evaluated(run: Path, *words: str, step: int = 7, out: Path | None = None) -> dict[str, Any]:
    """The record of a checkpoint that `vsa evaluate` writes."""
    vsa_command("evaluate", str(run), *words, *(() if out is None else ("--out", str(out))))
    return json.loads(((out or run / "evaluation") / f"step-{step:08}.json").read_text())


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {str(p): (p.stat().st_mtime_ns, p.read_bytes()) for p in folder.rglob("*") if p.is_file()}


def add_checkpoint(run: Path, step: int, *, scale: float = 1.0, max_steps: int | None = None) -> Path:
    """Write the newest checkpoint of a run again under another step, its weights scaled."""
    source = read_checkpoint(max((run / "checkpoints").glob("step-*")))
    groups = {name: {k: scale * t for k, t in source.tensors(name).items()} for name in ("model", "ema")}
    config = {**source.state["config"], **({} if max_steps is None else {"trainer": {"max_steps": max_steps}})}
    return write_checkpoint(run / "checkpoints", groups, {**source.state, "step": step, "config": config})


def change_state(run: Path, **changes: Any) -> None:
    for path in (run / "checkpoints").glob("step-*"):
        rewrite_state(path, **changes)


def test_validation_loss_is_the_runs_own_and_every_checkpoint_has_a_row(trained: Path, tmp_path: Path, drawn):  # noqa: F811
    before = contents(trained / "checkpoints")
    vsa_command("evaluate", str(trained), "--device", "cpu", "--out", str(tmp_path), "--batch-size", "3")
    assert contents(trained / "checkpoints") == before
    ours, metrics = rows_of(tmp_path / "evaluation.csv"), rows_of(trained / "metrics.csv")
    assert list(ours) == [2, 4]
    names = [name for name in metrics[2] if name == "val/loss" or name.startswith("val/loss_decile")]
    assert len(names) > 2
    for step, row in ours.items():
        for name in names:
            assert bool(row.get(name)) == bool(metrics[step][name]), name
            if metrics[step][name]:
                assert float(row[name]) == pytest.approx(float(metrics[step][name]), rel=1e-6), name
    # the tolerance tells checkpoints apart
    assert float(ours[2]["val/loss"]) != pytest.approx(float(ours[4]["val/loss"]), rel=1e-4)
    record = json.loads((tmp_path / "step-00000004.json").read_text())
    assert record["settings"]["prompts"] == ["a red circle", "a blue square"]
    assert (record["settings"]["steps"], record["settings"]["seed"]) == (1, 3)
    pictures = {f"step-0000000{n}.{kind}" for n in (2, 4) for kind in ("json", "png")}
    assert {p.name for p in tmp_path.iterdir()} == {"evaluation.csv", "evaluation.png", *pictures}
    for name in ("evaluation.png", "step-00000004.png"):
        assert Image.open(tmp_path / name).size[0] > 200


def test_validation_loss_depends_on_weights_seed_and_topk(trained: Path):
    path = trained / "checkpoints" / "step-00000004"
    state, run = read_checkpoint(path).state, load_run(path, device="cpu")
    loss = validation_loss(run, state, batch_size=16)["val/loss"]
    dense = build({**state["config"]["sparsity"], "sparsity": 0.0})
    others = [
        validation_loss(load_run(path, weights="model", device="cpu"), state, batch_size=16),
        validation_loss(run, {**state, "seed": state["seed"] + 1}, batch_size=16),
        validation_loss(replace(run, sparsity=dense), state, batch_size=16),
    ]
    for other in others:
        assert other["val/loss"] != pytest.approx(loss, rel=1e-5)


def test_a_run_without_prompts_and_averages_needs_no_options(training):
    training("callbacks.ema=null", "callbacks.samples.steps=2", "callbacks.samples.flow_shift=4", "trainer.max_steps=2")
    run = training.folder()
    # as the README says it for finetune_wan_1_3b, but for the bar
    record = evaluated(run, "--follow", "--min-psnr", "1", "--device", "cpu", step=2)
    assert record["sampling"]["weights"] == "model"
    assert [record["sampling"][name] for name in ("steps", "guidance", "flow_shift")] == [2, 1, 4]
    assert record["reference_sampling"]["flow_shift"] == 4
    prompts = record["settings"]["prompts"]
    assert len(set(prompts)) == len(prompts) == 4
    config = read_checkpoint(run / "checkpoints" / "step-00000002").state["config"]
    toy = build(config["data"]["toy"])
    _, val_ids = split_ids([f"toy-{toy.seed}-{i:08d}" for i in range(toy.count)], config["data"]["val_fraction"])
    captions = {captions_of(clip_attributes(toy.seed, int(name[-8:])))[0] for name in val_ids}
    assert set(prompts) <= captions
    assert 4 <= len(captions) < toy.count / 2
    # what is asked for goes before
    record = evaluated(run, "--device", "cpu", "--prompt", "a cat", "--shift", "2", "--no-val-loss", step=2)
    assert (record["settings"]["prompts"], record["sampling"]["flow_shift"]) == (["a cat"], 2)


def test_clips_are_compared_with_the_same_noise_run_dense(tiny: Path, tmp_path: Path):
    record = evaluated(tiny, *QUICK, "--no-val-loss", "--guidance", "2", "--seed", "5")
    run = load_run(tiny, device="cpu")
    prompts = ["a red circle", "a blue square"]
    common = {"seed": 5, "steps": 1, "guidance": 2.0}
    sparse = generate(run, prompts, run.settings(**common))
    dense = generate(run, prompts, run.settings(topk=8, **common))
    assert record["metrics"]["psnr"] == pytest.approx(psnr(sparse, dense), rel=1e-6)
    for i, clip in enumerate(record["clips"]):
        assert clip["psnr"] == pytest.approx(psnr(sparse[i], dense[i]), rel=1e-6)
        assert clip["ssim"] == pytest.approx(ssim(sparse[i], dense[i]), rel=1e-6)
    assert 5 < record["metrics"]["psnr"] < 60
    assert (record["sampling"]["topk"], record["reference_sampling"]["topk"]) == (2, 8)
    # other noise is no reference
    other = generate(run, prompts, run.settings(topk=8, **{**common, "seed": 6}))
    assert psnr(sparse, other) < record["metrics"]["psnr"] - 1


def test_equal_clips_are_infinite_in_json_csv_and_figure(tiny: Path, tiny_config):
    config = tiny_config()
    config["sparsity"]["sparsity"] = 0.0
    change_state(tiny, config=config)
    bars = ("--min-psnr", "200", "--min-ssim", "0.9999", "--max-flicker-excess", "0")
    record = evaluated(tiny, *QUICK, "--no-val-loss", *bars)
    assert record["metrics"]["psnr"] == "inf"
    assert record["metrics"]["ssim"] == pytest.approx(1, abs=1e-5)
    assert float(rows_of(tiny / "evaluation" / "evaluation.csv")[7]["psnr"]) == math.inf
    # again, from the record
    vsa_command("evaluate", str(tiny), *QUICK, "--no-val-loss", "--min-psnr", "200")


def test_a_secret_reaches_no_record(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    record = tiny / "evaluation" / "step-00000007.json"
    for secret in (None, "red circle"):
        if secret:
            monkeypatch.setenv("HF_TOKEN", secret)
            # an evaluation that stands is not done again
            record.unlink()
        vsa_command("evaluate", str(tiny), *QUICK, "--no-val-loss")
        assert ("red circle" in record.read_text()) == (secret is None)


def test_missed_bars_are_a_line_each_and_status_1(tiny: Path, command_line):
    bars = [
        "--min-psnr",
        "99",
        "--min-ssim",
        "0.9999",
        "--max-flicker",
        "0.0001",
        "--max-black",
        "1",
        "--min-motion",
        "0",
    ]
    status, out, err = command_line("evaluate", str(tiny), *QUICK, "--no-val-loss", *bars)
    assert status == 1
    lines = err.splitlines()
    assert [line.split()[1] for line in lines] == ["psnr", "ssim", "flicker"]
    values = rows_of(tiny / "evaluation" / "evaluation.csv")[7]
    assert lines[0] == f"error: psnr {float(values['psnr']):.6g} is below the required 99"
    assert lines[2] == f"error: flicker {float(values['flicker']):.6g} is above the allowed 0.0001"
    assert "step 7 misses a bar: ssim" in out
    # the same bars within reach
    bars = ["--min-psnr", "1", "--min-ssim", "-1", "--max-flicker", "1", "--max-black", "0", "--max-uniform", "0"]
    status, out, err = command_line("evaluate", str(tiny), *QUICK, "--no-val-loss", *bars)
    assert (status, err) == (0, "")


def test_the_newest_checkpoint_decides(tiny: Path, capsys):
    add_checkpoint(tiny, 9, scale=0.01)
    psnr_of = {}
    for step in (7, 9):
        vsa_command("evaluate", str(tiny), *QUICK, "--no-val-loss")
        psnr_of[step] = float(rows_of(tiny / "evaluation" / "evaluation.csv")[step]["psnr"])
    # weights near zero attend to everything alike
    # infinite where nothing differs
    bar = min((psnr_of[7] + psnr_of[9]) / 2, 1e6)
    assert psnr_of[7] < bar
    capsys.readouterr()
    vsa_command("evaluate", str(tiny), *QUICK, "--no-val-loss", "--min-psnr", str(bar))
    assert "step 7 misses a bar: psnr" in capsys.readouterr().out


def test_black_and_broken_clips_are_found(tiny: Path, command_line):
    black = HaarCodec().encode(torch.zeros(16, 64, 64, 3, dtype=torch.uint8)).mean((1, 2, 3))
    change_state(tiny, latent_mean=black.tolist(), latent_std=[1e-4] * 16)
    bars = ("--max-black", "0.5", "--max-uniform", "0.5")
    status, _, err = command_line("evaluate", str(tiny), *QUICK, "--no-val-loss", *bars)
    assert status == 1
    assert err.splitlines() == ["error: black 1 is above the allowed 0.5", "error: uniform 1 is above the allowed 0.5"]
    # no bar is needed for NaN
    add_checkpoint(tiny, 9, scale=1e30)
    status, _, err = command_line("evaluate", str(tiny), *QUICK, "--no-val-loss")
    assert (status, err) == (1, "error: non_finite 1 is above the allowed 0\n")


def test_nan_misses_every_bar():
    for least in (True, False):
        assert Bar(metric="x", bound=1, least=least).missed({"x": math.nan}) is not None
        assert Bar(metric="x", bound=1, least=least).missed({"x": 1.0}) is None
        assert Bar(metric="x", bound=1, least=least).missed({"x": "nan"}) is not None
        assert Bar(metric="x", bound=math.nan, least=least).missed({"x": 1.0}) is not None
        assert Bar(metric="x", bound=1, least=least).missed({"y": 1.0}) == "x is missing (not measured)"


def test_a_second_evaluation_takes_what_is_there_and_replaces_what_is_not(tiny: Path, monkeypatch: pytest.MonkeyPatch):
    add_checkpoint(tiny, 9, scale=0.5)
    calls = []
    sample = evaluation.sample_clips
    monkeypatch.setattr(evaluation, "sample_clips", lambda *args: (calls.append(args[0].step), sample(*args))[1])
    command = [str(tiny), *QUICK, "--no-val-loss"]
    vsa_command("evaluate", *command)
    first = (tiny / "evaluation" / "evaluation.csv").read_text()
    assert calls == [7, 7, 9, 9]
    vsa_command("evaluate", *command)
    assert calls == [7, 7, 9, 9]
    assert (tiny / "evaluation" / "evaluation.csv").read_text() == first
    # the run has removed step 7: its row stays; other settings replace the row of step 9
    shutil.rmtree(tiny / "checkpoints" / "step-00000007")
    vsa_command("evaluate", *command, "--seed", "1")
    rows = rows_of(tiny / "evaluation" / "evaluation.csv")
    old = {int(line.split(",")[0]): line for line in first.splitlines()[1:]}
    assert list(rows) == [7, 9]
    assert ",".join(rows[7].values()) == old[7]
    assert rows[9]["settings"] != rows[7]["settings"]
    assert rows[9]["psnr"] not in old[9]
    # other weights under the same step
    calls.clear()
    add_checkpoint(tiny, 9, scale=0.7)
    vsa_command("evaluate", *command, "--seed", "1")
    assert calls == [9, 9]


def test_another_run_as_reference(tiny: Path, write_tiny_run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    dense = write_tiny_run(tmp_path / "dense", attention="full")
    add_checkpoint(tiny, 9, scale=0.5)
    sources = []
    sample = evaluation.sample_clips
    monkeypatch.setattr(evaluation, "sample_clips", lambda *args: (sources.append(args[0].source), sample(*args))[1])
    vsa_command("evaluate", str(tiny), *QUICK, "--no-val-loss", "--reference", str(dense))
    assert [Path(source).parents[1].name for source in sources] == ["tiny", "dense", "tiny"]
    record = json.loads((tiny / "evaluation" / "step-00000009.json").read_text())
    assert record["reference_sampling"]["checkpoint"].startswith(str(dense))
    run, other = load_run(tiny, device="cpu"), load_run(dense, device="cpu")
    settings = run.settings(steps=1)
    prompts = ["a red circle", "a blue square"]
    expected = psnr(generate(run, prompts, settings), generate(other, prompts, replace(settings, topk=KeptTiles.of(1))))
    assert record["metrics"]["psnr"] == pytest.approx(expected, rel=1e-6)
    # a run against itself
    vsa_command("evaluate", str(dense), *QUICK, "--no-val-loss", "--reference", str(dense), "--min-psnr", "500")

    checkpoint = read_checkpoint(tiny / "checkpoints" / "step-00000009")
    settings = EvaluationSettings(prompts=("x",), steps=1, val_loss=False, reference="other")
    with pytest.raises(ValueError, match=r"has codec haar-4x8x8-c8, .* has haar-4x8x8-c16"):
        Evaluator(settings, reference=replace(other, codec=HaarCodec(8)))(run, checkpoint)


STEPS = (1000.0, 757.0, 522.0)
PROMPTS = ["a red circle", "a blue square"]
AT_ITS_LIST = ("--prompt", PROMPTS[0], "--prompt", PROMPTS[1], "--device", "cpu", "--no-val-loss")


def test_a_distilled_run_is_compared_with_itself_dense_at_its_step_list(write_tiny_run, tiny_config, tmp_path: Path):
    # what the config says of clips is how the teacher's are sampled
    samples = {"steps": 7, "guidance": 2.5, "flow_shift": 4.0, "seed": 3}
    config = {**tiny_config(), "callbacks": {"samples": samples}}
    few = write_tiny_run(tmp_path / "few", config=config, step_list=STEPS)
    record = evaluated(few, *AT_ITS_LIST)
    for name in ("sampling", "reference_sampling"):
        settings = [record[name][key] for key in ("steps", "step_list", "guidance", "flow_shift", "seed")]
        assert settings == [3, list(STEPS), 1, 1, 3], name
    assert (record["sampling"]["topk"], record["reference_sampling"]["topk"]) == (2, 8)
    run = load_run(few, device="cpu")
    sparse, dense = (generate(run, PROMPTS, run.settings(seed=3, topk=topk)) for topk in (2, 8))
    assert record["metrics"]["psnr"] == pytest.approx(psnr(sparse, dense), rel=1e-6)
    # control: Euler steps of the same weights are another clip
    many = replace(run, step_list=None)
    euler = generate(many, PROMPTS, many.settings(seed=3, steps=3, guidance=1.0, flow_shift=1.0))
    assert psnr(sparse, euler) < record["metrics"]["psnr"] - 1
    record = evaluated(few, *AT_ITS_LIST, "--guidance", "2", out=tmp_path / "guided")
    assert (record["sampling"]["guidance"], record["reference_sampling"]["guidance"]) == (2, 2)


def test_each_run_keeps_its_own_way_of_sampling_when_one_has_a_step_list(write_tiny_run, tiny_config, tmp_path: Path):
    config = {**tiny_config(), "callbacks": {"samples": {"steps": 5, "guidance": 2.0}}}
    few = write_tiny_run(tmp_path / "few", step_list=STEPS)
    many = write_tiny_run(tmp_path / "many", config=config)
    ways = {"few": (3, list(STEPS), 1, 1), "many": (5, None, 2, 3)}
    runs = {"few": load_run(few, device="cpu"), "many": load_run(many, device="cpu")}
    clips = {name: generate(run, PROMPTS, run.settings()) for name, run in runs.items()}
    for name, reference in (("few", many), ("many", few)):
        record = evaluated(tmp_path / name, *AT_ITS_LIST, "--reference", str(reference))
        for part, whose in (("sampling", name), ("reference_sampling", reference.name)):
            way = tuple(record[part][key] for key in ("steps", "step_list", "guidance", "flow_shift"))
            assert way == ways[whose], part
        assert record["metrics"]["psnr"] == pytest.approx(psnr(clips["few"], clips["many"]), rel=1e-6)


def test_progress_of_an_evaluation_reaches_its_total(write_tiny_run, tmp_path: Path):
    few = load_run(write_tiny_run(tmp_path / "few", step_list=STEPS), device="cpu")
    many = load_run(write_tiny_run(tmp_path / "many"), device="cpu")
    for run, reference, total in ((few, None, 12), (few, many, 2 * (3 + 32)), (many, few, 2 * (2 + 3))):
        steps, name = None if run is few else 2, "dense" if reference is None else "other"
        settings = EvaluationSettings(
            prompts=tuple(PROMPTS), steps=steps, guidance=None, val_loss=False, reference=name
        )
        evaluator, steps = Evaluator(settings, reference=reference), []
        assert evaluator.clip_steps(run) == total
        evaluator(run, read_checkpoint(Path(run.source)), steps.append)
        assert sum(steps) == total


def test_what_has_no_meaning_for_a_distilled_run_is_one_line(write_tiny_run, command_line, tmp_path: Path):
    few = write_tiny_run(tmp_path / "few", step_list=STEPS)
    source = few / "checkpoints" / "step-00000007"
    for option, name in (("--steps", "steps 8"), ("--shift", "flow_shift 8.0")):
        status, _, err = command_line("evaluate", str(few), *AT_ITS_LIST, option, "8")
        expected = f"error: {name} does not apply to {source}: it is distilled to the timesteps {list(STEPS)}\n"
        assert (status, err) == (1, expected)
    # the objective of a tiny run is none of data, like that of a distillation
    status, _, err = command_line("evaluate", str(few), *AT_ITS_LIST[:-1])
    expected = f"error: {source} was trained on dict, which has no validation loss: use --no-val-loss\n"
    assert (status, err) == (1, expected)
    assert not (few / "evaluation").exists()


# following


def test_following_takes_new_checkpoints_and_only_whole_ones(tiny: Path, tmp_path: Path, monkeypatch):
    # binary fractions, whose sums are exact
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr(follow, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    folder = tiny / "checkpoints"
    checkpoints = follow.new_checkpoints(folder, follow=True, poll=0.25, timeout=4)
    assert next(checkpoints).name == "step-00000007"
    # half-written, then whole
    shutil.copytree(folder / "step-00000007", folder / ".writing-step-00000008")
    add_checkpoint(tiny, 9)
    add_checkpoint(tiny, 12)
    assert next(checkpoints).name == "step-00000009"
    # removed before it was looked at
    shutil.rmtree(folder / "step-00000012")
    add_checkpoint(tiny, 13)
    assert next(checkpoints).name == "step-00000013"
    # the same step of a run that started anew; what is still there keeps its inode
    (folder / "step-00000013").rename(tmp_path / "before")
    add_checkpoint(tiny, 13, scale=0.5)
    assert next(checkpoints).name == "step-00000013"
    # nothing was waited for yet, and looked for before the first wait
    assert now == [0]
    assert list(checkpoints) == []
    assert now == [4]
    assert list(follow.new_checkpoints(folder / "missing", follow=False)) == []


def test_damaged_and_removed_checkpoints_are_skipped(tiny: Path, capsys, monkeypatch: pytest.MonkeyPatch):
    add_checkpoint(tiny, 8)
    add_checkpoint(tiny, 9)
    ema = tiny / "checkpoints" / "step-00000007" / "ema.safetensors"
    ema.write_bytes(ema.read_bytes()[:-1] + b"\x01")
    load = follow.load_run

    def removed_meanwhile(path: Path, **options: Any):
        if path.name == "step-00000008":
            shutil.rmtree(path)
        return load(path, **options)

    monkeypatch.setattr(follow, "load_run", removed_meanwhile)
    vsa_command("evaluate", str(tiny), *QUICK, "--no-val-loss")
    out = capsys.readouterr().out
    assert "step-00000007: skipped, checkpoint" in out
    assert "ema.safetensors does not match its digest" in out
    assert "step-00000008: skipped, the run has removed it" in out
    assert list(rows_of(tiny / "evaluation" / "evaluation.csv")) == [9]
    assert follow.open_checkpoint(tiny / "checkpoints" / "step-00000008") is None
    assert "step-00000008: skipped, the run has removed it" in capsys.readouterr().out


def test_following_waits_for_a_run_to_start_and_ends_with_its_last_step(tiny: Path, tmp_path: Path, capsys):
    live = tmp_path / "live"
    live.mkdir()
    (live / "config.yaml").write_text("")

    def write() -> None:
        (live / "checkpoints").mkdir()
        for step in (2, 4):
            time.sleep(0.3)
            checkpoint = add_checkpoint(tiny, step, max_steps=4)
            # as a run publishes them: a rename
            checkpoint.rename(live / "checkpoints" / checkpoint.name)

    writer = threading.Thread(target=write)
    writer.start()
    vsa_command("evaluate", str(live), *QUICK, "--no-val-loss", "--follow", "--poll", "0.05", "--timeout", "60")
    writer.join()
    assert list(rows_of(live / "evaluation" / "evaluation.csv")) == [2, 4]
    assert "step 4: psnr" in capsys.readouterr().out


def test_following_ends_when_nothing_comes_and_ctrl_c_is_one_line(
    tiny: Path, command_line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    command = ("evaluate", str(tiny), *QUICK, "--no-val-loss", "--follow", "--poll", "0.05")
    status, _, err = command_line(*command, "--timeout", "0.1")
    assert (status, err) == (0, "")
    (tmp_path / "config.yaml").write_text("")
    status, _, err = command_line("evaluate", str(tmp_path), *QUICK, "--follow", "--timeout", "0.1")
    assert (status, err) == (1, f"error: no checkpoint in {tmp_path / 'checkpoints'} could be evaluated\n")

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(time, "sleep", interrupt)
    status, _, err = command_line(*command)
    assert (status, err) == (130, "interrupted\n")
    assert not [p for p in (tiny / "evaluation").iterdir() if p.name.startswith(".")]


# bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--no-val-loss"],
            "no prompts: the run has neither prompts nor held-out captions, set --prompt or --prompts",
        ),
        ([*QUICK, "--reference", "nowhere"], "no such checkpoint or run folder: nowhere"),
        ([*QUICK, "--reference", "none", "--min-psnr", "20"], "--min-psnr 20 needs a reference, got --reference none"),
        ([*QUICK, "--reference", "none", "--lpips", "x"], "--lpips x needs a reference, got --reference none"),
        ([*QUICK, "--max-lpips", "0.5"], "--max-lpips 0.5 needs --lpips FOLDER"),
        ([*QUICK, "--no-val-loss", "--max-val-loss", "1"], "--max-val-loss 1 is of no use with --no-val-loss"),
        ([*QUICK, "--lpips", "missing"], "LPIPS needs one file alexnet-*.pth in missing, got 0"),
    ],
)
def test_bad_input_is_one_line_and_status_1(tiny_run_dir: Path, command_line, arguments: list[str], message: str):
    status, _, err = command_line("evaluate", str(tiny_run_dir), *arguments)
    assert (status, err) == (1, f"error: {message}\n")
    assert not (tiny_run_dir / "evaluation").exists()


def test_runs_that_cannot_be_evaluated(write_tiny_run, trained: Path, command_line, tmp_path: Path):
    def error(*arguments: str) -> str:
        status, _, err = command_line("evaluate", *arguments)
        assert status == 1
        assert err.count("\n") == 1
        return err

    assert f"error: {tmp_path} is not a run folder: it has no checkpoints" in error(str(tmp_path), *QUICK)
    dense = write_tiny_run(tmp_path / "dense", attention="full")
    message = "has dense attention, so the dense reference is the run itself: set --reference RUN_FOLDER or"
    assert message in error(str(dense), *QUICK, "--no-val-loss")
    plain = write_tiny_run(tmp_path / "plain", with_ema=False)
    assert "step-00000007 has no ema weights" in error(str(plain), *QUICK, "--no-val-loss", "--weights", "ema")
    # a config is checked before anything of it is built for its captions
    config = read_checkpoint(trained / "checkpoints" / "step-00000004").state["config"]
    evil = {"_target_": "os.system", "command": f"touch {tmp_path / 'owned'}"}
    change_state(plain, config={**config, "data": evil, "callbacks": {}})
    assert "data=os.system is not allowed" in error(str(plain)).replace("._target_", "")
    assert not (tmp_path / "owned").exists()
    # nothing held out
    copy = shutil.copytree(trained, tmp_path / "copy")
    change_state(copy, config={**config, "data": {**config["data"], "val_fraction": 0.0}})
    assert "have no validation samples: use --no-val-loss" in error(str(copy), "--device", "cpu")
