"""`vsa latents`: a teacher's samples as a data set, whoever wrote which part of it."""

from __future__ import annotations

import json
import shutil
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch

import vsa.errors
import vsa.sampling.latents as library
from tests.commands import run_command
from tests.data.tiny_wan import make_transformer, save_pipeline
from tests.tiny_runs import make_config, write_run
from vsa.checkpoints.sparse_config import SparseAttentionConfig, write_sparse_config
from vsa.cli.latents import latents
from vsa.data.plan import hash64
from vsa.data.shards import LatentReader
from vsa.diffusion.flow_matching import noise_like
from vsa.sampling.pipeline import load_run, sample_latents

PROMPTS = ("a red circle moving left", "a blue square moving up", "a cat")


def generate(*words: Any) -> None:
    run_command(latents, *words)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.txt"
    path.write_text("\n\n".join(PROMPTS) + "\n")
    return path


@pytest.fixture(scope="module")
def common(run_folder: Path, prompts: Path) -> list[str]:
    options = "--clips-per-prompt 2 --steps 2 --guidance 2 --shift 3 --seed 5 --device cpu --samples-per-shard 2"
    return [str(run_folder), str(prompts), *options.split(), "--batch-size", "2"]


@pytest.fixture(scope="module")
def straight(common: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("straight") / "out"
    generate(*common[:2], str(out), *common[2:])
    return out


def files_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_samples_are_the_teachers(straight: Path, run_folder: Path) -> None:
    reader = LatentReader(straight)
    reader.verify()
    run = load_run(run_folder, device="cpu")
    settings = run.settings(steps=2, guidance=2, flow_shift=3)
    assert list(reader.index.samples) == [f"gen-{n:07d}-{i:03d}" for n in range(3) for i in range(2)]
    for n, prompt in enumerate(PROMPTS):
        for i in range(2):
            seeds = torch.tensor([hash64(5, "generate", prompt, i) >> 1])
            normal = sample_latents(run.model, run.text_encoder, [prompt], seeds, settings)[0]
            expected = normal * run.latent_std.view(-1, 1, 1, 1) + run.latent_mean.view(-1, 1, 1, 1)
            actual = reader.latent(f"gen-{n:07d}-{i:03d}")
            assert actual.shape == settings.latent_shape
            torch.testing.assert_close(actual, expected, atol=2e-3, rtol=2e-3)
            # control: normalised ones are far from it
            assert (actual - normal).abs().max() > 0.1
            caption, tokens = reader.text(f"gen-{n:07d}-{i:03d}", 0)
            assert caption == prompt
            assert torch.equal(tokens, run.text_encoder.encode(prompt))
    first, second = reader.latent("gen-0000000-000"), reader.latent("gen-0000000-001")
    assert (first - second).abs().max() > 0.1


@pytest.mark.parametrize("world", [2, 4])
def test_the_number_of_processes_changes_nothing(
    common: list[str], straight: Path, tmp_path: Path, world: int, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*common[:2], str(tmp_path / "out"), *common[2:]]
    for rank in range(world):
        generate(*arguments, "--rank", str(rank), "--world-size", str(world))
    assert "run the command once more without --rank" in capsys.readouterr().out
    generate(*arguments)
    assert "6 samples in" in capsys.readouterr().out
    assert files_of(tmp_path / "out") == files_of(straight)


def test_interrupted_and_repeated_equals_straight(
    common: list[str], straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [*common[:2], str(tmp_path / "out"), *common[2:]]
    sample, calls = library.RunTeacher.sample, []

    def interrupt_third(self: Any, prompts: Any, seeds: Any) -> Any:
        calls.append(len(prompts))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return sample(self, prompts, seeds)

    monkeypatch.setattr(library.RunTeacher, "sample", interrupt_third)
    with pytest.raises(KeyboardInterrupt):
        generate(*arguments)
    refusals = [
        (["--seed", "6"], "started with seed 5, got 6"),
        (["--guidance", "3"], r"started with guidance 2\.0, got 3\.0"),
        (["--topk", "5"], "started with .* got"),
        (["--weights", "model"], "started with weights ema, got model"),
    ]
    for change, message in refusals:
        with pytest.raises(ValueError, match=message):
            generate(*arguments, *change)
    generate(*arguments)
    # two of three parts were kept
    assert len(calls) == 4
    assert files_of(tmp_path / "out") == files_of(straight)
    with pytest.raises(ValueError, match="already holds a data set"):
        generate(*arguments)


def test_batches_change_rounding_only(common: list[str], straight: Path, tmp_path: Path) -> None:
    generate(*common[:2], str(tmp_path / "out"), *common[2:], "--batch-size", "1")
    ours, theirs = LatentReader(tmp_path / "out"), LatentReader(straight)
    for name in theirs.index.samples:
        torch.testing.assert_close(ours.latent(name), theirs.latent(name), atol=1e-2, rtol=1e-2)


def test_a_pipeline_is_sampled_as_diffusers_does(tmp_path: Path) -> None:
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    class EvenSteps(FlowMatchEulerDiscreteScheduler):
        """Even noise levels from 1 before the shift, as our sampler's."""

        def set_timesteps(self, num_inference_steps, device=None):
            super().set_timesteps(sigmas=np.linspace(1, 1 / num_inference_steps, num_inference_steps), device=device)

    folder = save_pipeline(tmp_path / "wan")
    lines = [json.dumps({"prompt": prompt}) for prompt in PROMPTS[:2]]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines) + "\n\n")
    options = "--size 16 32 --frames 5 --steps 3 --guidance 4 --shift 3 --device cpu --compute-dtype float32"
    options += " --dtype float32 --negative-prompt cat"
    generate(str(folder), str(tmp_path / "prompts.jsonl"), str(tmp_path / "out"), *options.split())
    reader = LatentReader(tmp_path / "out")
    assert reader.index.codec.id == "wan-vae-4x8x8-c16"

    pipeline = WanPipeline.from_pretrained(folder)
    pipeline.scheduler = EvenSteps(shift=3.0)
    pipeline.set_progress_bar_config(disable=True)
    seeds = torch.tensor([hash64(0, "generate", prompt, 0) >> 1 for prompt in PROMPTS[:2]])
    noise = noise_like(torch.empty(2, 16, 2, 2, 4), seeds)
    arguments: dict[str, Any] = {"prompt": list(PROMPTS[:2]), "height": 16, "width": 32, "num_frames": 5}
    arguments |= {"num_inference_steps": 3, "latents": noise, "output_type": "latent"}
    expected = pipeline(**arguments, negative_prompt="cat", guidance_scale=4.0).frames
    other = pipeline(**arguments, negative_prompt="cat", guidance_scale=3.0).frames
    mean, std = (
        torch.tensor(values).view(-1, 1, 1, 1)
        for values in (pipeline.vae.config.latents_mean, pipeline.vae.config.latents_std)
    )
    for n in range(2):
        actual = (reader.latent(f"gen-{n:07d}-000") - mean) / std
        torch.testing.assert_close(actual, expected[n], atol=2e-5, rtol=0)
        assert (actual - other[n]).abs().max() > 1e-3


QUICK = ("--size", "16", "32", "--frames", "5", "--steps", "2", "--device", "cpu", "--compute-dtype", "float32")


def test_a_hub_id_is_a_pipeline_with_the_shift_of_its_scheduler(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import UniPCMultistepScheduler

    folder, cache = save_pipeline(tmp_path / "wan"), tmp_path / "cache"
    UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=2.5).save_pretrained(
        folder / "scheduler"
    )

    def download(hub_id: str, *, allow_patterns: list[str]) -> str:
        assert hub_id == "Wan-AI/Tiny-Diffusers"
        for path in folder.rglob("*"):
            name = path.relative_to(folder)
            if path.is_file() and any(fnmatch(name.as_posix(), pattern) for pattern in allow_patterns):
                (cache / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, cache / name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for name, teacher, options in (
        ("folder", str(folder), ["--shift", "2.5", "--guidance", "5"]),
        ("hub", "Wan-AI/Tiny-Diffusers", []),
        ("other", str(folder), ["--shift", "3"]),
    ):
        generate(teacher, str(prompts), str(tmp_path / name), *QUICK, *options)
    assert files_of(tmp_path / "hub") == files_of(tmp_path / "folder")
    # control
    assert files_of(tmp_path / "other") != files_of(tmp_path / "folder")


def test_a_run_is_sampled_as_it_samples_itself(prompts: Path, tmp_path: Path) -> None:
    own = {"steps": 3, "guidance": 2.5, "flow_shift": 4.0}
    folder = write_run(
        tmp_path / "run", with_ema=False, config={**make_config(), "callbacks": {"samples": {**own, "prompts": []}}}
    )
    for options, changes in (({}, {}), ({"steps": 2, "flow_shift": 1.5},) * 2):
        record = library.open_teacher(str(folder), library.TeacherOptions(device="cpu", **options)).record
        expected = {**own, **changes}
        assert {name: record[name] for name in own} == expected
        assert record["weights"] == "model"


def test_processes_share_the_gpus_by_rank(
    run_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class StopError(Exception):
        pass

    def stop(spec: str, options: library.TeacherOptions) -> None:
        raise StopError(options.device)

    monkeypatch.setattr(vsa.errors, "usable_device", lambda name, rank: f"{name} of rank {rank}")
    monkeypatch.setattr(library, "open_teacher", stop)
    with pytest.raises(StopError, match=r"^cuda of rank 5$"):
        generate(run_folder, prompts, tmp_path / "out", "--rank", 5, "--world-size", 8, "--device", "cuda")


def test_bad_input_is_one_line(
    run_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        raise OSError("401 Client Error\n\nRepository not found")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    folder = save_pipeline(tmp_path / "wan")
    images = shutil.copytree(folder, tmp_path / "images")
    make_transformer(in_channels=36).save_pretrained(images / "transformer")
    two = shutil.copytree(folder, tmp_path / "two")
    index = json.loads((two / "model_index.json").read_text())
    index |= {"transformer_2": index["transformer"], "boundary_ratio": 0.875}
    (two / "model_index.json").write_text(json.dumps(index))
    bare = shutil.copytree(folder, tmp_path / "bare")
    shutil.rmtree(bare / "scheduler")
    sparse = shutil.copytree(folder, tmp_path / "sparse")
    config = SparseAttentionConfig(
        method="video_sparse",
        tile_thw=(1, 2, 2),
        partition="cube",
        block_order="nested",
        fine_gate=False,
        gate_keys=(),
        grid_topk=((1,),),
        num_tiles=(2,),
        grids=((1, 2, 4),),
    )
    write_sparse_config(sparse / "transformer", config)
    unshifted = shutil.copytree(folder, tmp_path / "unshifted")
    (unshifted / "scheduler" / "scheduler_config.json").write_text("{}")
    (tmp_path / "none.txt").write_text("\n \n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n{"caption": "y"}\n')
    size = ["--size", "16", "32", "--frames", "5"]
    cases: list[tuple[Path, Path, list[str], str]] = [
        (folder, prompts, [], "needs --size HEIGHT WIDTH and --frames N"),
        (folder, prompts, ["--size", "16", "32"], "expected both --size and --frames"),
        (folder, prompts, ["--size", "16", "30", "--frames", "5"], "size 16x30 must be multiples"),
        (
            folder,
            prompts,
            ["--size", "16", "32", "--frames", "6"],
            "cannot encode 6 frames; the nearest valid lengths are 5",
        ),
        (folder, prompts, ["--size", "8", "32", "--frames", "5"], "do not divide into patches"),
        (folder, prompts, [*size, "--topk", "3"], "a pipeline is dense, got --topk 3"),
        (images, prompts, size, "expected 16 input channels, as of its VAE, got 36"),
        (two, prompts, size, "two transformers, one per range"),
        (sparse, prompts, size, "is sparse, but a teacher must be dense"),
        (unshifted, prompts, size, r"scheduler_config\.json has no flow shift: set --shift"),
        (bare, prompts, size, "has no scheduler/"),
        (tmp_path / "nowhere", prompts, [], "no such model folder: .*nowhere"),
        (tmp_path, prompts, [], "has no vae/"),
        (
            Path("Wan-AI/Missing"),
            prompts,
            size,
            "nor a hub id that can be loaded: 401 Client Error Repository",
        ),
        (run_folder, prompts, ["--negative-prompt", "x"], "a run uses its null embedding, not a negative prompt"),
        (run_folder, prompts, ["--size", "60", "64", "--frames", "16"], "size 60x64"),
        (run_folder, tmp_path / "none.txt", [], "has no prompts"),
        (run_folder, tmp_path / "bad.jsonl", [], r"bad\.jsonl, line 2: expected"),
    ]
    for teacher, file, options, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            generate(str(teacher), str(file), str(tmp_path / "out"), "--device", "cpu", *options)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "out").exists()
