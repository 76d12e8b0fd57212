"""Invalid samples in a data set whose digests are right, for tests and for the soak."""

from __future__ import annotations

import hashlib
import json
import math
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from vsa.data.codecs import HaarCodec
from vsa.data.index import INDEX_NAME
from vsa.data.text import HashedNgramEncoder

SHAPE = (16, 2, 2, 4)
TEXT = HashedNgramEncoder(dim=8, max_tokens=5)
DEEP = "[" * 200_000


def edit_index(root: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the content of an index and update its digest."""
    content = json.loads((root / INDEX_NAME).read_text())
    content.pop("index_sha256", None)
    change(content)
    body = json.dumps(content)
    seal = hashlib.sha256(body.encode()).hexdigest()
    (root / INDEX_NAME).write_text(f'{{"index_sha256": "{seal}", {body[1:]}')


def abouts(index: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What an index knows of its samples."""
    return (about for shard in index["shards"] for about in shard.get("about", ()))


def forge(root: Path, sample: str, kind: str, payload: bytes) -> None:
    """Replace the bytes of a member, `kind` latents or texts, and update all digests."""
    index = json.loads((root / INDEX_NAME).read_text())
    name = next(s["name"] for s in index["shards"] if any(row[0] == sample for row in s.get(kind, ())))
    content = (root / name).read_bytes()
    (root / name).write_bytes(content + payload)

    def point(index: dict[str, Any]) -> None:
        shard = next(s for s in index["shards"] if s["name"] == name)
        shard |= {"bytes": len(content + payload), "sha256": hashlib.sha256(content + payload).hexdigest()}
        row = next(row for row in shard[kind] if row[0] == sample)
        row[1:4] = [len(content), len(payload), hashlib.sha256(payload).hexdigest()]

    edit_index(root, point)


@dataclass(frozen=True, kw_only=True)
class Forgery:
    """An invalid member: its name, kind and bytes, and the cause that has to be reported."""

    name: str
    kind: str
    payload: bytes
    cause: str


def forgeries() -> Iterator[Forgery]:
    """40 invalid members with correct digests."""
    codec = HaarCodec()
    about = {"codec_id": codec.id, "codec_hash": codec.hash}
    spoken = {"text_encoder_id": TEXT.id, "text_encoder_hash": TEXT.hash, "captions": ["a", "b"]}
    good = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).half()

    def latent(name: str, cause: str, tensor: Tensor = good, *, header: Any = about, key: str = "latent") -> Forgery:
        text = header if isinstance(header, str) else json.dumps(header)
        payload = save({key: tensor.contiguous()}, {"vsa": text})
        return Forgery(name=name, kind="latents", payload=payload, cause=cause)

    def spoilt(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        tensor = good.to(dtype, copy=True)
        tensor[3, 1, 1, 2] = value
        return tensor

    for name, value, cause in (
        ("a NaN", math.nan, "nan"),
        ("an Inf", math.inf, "inf"),
        ("a negative Inf", -math.inf, "inf"),
        ("1e30", 1e30, "range"),
        ("-1e30", -1e30, "range"),
        ("70,000", 7e4, "range"),
    ):
        yield latent(name, cause, spoilt(value))
    yield latent("all NaN", "nan", torch.full(SHAPE, math.nan, dtype=torch.float16))
    yield latent("NaN and Inf in bfloat16", "nan", torch.full(SHAPE, math.nan, dtype=torch.bfloat16))
    yield latent("1e30 in bfloat16", "range", spoilt(1e30, torch.bfloat16))
    for dtype in (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool, torch.float64, torch.float8_e4m3fn):
        yield latent(f"latents of {dtype}", "dtype", torch.zeros(SHAPE).to(dtype))
    yield latent("another shape", "shape", good.transpose(2, 3))
    yield latent("no dimensions", "shape", torch.tensor(1.0))
    yield latent("no values", "shape", torch.zeros(16, 0, 2, 4))
    yield latent("more channels", "shape", torch.zeros(32, 2, 2, 4))
    yield latent("no latent", "shape", key="other")
    yield latent("metadata nested 200,000 deep", "decode", header=DEEP + "]" * 200_000)
    yield latent("metadata cut short", "decode", header=DEEP)
    for name, header in (("a list", [about]), ("a number", 3), ("null", None), ("text", '"codec_hash"')):
        yield latent(f"metadata that is {name}", "metadata", header=header)
    yield latent("another encoder", "metadata", header={"codec_id": "other", "codec_hash": "0"})
    yield latent("an encoder of 10 MB", "metadata", header={"codec_id": "x" * 10**7, "codec_hash": ["x"]})
    yield Forgery(name="no metadata", kind="latents", payload=save({"latent": good}), cause="decode")
    yield Forgery(name="a pickle", kind="latents", payload=pickle.dumps({"latent": [1.0]}), cause="decode")
    yield Forgery(name="zeros", kind="latents", payload=bytes(500), cause="decode")
    yield Forgery(
        name="a header of 2^62", kind="latents", payload=(2**62).to_bytes(8, "little") + b"{}", cause="decode"
    )

    def text(name: str, cause: str, tensor: Tensor, **header: Any) -> Forgery:
        payload = save({"0": tensor, "1": tensor.clone()}, {"vsa": json.dumps({**spoken, **header})})
        return Forgery(name=f"text: {name}", kind="texts", payload=payload, cause=cause)

    rows = torch.ones(3, 8)
    yield text("NaN", "nan", rows * math.nan)
    yield text("int8", "dtype", rows.to(torch.int8))
    yield text("another width", "shape", torch.ones(3, 9))
    yield text("more tokens than the encoder makes", "shape", torch.ones(6, 8))
    yield text("captions that are a number", "metadata", rows, captions=7)
    yield text("captions that are lists", "metadata", rows, captions=[["a"], ["b"]])
    yield text("another encoder", "metadata", rows, text_encoder_hash="0")
