"""Wan's VAE and text encoder against diffusers' own pipelines, on random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.data.tiny_wan import make_image_pipeline, make_pipeline, make_text_encoder, make_vae, save_pipeline
from vsa.data.batch import pad_text
from vsa.data.codecs import WanVAE
from vsa.data.image_encoder import ImageEncoder
from vsa.data.pretrained import component_folder, weights_digest
from vsa.data.text import UMT5Encoder, clean_caption

CAPTIONS = ["a red  circle &amp;amp; a\n\tcat ", "the quick brown fox", "", "a" * 3000]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("wan") / "pipeline")


@pytest.fixture(scope="module")
def vae(folder: Path) -> WanVAE:
    return WanVAE(str(folder))


def clip(t: int, h: int, w: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (t, h, w, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def as_pixels(video: torch.Tensor) -> torch.Tensor:
    """`[1, 3, T, H, W]` in [-1, 1]."""
    return (video.double() / 255 * 2 - 1).float().permute(3, 0, 1, 2)[None]


@pytest.mark.parametrize("frames", [1, 5, 9])
@torch.no_grad()
def test_latents_are_the_mode_of_the_posterior(vae: WanVAE, frames: int) -> None:
    video = clip(frames, 16, 24)
    expected = make_vae().encode(as_pixels(video)).latent_dist
    latents = vae.encode(video)
    assert latents.dtype == torch.float32
    assert latents.shape == vae.latent_shape(frames, 16, 24) == (16, 1 + (frames - 1) // 4, 2, 3)
    torch.testing.assert_close(latents, expected.mode()[0], atol=1e-5, rtol=0)
    # a draw from the posterior is something else
    assert (latents - expected.sample()[0]).abs().max() > 1e-2
    assert torch.equal(vae.encode(video), latents)


@torch.no_grad()
def test_decoding_is_the_pipelines(vae: WanVAE) -> None:
    latents = torch.randn(16, 2, 3, 2, generator=torch.Generator().manual_seed(1))
    pipeline = make_pipeline()
    sample = pipeline.vae.decode(latents[None]).sample
    expected = torch.from_numpy(pipeline.video_processor.postprocess_video(sample, output_type="np")[0])
    video = vae.decode(latents)
    assert video.shape == (5, 24, 16, 3)
    assert (video.float() - expected * 255).abs().max() <= 0.5 + 1e-3
    assert video.float().std() > 1


def test_tiles_are_for_decoding_only(folder: Path, vae: WanVAE) -> None:
    tiled = WanVAE(str(folder), tiled_decoding=True)
    wide = clip(1, 16, 320)
    latents = vae.encode(wide)
    assert tiled.hash == vae.hash
    # over 256 pixels the VAE would cut tiles
    assert torch.equal(tiled.encode(wide), latents)
    seams = (tiled.decode(latents).int() - vae.decode(latents).int()).abs()
    assert tiled.decode(latents).shape == (1, 16, 320, 3)
    assert 0 < seams.max() <= 64


def test_wan_2_2_has_other_strides(tmp_path: Path) -> None:
    make_vae(channels=48).save_pretrained(tmp_path / "vae")
    codec = WanVAE(str(tmp_path))
    assert (codec.channels, codec.stride, codec.id) == (48, (4, 16, 16), "wan-vae-4x16x16-c48")
    latents = codec.encode(clip(5, 32, 48))
    assert latents.shape == codec.latent_shape(5, 32, 48) == (48, 2, 2, 3)
    assert codec.decode(latents).shape == (5, 32, 48, 3)
    # the VAE folder itself will do
    assert WanVAE(str(tmp_path / "vae")).hash == codec.hash


def test_frames_that_fit(vae: WanVAE) -> None:
    assert [vae.frames_that_fit(n) for n in range(11)] == [0, 1, 1, 1, 1, 5, 5, 5, 5, 9, 9]


def test_statistics_are_the_vaes_own(vae: WanVAE) -> None:
    config = make_vae().config
    mean, std = vae.statistics or (None, None)
    assert mean is not None
    assert std is not None
    assert mean.tolist() == pytest.approx(config.latents_mean, rel=1e-6)
    assert std.tolist() == pytest.approx(config.latents_std, rel=1e-6)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_pipeline(tmp_path_factory.mktemp("wan") / "i2v", make_image_pipeline)


def test_image_inputs_are_the_pipelines(image_folder: Path, folder: Path) -> None:
    pipeline, codec = make_image_pipeline(), WanVAE(str(image_folder))
    video = clip(9, 16, 24, seed=2)
    with torch.no_grad():
        _, expected = pipeline.prepare_latents(
            as_pixels(video)[:, :, 0], 1, height=16, width=24, num_frames=9, dtype=torch.float32, device="cpu"
        )
        tokens = pipeline.encode_image(Image.fromarray(video[0].numpy()), "cpu")
    inputs = codec.image_inputs(video)
    assert inputs["cond_latents"].shape == (20, 3, 2, 3)
    torch.testing.assert_close(inputs["cond_latents"], expected[0], atol=1e-5, rtol=0)
    assert inputs["image_embeds"].shape == (5, 16)
    torch.testing.assert_close(inputs["image_embeds"], tokens[0], atol=1e-5, rtol=0)
    # later frames are not looked at, the first is
    other = torch.cat((video[:1], clip(8, 16, 24, seed=3)))
    assert all(torch.equal(value, inputs[name]) for name, value in codec.image_inputs(other).items())
    assert not any(torch.equal(value, inputs[name]) for name, value in codec.image_inputs(video.flip(0)).items())
    assert codec.image_to_video
    # without CLIP, as Wan2.2 A14B
    plain = WanVAE(str(folder))
    assert plain.image_inputs(video).keys() == {"cond_latents"}
    assert not plain.image_to_video


def test_image_encoders_are_told_apart(image_folder: Path, tmp_path: Path) -> None:
    encoder = ImageEncoder(str(image_folder))
    assert (encoder.id, encoder.tokens, encoder.dim) == ("clip-5x16", 5, 16)
    copy = Path(shutil.copytree(image_folder, tmp_path / "copy"))
    assert ImageEncoder(str(copy)).hash == encoder.hash
    pixels = copy / "image_processor" / "preprocessor_config.json"
    pixels.write_text(pixels.read_text().replace('"do_center_crop": true', '"do_center_crop": false'))
    assert ImageEncoder(str(copy)).hash != encoder.hash
    config = copy / "image_encoder" / "config.json"
    config.write_text(config.read_text().replace('"patch_size": 14', '"patch_size": 0'))
    with pytest.raises(ValueError, match=r"config.json has patch_size=0, expected .*at least 1"):
        ImageEncoder(str(copy))
    with pytest.raises(ValueError, match="has no image_encoder/"):
        ImageEncoder(str(copy / "vae"))


def test_prompt_embeddings_are_the_pipelines(folder: Path) -> None:
    encoder = UMT5Encoder(str(folder), dtype="float32")
    with torch.no_grad():
        expected, null = make_pipeline().encode_prompt(CAPTIONS, max_sequence_length=512, device="cpu")
    rows = encoder.encode_batch(CAPTIONS)
    text, mask = pad_text(rows, length=512, padding="zeros")
    assert mask is None
    torch.testing.assert_close(text, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(text[2], null[0], atol=1e-5, rtol=0)
    assert [len(row) for row in rows][2:] == [1, 512]
    # one by one: the rows do not depend on what they are batched with
    for row, caption in zip(rows, CAPTIONS, strict=True):
        torch.testing.assert_close(encoder.encode(caption), row, atol=1e-5, rtol=0)
    # control: a caption that is not cleaned gives other tokens
    with torch.no_grad():
        raw = make_pipeline().encode_prompt("a red circle & a dog", max_sequence_length=512, device="cpu")[0]
    assert (raw - text[:1]).abs().max() > 1e-2


def test_mask_marks_the_real_tokens(folder: Path) -> None:
    rows = UMT5Encoder(str(folder), dtype="float32").encode_batch(CAPTIONS[:2])
    text, mask = pad_text(rows, length=512, padding="mask")
    assert mask is not None
    assert mask.sum(1).tolist() == [len(row) for row in rows]
    assert not text[~mask].any()
    with pytest.raises(ValueError, match="got 'none'"):
        pad_text(rows, length=512, padding="none")  # pyright: ignore


def test_caption_cleaning_is_the_pipelines() -> None:
    from diffusers.pipelines.wan.pipeline_wan import prompt_clean

    for caption in (*CAPTIONS, "  &lt;b&gt; x \u00a0 y ", "&quot;a&quot;"):
        assert clean_caption(caption) == prompt_clean(caption)


def test_embeddings_keep_their_narrow_type(folder: Path) -> None:
    wide, narrow = (UMT5Encoder(str(folder), dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert narrow.hash == wide.hash
    row = narrow.encode("a red circle")
    assert row.dtype == torch.bfloat16
    assert 0 < (row.float() - wide.encode("a red circle")).abs().max() < 0.1


def test_hashes_follow_weights_config_and_tokens(folder: Path, vae: WanVAE, tmp_path: Path) -> None:
    encoder = UMT5Encoder(str(folder))
    copy = shutil.copytree(folder, tmp_path / "copy")
    assert WanVAE(str(copy)).hash == vae.hash
    assert UMT5Encoder(str(copy)).hash == encoder.hash
    assert UMT5Encoder(str(copy), max_tokens=100).hash != encoder.hash

    make_vae(seed=1).save_pretrained(copy / "vae")
    make_text_encoder(seed=1).save_pretrained(copy / "text_encoder")
    assert WanVAE(str(copy)).hash != vae.hash
    assert UMT5Encoder(str(copy)).hash != encoder.hash

    for name, key in (("vae", "latents_mean"), ("text_encoder", "relative_attention_num_buckets")):
        shutil.copytree(folder / name, copy / name, dirs_exist_ok=True)
        config = json.loads((copy / name / "config.json").read_text())
        config[key] = [0.0] * 16 if key == "latents_mean" else 16
        (copy / name / "config.json").write_text(json.dumps(config))
    assert WanVAE(str(copy)).hash != vae.hash
    assert UMT5Encoder(str(copy)).hash != encoder.hash


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents_std": [1.0]}, "latents_mean and latents_std of other latents: 16 and 1 values for 16 channels"),
        ({"latents_std": [1.0] * 15 + [0.0]}, r"latents_std\[15\]=0.0: expected a number from 1e-09"),
        ({"latents_mean": [float("nan")] * 16}, r"latents_mean\[0\]=nan"),
        ({"latents_mean": "x"}, "latents_mean='x': expected a list"),
    ],
)
def test_statistics_of_another_number_of_channels(change: dict, message: str, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder / "vae", tmp_path / "vae")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=f"config.json has {message}"):
        WanVAE(str(copy))


def test_weights_digest_is_of_tensors_not_of_files(tmp_path: Path) -> None:
    model = make_vae()
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert weights_digest(tmp_path / "one") == weights_digest(tmp_path / "many")
    path = next((tmp_path / "one").glob("*.safetensors"))
    good = path.read_bytes()
    for bad in (good[:-1], good[:4], b""):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match="cannot read weights"):
            weights_digest(tmp_path / "one")
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert weights_digest(tmp_path / "one") != weights_digest(tmp_path / "many")


def test_weights_that_lack_tensors_are_refused(folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for name, make in (("vae", WanVAE), ("text_encoder", UMT5Encoder)):
        copy = shutil.copytree(folder, tmp_path / name)
        path = next((copy / name).glob("*.safetensors"))
        tensors = load_file(path)
        tensors.pop(sorted(key for key in tensors if "shared" not in key and "embed_tokens" not in key)[0])
        save_file(tensors, path, {"format": "pt"})
        encoder = make(str(copy))
        with pytest.raises(ValueError, match="lack 1 tensors, first"):
            encoder.encode(clip(1, 8, 8) if isinstance(encoder, WanVAE) else "x")  # pyright: ignore


def test_bad_sources_and_clips_are_one_line(folder: Path, vae: WanVAE, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "empty").mkdir()
    cases = [
        (lambda: WanVAE(str(tmp_path / "absent")), "no such model folder"),
        (lambda: WanVAE(str(tmp_path / "empty")), "has no vae/"),
        (lambda: WanVAE(str(folder / "transformer")), "describes WanTransformer3DModel, expected AutoencoderKLWan"),
        (lambda: WanVAE(str(folder), dtype="int8"), "got 'int8'"),  # pyright: ignore
        (lambda: UMT5Encoder(str(folder / "vae")), "has no text_encoder/"),
        (lambda: UMT5Encoder(str(folder), max_tokens=0), "got 0"),
        (lambda: component_folder("nobody/nothing-at-all", "vae"), "nor a hub id that can be loaded"),
        (lambda: vae.encode(clip(4, 8, 8)), "video of 4x8x8 .* does not fit"),
        (lambda: vae.encode(clip(5, 8, 12)), "video of 5x8x12 .* does not fit"),
        (lambda: vae.encode(torch.zeros(1, 8, 8, 3)), "must be uint8"),
        (lambda: vae.decode(torch.zeros(15, 1, 1, 1)), r"\[16, t, h, w\]"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            call()
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/etc/passwd", "a/../../b"])
def test_an_index_of_a_component_names_files_of_its_folder(name, tmp_path):
    folder = tmp_path / "text_encoder"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors"}}))
    assert component_folder(tmp_path, "text_encoder") == folder
    index.write_text(json.dumps({"weight_map": {"a": "model-00001.safetensors", "b": name}}))
    with pytest.raises(ValueError, match=r"index.json names .*, expected a relative path without \.\."):
        component_folder(tmp_path, "text_encoder")


def test_the_text_encoder_needs_ftfy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert clean_caption("sch\u00c3\u00b6n &amp;amp;  gut") == "sch\u00f6n & gut"
    monkeypatch.setattr("vsa.data.text.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^Wan's text encoder needs ftfy.*vsa-train\[wan\]"):
        UMT5Encoder(str(folder))
