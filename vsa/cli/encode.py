"""Arguments of `vsa encode`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vsa.cli.options import MANY, Precision, option
from vsa.cli.values import made_of

Shots = Literal["auto", "transnet", "scenedetect", "none"]
CLIPS, BY, OUTPUT = "Clips", "Encoders", "Output"


def encode(
    videos: Annotated[Path, typer.Argument(help="folder of videos and images, searched with its subfolders")],
    out: Annotated[Path, typer.Argument(help="folder of shards to write")],
    captions: Annotated[
        Path | None, option("caption file: .jsonl, .json, .csv or .txt (captions.*, metadata.*)")
    ] = None,
    trigger: Annotated[str, option("words put before every caption, as '--trigger sks'")] = "",
    captioner: Annotated[
        str | None, option("image-to-text model that describes clips without a caption (folder, hub id)")
    ] = None,
    size: Annotated[
        tuple[int, int] | None,
        option("scale to cover, crop the centre (as stored)", panel=CLIPS, whole=(1, 8192), metavar="HEIGHT WIDTH"),
    ] = None,
    frames: Annotated[
        int | None, option("frames of a clip, from the start (all)", panel=CLIPS, whole=(1, 100_000))
    ] = None,
    fps: Annotated[
        float | None, option("resample to this rate by the newest frames (as stored)", panel=CLIPS, real=(0.01, 240))
    ] = None,
    buckets: Annotated[
        str, option("available clip sizes, chosen by aspect ratio", panel=CLIPS, metavar="HxWxT,...")
    ] = "",
    clips_per_film: Annotated[
        int | None, option("most clips of a film, 0 for all (one, from the start)", panel=CLIPS, whole=(0, MANY))
    ] = None,
    stride: Annotated[
        int | None, option("frames from clip to clip of a film (a clip)", panel=CLIPS, whole=(1, MANY))
    ] = None,
    shots: Annotated[
        Shots | None, option("what finds the shots of films, which no clip leaves (auto)", panel=CLIPS)
    ] = None,
    model: Annotated[str | None, option("Wan pipeline for VAE and text encoder (folder, hub id)", panel=BY)] = None,
    vae: Annotated[str | None, option("pipeline or VAE folder of Wan or LTX for the VAE only", panel=BY)] = None,
    text: Annotated[
        str | None,
        option("text encoder: sentence, ngrams, or that of a Wan pipeline (sentence with the extra text)", panel=BY),
    ] = None,
    vae_dtype: Annotated[Precision, option("compute dtype of the VAE", panel=BY)] = "float32",
    text_dtype: Annotated[Precision, option("compute dtype of the text encoder", panel=BY)] = "bfloat16",
    codec: Annotated[
        Literal["dct", "haar"], option("embedded codec: cosine transform, or the wavelets of earlier sets", panel=BY)
    ] = "dct",
    channels: Annotated[
        int, option("channels of the embedded codec; 24, 48 or 192 keep more detail", panel=BY, whole=(1, MANY))
    ] = 16,
    text_dim: Annotated[
        int | None, option("token width of the n-gram encoder (64)", panel=BY, whole=(1, 65_536))
    ] = None,
    max_tokens: Annotated[
        int | None,
        option(
            "maximum number of tokens of a caption (n-grams 16, sentence 128, Wan 512)", panel=BY, whole=(1, 65_536)
        ),
    ] = None,
    device: Annotated[str | None, option("device of the networks (cuda if available)", panel=BY)] = None,
    image_condition: Annotated[
        bool, option("store image conditions (by itself with --model of image-to-video)", "--image-condition", panel=BY)
    ] = False,
    dtype: Annotated[Precision, option("dtype of the stored latents", panel=OUTPUT)] = "float16",
    samples_per_shard: Annotated[
        int, option("samples per shard, the most that an interruption loses", panel=OUTPUT, whole=(1, MANY))
    ] = 256,
    overwrite: Annotated[bool, option("replace the data set in OUT", "--overwrite", panel=OUTPUT)] = False,
    add: Annotated[bool, option("add the new files of VIDEOS to the data set in OUT", "--add", panel=OUTPUT)] = False,
    decode_seconds: Annotated[
        float, option("time limit per file, s; a slower file is unusable", panel=OUTPUT, real=(0.1, 86_400))
    ] = 120,
    decode_memory: Annotated[
        float, option("memory limit per file, GiB without frames", panel=OUTPUT, real=(0.1, 4096))
    ] = 16,
    workers: Annotated[int, option("files that are decoded at the same time", panel=OUTPUT, whole=(1, 256))] = 1,
    skip_bad: Annotated[bool, option("skip and list unusable files", "--skip-bad", panel=OUTPUT)] = False,
    rank: Annotated[int, option("rank of this process", panel=OUTPUT, whole=(0, MANY))] = 0,
    world_size: Annotated[int, option("number of processes that share the work", panel=OUTPUT, whole=(1, MANY))] = 1,
) -> None:
    """Encode a folder of captioned videos and images into shards of latents and text.

    Captions: captions.jsonl in the folder (lines of {"video": "a.mp4", "captions": ["...", "..."]}), the files of
    other trainers, the file of --captions, or a.txt or a.json beside a.mp4.

    \b
    vsa encode VIDEOS SHARDS --size 128 128 --frames 16
    vsa encode FILMS SHARDS --size 128 128 --frames 16 --clips-per-film 20
    vsa encode VIDEOS SHARDS --model Wan-AI/Wan2.1-T2V-1.3B-Diffusers --buckets 448x832x61,480x480x33

    Repeat an interrupted command to continue. To share the work, run it with --rank R --world-size N on every GPU,
    then once without them. With --add, more films become a new revision of a finished data set; runs keep theirs.
    """
    arguments = locals()
    from vsa.data.buckets import Bucket
    from vsa.data.encode import EncodeOptions
    from vsa.data.encode_report import encode_and_tell
    from vsa.data.encoders import EncoderChoice
    from vsa.errors import usable_device

    if device is None:
        arguments["device"] = usable_device(None, rank=rank)
    arguments["buckets"] = tuple(Bucket.parse(part) for part in buckets.split(",") if part)
    encode_and_tell(videos, out, made_of(EncoderChoice, arguments), made_of(EncodeOptions, arguments))
