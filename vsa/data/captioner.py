"""Captions of clips by an image-to-text model of transformers, kept in a file that is continued and may be edited."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsa.data.pretrained import model_files, refuse_missing, refuse_unknown
from vsa.data.prompts import tidy
from vsa.files import CSV_LIMIT, parse_json, read_text, write_whole
from vsa.progress import progress_bar

MADE = "captions.jsonl"
"""Name of the file of captions in the folder of shards."""

_QUESTION = "Describe what is seen in these frames of one video and how it moves, in one or two plain sentences."
_FRAMES = 4
_MOST_TOKENS = 128


class Captioner:
    """An image-to-text model: one caption for some frames of a clip, chosen without chance.

    A model with a chat template is shown four frames and asked to describe them, another one sees the middle frame.

    Args:
        source: model folder or hub id.
        device: device of the model; on a GPU in bfloat16.
    """

    def __init__(self, source: str, *, device: str = "cpu") -> None:
        refuse_captioner(source)
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.source, self._device = source, device
        dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
        try:
            # the libraries would ask the hub for each file, five times when it does not answer
            folder = captioner_files(source, "*.json", "*.txt", "*.model", "*.jinja", "*.safetensors")
            folder = folder if any(folder.glob("*.safetensors")) else captioner_files(source, "*.bin")
            self._processor: Any = AutoProcessor.from_pretrained(folder)
            if not hasattr(self._processor, "image_processor"):
                raise ValueError("it has no processor of images and text")
            loaded: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, output_loading_info=True)
            model, info = loaded
            refuse_missing(info, Path(source))
        except (OSError, ValueError, KeyError, ImportError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(f"--captioner {source} cannot be loaded as an image-to-text model: {reason}") from error
        self._model: Any = model.to(device).eval()

    @torch.no_grad()
    def __call__(self, clip: Tensor) -> str:
        """The caption of a clip, uint8 `[T, H, W, 3]`; empty if the model says nothing."""
        from PIL import Image

        shown = clip[[k * len(clip) // _FRAMES for k in range(_FRAMES)] if len(clip) >= _FRAMES else [len(clip) // 2]]
        images = [Image.fromarray(frame.cpu().numpy()) for frame in shown]
        if getattr(self._processor, "chat_template", None):
            content = [*({"type": "image", "image": image} for image in images), {"type": "text", "text": _QUESTION}]
            messages = [{"role": "user", "content": content}]
            options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
            inputs = self._processor.apply_chat_template(messages, **options)
            asked = inputs["input_ids"].shape[1]
        else:
            inputs, asked = self._processor(images=images[len(images) // 2], return_tensors="pt"), 0
        inputs = inputs.to(self._device, self._model.dtype)
        tokens = self._model.generate(**inputs, max_new_tokens=_MOST_TOKENS, do_sample=False)
        return tidy(self._processor.batch_decode(tokens[:, asked:], skip_special_tokens=True)[0])


def refuse_captioner(source: str) -> None:
    """Raise ValueError for a captioner whose name or package is wrong, before it is loaded."""
    if find_spec("transformers") is None:
        raise ValueError(f"--captioner {source} needs transformers: pip install 'vsa-train[text]'")
    refuse_unknown(source, f"--captioner {source}: ")


def captioner_files(source: str, *patterns: str) -> Path:
    """The folder of a captioner, to which files of a hub id are downloaded; ValueError if it cannot be reached."""
    try:
        return model_files(source, *patterns)
    except ValueError as error:
        raise ValueError(f"--captioner {error}") from None


def caption_clips(
    path: Path, clips: Sequence[str], frames: Callable[[str], Tensor], source: str, *, device: str, alone: bool
) -> dict[str, str]:
    """Captions by clip: those that a file has of this model, edits included, and the others, made and added one by one.

    Args:
        path: the file; its folder is made.
        clips: names of the clips.
        frames: function that reads a clip, uint8 `[T, H, W, 3]`; a ValueError leaves the clip out.
        source: model of `Captioner`, which is loaded if a caption is missing.
        device: device of the model.
        alone: whether no other process writes the file.

    Raises:
        ValueError: captions are missing and another process may be writing them; the model cannot be loaded; the file
            has a line of another kind.
    """
    lines = _lines(path)
    captions = {line["clip"]: tidy(line["caption"]) for line in lines if line["captioner"] == source}
    missing = [clip for clip in clips if clip not in captions]
    if missing and not alone:
        raise ValueError(
            f"{len(missing)} clips have no caption in {path}: --captioner writes them with one process first, without "
            "--rank and --world-size"
        )
    if missing:
        model = Captioner(source, device=device)
        path.parent.mkdir(parents=True, exist_ok=True)
        # without a last line that was cut off
        write_whole(path, "".join(map(_line, lines)))
        with path.open("a", encoding="utf-8") as file, progress_bar("writing captions", len(missing)) as advance:
            for clip in missing:
                # a file that does not decode is reported when it is encoded
                with suppress(ValueError):
                    captions[clip] = model(frames(clip))
                    file.write(_line({"clip": clip, "caption": captions[clip], "captioner": source}))
                    file.flush()
                advance(1)
    return {clip: captions[clip] for clip in clips if captions.get(clip)}


def _lines(path: Path) -> list[dict[str, str]]:
    lines = read_text(path, limit=CSV_LIMIT, growing=True).split("\n") if path.exists() else [""]
    kind = {"clip": str, "caption": str, "captioner": str}
    return [parse_json(line, f"{path}, line {i + 1}", kind) for i, line in enumerate(lines[:-1])]


def _line(entry: Mapping[str, str]) -> str:
    return json.dumps(entry, ensure_ascii=False) + "\n"
