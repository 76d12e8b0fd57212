"""Clips that a distillation makes of itself: student, average and teacher, each what its weights say."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from PIL import Image

import vsa.training.callbacks.samples as samples_module
from tests.pictures import pictures_left_out  # noqa: F401
from tests.tiny_runs import TinyTraining
from tests.training.ranks import run_ranks
from vsa.evaluation.figures import logged_metrics
from vsa.sampling.clip_folder import sample_run
from vsa.sampling.contact_sheet import side_by_side
from vsa.sampling.pipeline import generate, load_run
from vsa.training.callbacks.samples import ClipSet
from vsa.training.modules.distill import DistillModule

PROMPTS = ["a red circle moving left slowly", "a blue square moving up quickly"]
STEPS = ("step-00000001", "step-00000002")
CLIPS = (
    f"callbacks.samples.prompts=[{','.join(PROMPTS)}]",
    "callbacks.samples.every_n_steps=1",
    "callbacks.samples.steps=2",
    "callbacks.samples.guidance=2",
    "callbacks.samples.flow_shift=4",
    "callbacks.samples.seed=5",
)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run folder of the teacher, whose checkpoint is of step 4."""
    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("teacher"), patch)
        training("attention=full", "~attention.tile_thw", "run=dense")
    return training.folder("dense")


def distillation(teacher: Path, *overrides: str) -> tuple[str, ...]:
    return (
        "task=distill",
        f"init_from={teacher}",
        "attention.gate_init=identity",
        "task.generator_every=1",
        "trainer.max_steps=2",
        "callbacks.checkpoint.every_n_steps=1",
        # an average far from the weights
        "callbacks.ema.decay=0.5",
        "callbacks.ema.warmup=false",
        *overrides,
    )


class CountTeacher(L.Callback):
    """Counts the teacher's forwards."""

    def __init__(self):
        self.forwards = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        pl_module.teacher.network.register_forward_hook(self._count)

    def _count(self, network, inputs, output):
        assert not network.training
        self.forwards += 1


def recorded(patch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    """Clips as they are handed to `write_clips`, by the last two parts of their folder; written twice is an error."""
    clips: dict[str, torch.Tensor] = {}
    write = samples_module.write_clips

    def keep(folder: Path, prompts, videos, record, **how):
        name = f"{folder.parent.name}/{folder.name}"
        assert name not in clips
        clips[name] = videos
        write(folder, prompts, videos, record, **how)

    patch.setattr(samples_module, "write_clips", keep)
    return clips


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, torch.Tensor]:
    return recorded(monkeypatch)


@pytest.fixture(scope="module")
def sampled(dense: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TinyTraining, dict, CountTeacher]:
    """A distillation that samples after both of its steps, its clips and the forwards of its teacher.

    Its pictures are drawn, those of the runs of single tests are not.
    """
    training, counter = TinyTraining(tmp_path_factory.mktemp("sampled"), pytest.MonkeyPatch()), CountTeacher()
    with pytest.MonkeyPatch.context() as patch:
        clips = recorded(patch)
        training(*distillation(dense, *CLIPS, "run=d"), callbacks=(counter,))
    return training, clips, counter


def record_of(folder: Path) -> dict:
    return json.loads((folder / "samples.json").read_text())


def few_step_clips(run: Path, weights: str, **how) -> torch.Tensor:
    loaded_run = load_run(run, weights=weights, device="cpu")  # type: ignore[arg-type]
    return generate(loaded_run, PROMPTS, loaded_run.settings(seed=5, **how))


@pytest.mark.slow
def test_student_average_and_teacher_are_sampled_as_their_checkpoints_are(training, dense, sampled):
    runs, clips, counter = sampled
    folder = runs.folder("d")
    assert sorted(p.name for p in (folder / "samples").iterdir()) == [*STEPS, "teacher"]
    assert set(clips) == {"samples/teacher", *(f"{step}/{name}" for step in STEPS for name in ("student", "ema"))}
    for step in STEPS:
        assert {p.name for p in (folder / "samples" / step).iterdir()} == {"student", "ema", "side_by_side.png"}
        picture = Image.open(folder / "samples" / step / "side_by_side.png").convert("L")
        # three columns of three frames, two rows
        assert 3 * picture.height < picture.width < 1500
        assert np.asarray(picture).std() > 1
        own = {w: few_step_clips(folder / "checkpoints" / step, w) for w in ("model", "ema")}
        assert torch.equal(clips[f"{step}/student"], own["model"])
        assert torch.equal(clips[f"{step}/ema"], own["ema"])
        assert not torch.equal(own["model"], own["ema"])
        for name, weights in (("student", "model"), ("ema", "ema")):
            record = record_of(folder / "samples" / step / name)
            assert (record["step"], record["weights"]) == (int(step[-8:]), weights)
            assert (record["steps"], record["guidance"], record["topk"], record["num_tiles"]) == (3, 1, 4, 8)
            assert record["step_list"] == [1000, 757, 522]
    # the average that the teacher starts from, sampled by hand
    ema_run, model_run = (load_run(dense, weights=weights, device="cpu") for weights in ("ema", "model"))
    how = {"seed": 5, "steps": 2, "guidance": 2.0, "flow_shift": 4.0}
    expected = generate(ema_run, PROMPTS, ema_run.settings(**how))
    assert torch.equal(clips["samples/teacher"], expected)
    record = record_of(folder / "samples" / "teacher")
    assert (record["steps"], record["guidance"], record["flow_shift"], record["step_list"]) == (2, 2, 4, None)
    assert (record["checkpoint"], record["sparsity"]) == (ema_run.source, 0)
    assert "step" not in record
    # controls: another seed, the trained weights, another shift
    assert not torch.equal(expected, generate(ema_run, PROMPTS, ema_run.settings(**{**how, "seed": 6})))
    assert not torch.equal(expected, generate(model_run, PROMPTS, model_run.settings(**how)))
    assert not torch.equal(expected, generate(ema_run, PROMPTS, ema_run.settings(**{**how, "flow_shift": 1.0})))
    assert {"attention.png", "loss.png"} <= {p.name for p in folder.iterdir()}
    # what a distillation ends with is there; it did not validate
    assert list(logged_metrics(folder / "metrics.csv", DistillModule.headline)) == ["fake_score/loss", "dmd/gap"]
    # sampling leaves training alone and asks the teacher once: one forward of both halves a step
    silent = CountTeacher()
    training(*distillation(dense, "run=silent"), callbacks=(silent,))
    assert counter.forwards == silent.forwards + 2
    a, b = runs.tensors("d"), training.tensors("silent")
    assert set(a) == set(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_teacher_is_sampled_once_more_after_a_resume_and_says_the_same(training, dense, made, sampled):
    runs, before, _ = sampled
    half, counter = runs.folder("d") / "checkpoints" / STEPS[0], CountTeacher()
    training(*distillation(dense, *CLIPS, f"ckpt_path={half}"), callbacks=(counter,))
    assert set(made) == {"samples/teacher", *(f"{STEPS[1]}/{name}" for name in ("student", "ema"))}
    assert all(torch.equal(clips, before[name]) for name, clips in made.items())
    # the resumed step holds an update of the generator, guided: two forwards
    assert counter.forwards == 2 + 2


def test_points_of_the_schedule_are_the_students(training, dense, made):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    points = ("callbacks.samples.sparsity=[current,dense]", "callbacks.samples.every_n_steps=0")
    ends = ("run=d", "callbacks.ema=null", "trainer.max_steps=1", "logger=tensorboard")
    # a teacher that could select
    sparse_teacher = "task.real_score_attention=${attention}"
    training(*distillation(dense, *CLIPS, *points, *ends, sparse_teacher))
    folder = training.folder("d")
    assert sorted(p.name for p in (folder / "samples").iterdir()) == [STEPS[0], "teacher"]
    assert sorted(p.name for p in (folder / "samples" / STEPS[0]).iterdir()) == ["side_by_side.png", "student"]
    assert set(made) == {"samples/teacher", "student/current", "student/dense"}
    sparse, whole = (few_step_clips(folder, "model", at=at) for at in ("current", "dense"))
    assert torch.equal(made["student/current"], sparse)
    assert torch.equal(made["student/dense"], whole)
    assert not torch.equal(sparse, whole)
    record = record_of(folder / "samples" / "teacher")
    assert (record["topk"], record["num_tiles"]) == (8, 8)
    # tensorboard has the same GIFs, and the picture
    sizes = {events.IMAGES: 0}
    accumulator = events.EventAccumulator(str(folder / "tensorboard"), size_guidance=sizes).Reload()
    files = {f"samples/{name}": folder / "samples" / STEPS[0] / name for name in ("student/current", "student/dense")}
    files["samples/teacher"] = folder / "samples" / "teacher"
    tags = {f"{tag}/{gif.stem}": gif for tag, where in files.items() for gif in where.glob("*.gif")}
    assert len(tags) == 3 * len(PROMPTS)
    assert set(accumulator.Tags()["images"]) == {*tags, "samples/side_by_side"}
    for tag, gif in tags.items():
        (event,) = accumulator.Images(tag)
        assert (event.step, event.height, event.width) == (1, 64, 64)
        assert event.encoded_image_string == gif.read_bytes()


@pytest.mark.slow
def test_sharded_networks_are_sampled_as_whole_ones(training, dense, made):
    run = distillation(dense, *CLIPS, "trainer.max_steps=1")
    training(*run, "run=one")
    one = {name: made.pop(name).int() for name in sorted(made)}

    def on_rank(rank: int) -> dict[str, np.ndarray]:
        training(*run, "trainer=fsdp", "trainer.accelerator=cpu", "run=two")
        return {name: made[name].numpy() for name in sorted(made)}

    first, second = run_ranks(2, on_rank)
    # one writes
    assert second == {}
    assert list(first) == list(one) == ["samples/teacher", f"{STEPS[0]}/ema", f"{STEPS[0]}/student"]
    # sums of another order end a level of colour apart
    apart = {name: (one[name] - torch.from_numpy(first[name])).abs().max().item() for name in one}
    assert max(apart.values()) <= 1
    # control: the networks are further apart
    teacher, ema, student = one.values()
    assert min((a - b).abs().max() for a, b in ((teacher, ema), (ema, student), (student, teacher))) > 1
    step = training.folder("two") / "samples" / STEPS[0]
    assert (step / "side_by_side.png").exists()


def test_an_interrupted_distillation_samples_nothing(training, dense, made):
    class Stop(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if trainer.global_step == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    late = ("callbacks.samples.every_n_steps=3", "callbacks.checkpoint.every_n_steps=3", "trainer.max_steps=3")
    with pytest.raises(SystemExit):
        training(*distillation(dense, *CLIPS, *late, "run=d"), callbacks=(Stop(),))
    assert training.last("d").step == 2
    assert not made
    assert not (training.folder("d") / "samples").exists()


OWN = ("callbacks.samples.prompts=null", "callbacks.samples.steps=1", "trainer.max_steps=1", "data.val_fraction=0.4")


def test_a_run_without_prompts_samples_captions_of_its_held_out_clips(training, made):
    trainer = training(*OWN)
    (folder,) = (training.folder() / "samples").iterdir()
    data: Any = trainer.datamodule
    captions = {data.store.text(ref, 0)[0] for refs in data._opened[2].values() for ref in refs}
    prompts = [clip["prompt"] for clip in record_of(folder)["clips"]]
    assert len(set(prompts)) == 4
    assert set(prompts) < captions
    # the same for every rank and in every start
    assert data.held_out_captions(4) == tuple(prompts)
    assert len(data.held_out_captions(1000)) == len(captions)
    # they are of this task's data, and none are wanted here
    training(*OWN, "callbacks.samples.prompts=[]", "run=silent")
    assert not (training.folder("silent") / "samples").exists()
    assert training.losses() == training.losses("silent")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [(("data.val_fraction=0",), "no clip is held out"), (("distill",), "callbacks.samples.flow_shift=null")],
    ids=["nothing held out", "teacher without a shift"],
)
def test_a_run_that_can_sample_nothing_says_how_to(training, dense, made, monkeypatch, overrides, why):
    messages = []
    monkeypatch.setattr(samples_module, "rank_zero_info", messages.append)
    if overrides == ("distill",):
        overrides = distillation(dense, "trainer.max_steps=1")
    training(*OWN, *overrides)
    assert messages == [f"no clips will be sampled ({why}): name captions with callbacks.samples.prompts=[...]"]
    assert not made


def test_titles_name_steps_guidance_and_tiles():
    def title(name: str, **record) -> str:
        plain = {"steps": 3, "guidance": 1.0, "topk": 7, "num_tiles": 32}
        return ClipSet(name=name, videos=torch.empty(0), record={**plain, **record}).title

    assert title("student") == "student, 3 steps, top 7 of 32"
    assert title("ema/target", topk=(7, 8), steps=1) == "ema, target, 1 step, top 7.5 of 32"
    assert title("teacher", steps=50, guidance=4.5, topk=32) == "teacher, 50 steps, guidance 4.5"
    # dense attention is one tile, whatever the schedule says
    assert title("student", num_tiles=1) == "student, 3 steps"


def test_side_by_side_has_a_row_per_prompt_and_a_column_per_set(tmp_path: Path):
    def clips(*colours: tuple[int, int, int]) -> torch.Tensor:
        return torch.tensor(colours, dtype=torch.uint8)[:, None, None, None].expand(-1, 5, 16, 24, 3)

    columns = {"left": clips((250, 0, 0), (0, 250, 0)), "right": clips((0, 0, 250), (250, 250, 0))}
    path = side_by_side(columns, PROMPTS, tmp_path / "new" / "picture.png", title="run")
    pixels = np.asarray(Image.open(path).convert("RGB")).astype(int)
    centres = {
        colour: np.argwhere((np.abs(pixels - np.array(colour)) < 8).all(-1)).mean(0)
        for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250), (250, 250, 0))
    }
    red, green, blue, yellow = centres.values()
    # rows, then columns
    assert (red[0], green[0]) == pytest.approx((blue[0], yellow[0]), abs=2)
    assert (red[1], blue[1]) == pytest.approx((green[1], yellow[1]), abs=2)
    assert red[0] < green[0]
    assert red[1] < blue[1]
    with pytest.raises(ValueError, match="one clip per prompt in every column, got 1 prompts and"):
        side_by_side(columns, PROMPTS[:1], tmp_path / "other.png")
    with pytest.raises(ValueError, match="columns must have the same shape"):
        side_by_side({**columns, "long": columns["left"][:, :4]}, PROMPTS, tmp_path / "o.png")
    assert [p.name for p in tmp_path.iterdir()] == ["new"]


def test_clips_are_shown_at_the_rate_of_the_data(training, tmp_path, capsys):
    prompts = ("trainer.max_steps=2", "callbacks.samples.steps=1", "callbacks.samples.prompts=[a red circle]")
    training(*prompts, "data.toy.fps=24", "run=fast")
    training(*prompts, "data.toy.fps=24", "callbacks.samples.fps=5", "run=own")
    for run, fps in (("fast", 24), ("own", 5)):
        folder = training.folder(run)
        assert record_of(folder / "samples" / "step-00000002")["fps"] == fps
        long_prompt = " ".join(["word"] * 20)
        out = sample_run(folder, [long_prompt], out=tmp_path / run, steps=1, device="cpu")
        assert record_of(out)["fps"] == fps
        assert "1 of 1 captions are cut after 16 tokens and lose 4 in the mean" in capsys.readouterr().out


@pytest.mark.parametrize("attention", ["video_sparse", "sla"])
def test_later_clips_are_computed_as_those_of_the_training(training, made, monkeypatch, attention):
    training(f"attention={attention}", "attention.tile_thw=[2,2,2]", "task.parallel.compute_dtype=bfloat16", *CLIPS)
    (videos,) = (clips for name, clips in made.items() if name.endswith("step-00000004"))
    assert torch.equal(few_step_clips(training.folder(), "ema"), videos)
    assert {x.dtype for x in load_run(training.folder(), device="cpu").model.parameters()} == {torch.bfloat16}
    out = sample_run(training.folder(), PROMPTS, steps=1, device="cpu")
    for clips in (training.folder() / "samples" / "step-00000004", out):
        assert record_of(clips)["compute_dtype"] == "bfloat16"
    # control: in the dtype of the stored weights
    monkeypatch.setattr("vsa.sampling.pipeline.rounds_to", lambda setting, device_type: None)
    assert not torch.equal(few_step_clips(training.folder(), "ema"), videos)


def test_a_trained_run_continues_a_picture(training, tmp_path):
    training("trainer.max_steps=2", "task.objective.first_frame=0.5")
    colour = np.full((50, 80, 3), (200, 40, 40), np.uint8)
    Image.fromarray(colour).save(tmp_path / "red.png")
    options = {"steps": 1, "device": "cpu", "first_frame": [tmp_path / "red.png"]}
    out = sample_run(training.folder(), PROMPTS, out=tmp_path / "clips", **options)
    assert record_of(out)["first_frame"] == [str(tmp_path / "red.png")]
    with Image.open(sorted(out.glob("*.gif"))[0]) as clip:
        # colours of a GIF are rounded
        assert np.abs(np.asarray(clip.convert("RGB"), int) - colour[0, 0]).max() < 20
    options["first_frame"] *= 2
    with pytest.raises(ValueError, match="--first-frame once or once for each of 3 prompts, got 2"):
        sample_run(training.folder(), [*PROMPTS, "x"], out=tmp_path / "more", **options)
