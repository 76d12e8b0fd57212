"""Encoding of a folder with a report on the terminal."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from vsa.data.captions_page import write_captions_page
from vsa.data.clip_plan import ClipPlan
from vsa.data.codecs import WanVAE
from vsa.data.encode import EncodeOptions, UnusableFiles, encode_folder
from vsa.data.encode_page import write_page
from vsa.data.encoders import EncoderChoice
from vsa.data.prompts import tidy
from vsa.data.shards import LatentReader
from vsa.errors import first_of, usable_device


def encode_and_tell(videos: Path, out: Path, encoders: EncoderChoice, options: EncodeOptions) -> None:
    """Encode a folder and print skipped files, the content of the data set and the command to train on it.

    Args:
        videos: folder of videos and images.
        out: folder of shards.
        encoders: choice of codec and text encoder.
        options: options of `encode_folder`; the device is also that of the text encoder.
    """
    shared = options.output.world_size > 1
    plan = ClipPlan(clips=[])

    def show_plan(planned: ClipPlan) -> None:
        nonlocal plan
        plan = planned
        print(*plan.lines(), sep="\n", flush=True)

    options = replace(options, device=usable_device(options.device, rank=options.output.rank))
    codec, text_encoder = encoders.build(options.device)
    if encoders.vae is None and isinstance(codec, WanVAE) and codec.image_to_video:
        options = replace(options, image_condition=True)
    if options.output.rank == 0:
        print(encoders.describe_text(text_encoder))
        if options.image_condition and isinstance(codec, WanVAE):
            tokens = "" if codec.image_encoder is None else f", and its tokens by {codec.image_encoder.id}"
            print(f"stored with every clip: the image condition of its first frame{tokens}")
    try:
        report = encode_folder(videos, out, options, codec=codec, text_encoder=text_encoder, show_plan=show_plan)
    except UnusableFiles as error:
        # the error message itself names a single problem
        if len(error.problems) > 1:
            print(*first_of([f"{name}: {reason}" for name, reason in error.problems]), sep="\n", file=sys.stderr)
        raise
    for name, reason in report.skipped:
        print(f"left out {name}: {reason}")
    if not shared:
        index = LatentReader(out).index
        facts = {"Codec": codec.id, "Text encoder": text_encoder.id}
        facts |= {"Frame rate": f"{options.clips.fps:g} frames per second"} if options.clips.fps else {}
        print(f"what it holds: {write_page(out, videos, report, plan, facts)}")
        print(index.summary())
        page = write_captions_page(out, codec, device=options.device)
        print(f"to read the captions beside their clips: {page}")
    elif report.complete:
        print("every part is done: run the command once more without --rank and --world-size")
    print(f"{report.samples} samples in {out}, {len(report.skipped)} left out")
    if shared:
        return
    shapes = {sample.latent_shape for sample in index.samples.values()}
    if settings := encoders.training_settings(str(out), str(videos), shapes):
        # clips of a film are held out together
        settings += ["data.val_by=file"] if options.clips.films else []
        print(f"to train on them: vsa train {shlex.join(settings)}")
    if trigger := tidy(options.trigger):
        prompt = shlex.quote(f"{trigger} ...")
        print(f"every caption begins with {trigger!r}, and so should prompts: vsa sample RUN --prompt {prompt}")
