"""`vsa toy` and `vsa encode` as a user runs them."""

from pathlib import Path

import pytest
import torch

from tests.data.spoilt import write_spoilt
from tests.data.tiny_wan import make_image_pipeline, save_pipeline
from tests.tiny_runs import vsa_command
from vsa.data import encode_report
from vsa.data.codecs import WanVAE
from vsa.data.encode import UnusableFiles
from vsa.data.encoders import EncoderChoice
from vsa.data.shards import LatentReader
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import read_video, write_video


def test_toy_clips_are_rendered_and_encoded(command_line, tmp_path: Path) -> None:
    status, out, err = command_line("toy", str(tmp_path / "v"), "--count", "3", "--size", "8", "32", "32")
    assert (status, err) == (0, "")
    assert out.endswith(f"3 clips of 8x32x32 in {tmp_path / 'v'}\n")
    encode = ("encode", str(tmp_path / "v"), str(tmp_path / "s"))
    status, _, err = command_line(*encode, "--text-dim", "8", "--max-tokens", "6")
    assert status == 0, err
    reader = LatentReader(tmp_path / "s")
    assert len(reader.index.samples) == 3
    assert all(s.captions == 2 and s.latent_shape == (16, 2, 4, 4) for s in reader.index.samples.values())
    status, _, err = command_line(*encode)
    assert status == 1
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert str(tmp_path / "s") in err
    assert "replace it with --overwrite" in err


def test_lists_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spoilt = write_spoilt(tmp_path / "spoilt")
    for i in range(20):
        (spoilt / f"zz{i:02d}.png").write_bytes(b"")
    with pytest.raises(UnusableFiles, match="28 problems"):
        vsa_command("encode", str(spoilt), str(tmp_path / "out"))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("captions.jsonl, line 1: ")
    assert lines[19].startswith("zz11.png: video ")
    assert " has no caption: expected" in lines[19]
    assert lines[20] == "and 8 more"
    vsa_command("encode", str(spoilt), str(tmp_path / "out"), "--skip-bad", "--channels", "24", "--text-dim", "8")
    output = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("left out ") for line in output) == 30
    assert output[-2] == f"2 samples in {tmp_path / 'out'}, 30 left out"
    assert output[-1] == (
        f"to train on them: vsa train experiment=own_videos data.root={tmp_path / 'out'} data.videos={spoilt} "
        "'tile_thw=[1,1,1]' sparsity.sparsity=0.5 data.codec.channels=24 model.in_channels=24 model.out_channels=24 "
        "data.text_encoder.dim=8 model.text_dim=8"
    )


def test_encodes_with_a_wan_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_pipeline(tmp_path / "wan", make_image_pipeline)
    for i, frames in enumerate((5, 9, 3)):
        write_video(tmp_path / "v" / f"{i}.mp4", render_clip(0, i, size=(frames, 16, 24))[0])
        (tmp_path / "v" / f"{i}.txt").write_text("a red circle\n\na cat")
    common = [str(tmp_path / "v"), str(tmp_path / "s"), "--model", str(folder), "--buckets", "16x24x9,16x24x5"]
    common += ["--skip-bad", "--samples-per-shard", "1", "--text-dtype", "float32", "--dtype", "float32"]
    for rank in ("0", "1"):
        vsa_command("encode", *common, "--rank", rank, "--world-size", "2")
    assert "run the command once more without --rank" in capsys.readouterr().out
    vsa_command("encode", *common)
    output = capsys.readouterr().out
    assert "left out 2.mp4: video" in output
    assert "2 samples in" in output
    assert output.endswith(
        f"vsa train experiment=finetune_wan_1_3b model=from_checkpoint data.root={tmp_path / 's'} "
        f"data.videos={tmp_path / 'v'} data.codec.source={folder} init_from={folder} trainer=default "
        "trainer.accumulate_grad_batches=64 trainer.val_check_interval=12800 'tile_thw=[1,1,1]' sparsity=constant "
        "sparsity.sparsity=0.5\n"
    )
    # a trained codec is not measured
    assert "dB" not in output
    reader = LatentReader(tmp_path / "s")
    assert f"latent mean by channel: {reader.index.latent_mean[0]:.4g} " in output
    assert {s.id: s.latent_shape for s in reader.index.samples.values()} == {"0": (16, 2, 2, 3), "1": (16, 3, 2, 3)}
    assert (reader.index.codec.id, reader.index.text_encoder.id) == ("wan-vae-4x8x8-c16", "umt5-32x512")
    # by itself, as the pipeline is one of image-to-video
    assert "the image condition of its first frame, and its tokens by clip-5x16" in output
    assert (reader.index.cond_channels, reader.index.image_encoder.id) == (20, "clip-5x16")
    video, _ = read_video(tmp_path / "v" / "1.mp4")
    torch.testing.assert_close(reader.image_inputs("1"), WanVAE(str(folder)).image_inputs(video))
    caption, tokens = reader.text("1", 1)
    assert caption == "a cat"
    # two words and the end
    assert tokens.shape == (3, 32)
    assert reader.null_text.shape == (1, 32)
    plain = ["--model", str(save_pipeline(tmp_path / "plain")), "--text-dtype", "float32"]
    with pytest.raises(ValueError, match=r"has image encoder clip-5x16 .*, got no image encoder"):
        vsa_command("encode", str(tmp_path / "v"), str(tmp_path / "s"), *plain, "--image-condition", "--add")
    with pytest.raises(ValueError, match=r"no such model folder: .*nowhere"):
        vsa_command("encode", str(tmp_path / "v"), str(tmp_path / "t"), "--vae", str(tmp_path / "nowhere"))


def test_a_wrong_text_encoder_is_told_with_what_exists(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"^--text clip: expected sentence, ngrams, or a Wan pipeline: no such model folder"
    ):
        vsa_command("encode", str(tmp_path), str(tmp_path / "s"), "--text", "clip")


def test_processes_share_the_gpus_by_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class StopError(Exception):
        pass

    def stop(self: EncoderChoice, device: str) -> None:
        raise StopError(device)

    monkeypatch.setattr(encode_report, "usable_device", lambda name, rank: f"{name} of rank {rank}")
    monkeypatch.setattr(EncoderChoice, "build", stop)
    with pytest.raises(StopError, match=r"^cuda of rank 5$"):
        vsa_command("encode", "v", tmp_path / "out", "--rank", "5", "--world-size", "8", "--device", "cuda")
