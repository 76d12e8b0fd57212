"""Encoding of folders with options by name, whichever group they belong to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

from vsa.cli.values import made_of
from vsa.data import encode as library
from vsa.data.clip_plan import ClipPlan
from vsa.data.clip_rules import ClipRules
from vsa.data.codecs import Codec, HaarCodec
from vsa.data.encode import EncodeOptions
from vsa.data.resumable_writer import OutputOptions, PartsReport
from vsa.data.text import HashedNgramEncoder, TextEncoder


def encode_folder(
    videos: Path,
    out: Path,
    *,
    codec: Codec | None = None,
    text_encoder: TextEncoder | None = None,
    tell: Callable[[str], None] = print,
    show_plan: Callable[[ClipPlan], None] = lambda plan: None,
    **options: Any,
) -> PartsReport:
    """`encode_folder` with the embedded encoders and the fields of `EncodeOptions`, its clips and its output."""
    known = (field.name for kind in (EncodeOptions, ClipRules, OutputOptions) for field in fields(kind))
    assert options.keys() <= set(known), options
    encoders = {"codec": codec or HaarCodec(), "text_encoder": text_encoder or HashedNgramEncoder()}
    return library.encode_folder(
        videos, out, made_of(EncodeOptions, options), **encoders, tell=tell, show_plan=show_plan
    )
