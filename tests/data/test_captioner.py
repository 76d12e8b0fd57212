"""Captions by tiny models with random weights: one that sees a picture, and one that is asked about several."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.data.encoding import encode_folder
from vsa.data import captioner as module
from vsa.data.captioner import MADE, Captioner, caption_clips
from vsa.data.encode import UnusableFiles
from vsa.data.shards import LatentReader
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video

transformers = pytest.importorskip("transformers")

SPECIAL = ["[PAD]", "[UNK]", "[BOS]", "[EOS]", "<image>"]
WORDS = [*SPECIAL, *(f"word{i}" for i in range(40))]
TINY = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
SEEN = {**TINY, "num_hidden_layers": 2, "image_size": 32, "patch_size": 16}


def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[BOS]", "eos_token": "[EOS]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names, extra_special_tokens=["<image>"])


@pytest.fixture(scope="module")
def sees_one(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "one"
    ids = {"bos_token_id": 2, "eos_token_id": 3, "sep_token_id": 3, "pad_token_id": 0}
    texts = {**TINY, **ids, "vocab_size": len(WORDS), "encoder_hidden_size": 16, "num_hidden_layers": 1}
    config = transformers.BlipConfig(vision_config=SEEN, text_config=texts, image_text_hidden_size=8)
    torch.manual_seed(0)
    transformers.BlipForConditionalGeneration(config).save_pretrained(folder)
    pictures = transformers.BlipImageProcessor(size={"height": 32, "width": 32})
    transformers.BlipProcessor(pictures, tokenizer()).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def is_asked(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "asked"
    ids = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    texts = {**TINY, **ids, "vocab_size": len(WORDS), "num_hidden_layers": 1, "num_key_value_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**SEEN),
        text_config=transformers.LlamaConfig(**texts),
        image_token_index=4,
        image_seq_length=4,
    )
    torch.manual_seed(1)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder)
    template = (
        "{% for part in messages[0]['content'] %}{% if part['type'] == 'image' %}<image> {% else %}{{ part['text'] }}"
        "{% endif %}{% endfor %}"
    )
    pictures = transformers.CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    options = {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    transformers.LlavaProcessor(pictures, tokenizer(), chat_template=template, **options).save_pretrained(folder)
    return str(folder)


def clip_of_greys(count: int) -> torch.Tensor:
    """uint8 `[T, 32, 32, 3]`, the frame's number as its grey."""
    return torch.arange(count, dtype=torch.uint8)[:, None, None, None].repeat(1, 32, 32, 3)


@pytest.mark.parametrize(("model", "frames"), [("sees_one", [4]), ("is_asked", [0, 2, 4, 6])])
def test_a_caption_is_made_of_frames_over_the_clip(model: str, frames: list[int], request, monkeypatch) -> None:
    captioner = Captioner(request.getfixturevalue(model))
    seen: list[int] = []
    processor = captioner._processor.image_processor
    processed = type(processor).__call__

    def look(self, images, *args, **kwargs):
        flat = images if isinstance(images, list) else [images]
        seen.extend(
            int(np.asarray(image).max()) for group in flat for image in (group if isinstance(group, list) else [group])
        )
        return processed(self, images, *args, **kwargs)

    monkeypatch.setattr(type(processor), "__call__", look)
    words = captioner(clip_of_greys(9))
    assert seen == frames
    assert words.startswith("word")
    assert words == captioner(clip_of_greys(9))
    seen.clear()
    captioner(clip_of_greys(1))
    assert seen == [0]


def videos(folder: Path) -> Path:
    for i, name in enumerate(("a", "b", "c")):
        write_video(folder / f"{name}.mp4", render_clip(0, i, size=(8, 32, 32))[0])
    (folder / "a.txt").write_text("given")
    return folder


def captions_in(out: Path) -> dict[str, str]:
    reader = LatentReader(out)
    return {name: reader.text(name, 0)[0] for name in reader.index.samples}


def test_clips_without_a_caption_get_one_that_is_kept(sees_one: str, tmp_path: Path, monkeypatch) -> None:
    folder, out = videos(tmp_path / "v"), tmp_path / "s"
    encode_folder(folder, out, captioner=sees_one, trigger="sks")
    found = captions_in(out)
    assert found["a"] == "sks given"
    assert found["b"].startswith("sks word")
    fields = LatentReader(out).index.samples["b"].about.fields
    assert fields == {"captioner": sees_one, "trigger": "sks"}
    lines = [json.loads(line) for line in (out / MADE).read_text().splitlines()]
    assert [(line["clip"], line["captioner"]) for line in lines] == [("b", sees_one), ("c", sees_one)]
    assert found["c"] == f"sks {lines[1]['caption']}"

    # an edit is taken, and a line that a power cut has zeroed in part is made anew; the caption of another model is not
    # that of this one
    other = json.dumps({"clip": "c", "caption": "of another", "captioner": "other"})
    edited = json.dumps({**lines[0], "caption": "edited"})
    (out / MADE).write_text(f"{other}\n{edited}\n" + json.dumps(lines[1])[:-9] + "\0" * 9)
    calls: list[str] = []
    real = Captioner.__call__
    monkeypatch.setattr(Captioner, "__call__", lambda self, clip: calls.append(self.source) or real(self, clip))
    encode_folder(folder, out, captioner=sees_one, overwrite=True)
    assert len(calls) == 1
    assert captions_in(out) == {"a": "given", "b": "edited", "c": lines[1]["caption"]}
    # nothing is left to make: no model is loaded
    monkeypatch.setattr(module, "Captioner", None)
    encode_folder(folder, out, captioner=sees_one, overwrite=True)
    assert captions_in(out)["b"] == "edited"


def test_problems_are_told_before_a_model_is_loaded(sees_one: str, tmp_path: Path) -> None:
    folder, out = videos(tmp_path / "v"), tmp_path / "s"
    (folder / "bad.mp4").write_bytes(b"x")
    (folder / "c.txt").write_bytes("gr\xfcn".encode("latin-1"))
    with pytest.raises(ValueError, match=r"^--captioner nowhere: no such model folder: nowhere; a hub id"):
        encode_folder(folder, out, captioner="nowhere")
    with pytest.raises(UnusableFiles) as refused:
        encode_folder(folder, out, captioner=str(tmp_path))
    assert [name for name, _ in refused.value.problems] == ["bad.mp4", "c.mp4"]
    assert not out.exists()
    (folder / "bad.mp4").unlink()
    (folder / "c.txt").unlink()
    with pytest.raises(ValueError, match=f"^--captioner {tmp_path} cannot be loaded as an image-to-text") as error:
        encode_folder(folder, out, captioner=str(tmp_path))
    assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match=r"2 clips have no caption in .*captions\.jsonl: --captioner writes them"):
        encode_folder(folder, out, captioner=sees_one, world_size=2)
    assert not out.exists()


def test_a_hub_id_is_asked_for_once_and_before_films_are_searched(sees_one: str, tmp_path: Path, monkeypatch) -> None:
    folder, asked = videos(tmp_path / "v"), list[str]()

    def offline(name: str, **options) -> str:
        asked.append(name)
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setattr("vsa.data.encode.find_shots", None)
    for options in ({}, {"clips_per_film": 1, "shots": "none", "frames": 4}):
        with pytest.raises(
            ValueError, match=r"^--captioner me/model is neither a local folder nor a hub id that can be"
        ):
            encode_folder(folder, tmp_path / "s", captioner="me/model", **options)
    assert asked == ["me/model"] * 2
    # the libraries are given the folder of the files
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **options: sees_one)
    given = list[str]()
    real = transformers.AutoProcessor.from_pretrained
    monkeypatch.setattr(
        transformers.AutoProcessor, "from_pretrained", lambda name: given.append(str(name)) or real(name)
    )
    assert Captioner("me/model").source == "me/model"
    assert given == [sees_one]


def test_a_model_that_says_nothing_and_a_foreign_line(sees_one: str, tmp_path: Path, monkeypatch) -> None:
    folder, out = videos(tmp_path / "v"), tmp_path / "s"
    monkeypatch.setattr(Captioner, "__call__", lambda self, clip: "")
    with pytest.raises(UnusableFiles, match=r"2 problems .*video .*b\.mp4 has no caption"):
        encode_folder(folder, out, captioner=sees_one)
    (out / MADE).write_text('{"video": "b.mp4", "caption": "x"}\n')
    with pytest.raises(ValueError, match=r"captions\.jsonl, line 1"):
        caption_clips(out / MADE, ["b"], lambda name: clip_of_greys(4), sees_one, device="cpu", alone=True)
