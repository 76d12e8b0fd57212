"""The frames of a video stream with their times, from its beginning or from a keyframe on."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import av
from av.container import InputContainer
from av.error import InvalidDataError
from av.filter import Graph
from av.video.frame import PictureType
from av.video.stream import VideoStream
from PIL import Image

from vsa.data.pixels import View

Shown = tuple[av.VideoFrame | Image.Image, View, float, bool]
"""A decoded picture, how it is shown, until when, in seconds from the first one, and whether it is damaged."""

# of titles that are not UTF-8, which from 19 on need no option
_LENIENT: dict[str, Any] = {"metadata_errors": "replace"} if int(av.__version__.split(".")[0]) < 19 else {}
# decoders that know the alpha of a codec
_WITH_ALPHA = {"vp8": "libvpx", "vp9": "libvpx-vp9"}
# codecs with one frame in every packet, whose keyframes need nothing before them
_CODECS = ("h264", "hevc", "vp9", "av1", "prores", "dnxhd", "mjpeg")


class FrameTable(NamedTuple):
    """The frames of a video stream, known without decoding them.

    Args:
        unit: unit of time stamps in seconds.
        stamps: time stamp of each frame, ascending.
        keys: numbers of the keyframes, ascending.
    """

    unit: float
    stamps: list[int]
    keys: list[int]

    def number_at(self, seconds: float) -> int:
        """Number of the newest frame at or before a time from the first one."""
        return bisect_right(self.stamps, self.stamps[0] + seconds / self.unit) - 1

    def key_before(self, number: int) -> int:
        """Number of the last keyframe up to a frame, the first one for frames before it."""
        return self.keys[max(bisect_right(self.keys, number) - 1, 0)]

    def time(self, number: int) -> float:
        """Time of a frame in seconds from the first one."""
        return (self.stamps[number] - self.stamps[0]) * self.unit


def opened(path: Path) -> InputContainer:
    """The container of a file, whatever the bytes of its titles are."""
    return av.open(str(path), **_LENIENT)


def read_table(path: Path, index: int, seconds: float) -> FrameTable | None:
    """The frames of a stream from its packets; None if these do not tell it, or within so many seconds.

    Args:
        path: the file.
        index: place of the stream.
        seconds: time limit.
    """
    over, first = time.monotonic() + seconds, None
    packets = list[tuple[int, bool]]()
    # what is wrong with a file is told when it is decoded
    with suppress(av.FFmpegError, OSError, ValueError), opened(path) as container:
        stream: Any = container.streams[index]
        stream.codec_context.thread_count = 1
        for packet in container.demux(stream):
            first = first or next(iter(packet.decode()), None)
            if packet.size:
                if packet.pts is None or packet.is_corrupt or packet.is_discard or time.monotonic() > over:
                    return None
                packets.append((packet.pts, packet.is_keyframe))
        packets.sort()
        stamps, is_key = (list(column) for column in zip(*packets, strict=True))
        keys = [number for number, flag in enumerate(is_key) if flag]
        known = first is not None and not first.interlaced_frame and (first.pts, 0) == (stamps[0], keys[0])
        single = len({*stamps}) == len(stamps) and stream.frames in (0, len(stamps))
        # the format AVI has no time stamps, they are guessed
        if known and single and stream.codec_context.codec.canonical_name in _CODECS and container.format.name != "avi":
            return FrameTable(float(stream.time_base), stamps, keys)
    return None


def timed_frames(container: InputContainer, stream: VideoStream) -> Iterator[Shown]:
    """All frames with the ends that follow from their time stamps."""
    return _timed(_whole_frames(container, stream), stream)


def frames_before(
    container: InputContainer, stream: VideoStream, table: FrameTable, number: int
) -> tuple[Iterator[Shown], int] | None:
    """The frames from the last keyframe up to a frame on, and the number of the keyframe.

    They equal those of `timed_frames`; None if the decoder begins elsewhere.
    """
    # some formats seek by decoding times, and come to the next keyframe
    key = table.key_before(number)
    for wanted in (key, table.key_before(key - 1)):
        container.seek(table.stamps[wanted], stream=stream)
        decoded = _decoded(container, stream)
        # before it are frames that need the keyframe before
        first = next((item for item in decoded if item[0].key_frame), None)
        if first is None or first[0].pts is None:
            continue
        place = bisect_left(table.stamps, first[0].pts)
        if place <= number and table.stamps[place] == first[0].pts:
            begin = float(table.stamps[0] * stream.time_base) if stream.time_base else 0.0
            return _timed(chain([first], decoded), stream, begin), place
    return None


def _timed(
    frames: Iterator[tuple[av.VideoFrame, bool]], stream: VideoStream, begin: float | None = None
) -> Iterator[Shown]:
    """Frames with their ends, in seconds from the time `begin`, that of the first one by default."""
    rate, aspect = rate_of(stream), aspect_of(stream)
    previous, damaged = next(frames, (None, False))
    if previous is None:
        return
    end, begin = 0.0, (previous.time or 0.0) if begin is None else begin
    for frame, is_damaged in frames:
        end = end + 1 / rate if frame.time is None else frame.time - begin
        yield previous, View.of_frame(previous, aspect), end, damaged
        previous, damaged = frame, is_damaged
    end += previous.duration * float(previous.time_base or 0) or 1 / rate
    yield previous, View.of_frame(previous, aspect), end, damaged


def _decoded(container: InputContainer, stream: VideoStream) -> Iterator[tuple[av.VideoFrame, bool]]:
    """Frames with their alpha, and whether FFmpeg found them damaged, or any since the last keyframe."""
    name = _WITH_ALPHA.get(stream.codec_context.name) if stream.metadata.get("alpha_mode") == "1" else None
    decoder: Any = av.CodecContext.create(name, "r") if name else stream.codec_context
    # with it a decoder returns the errors that it would only write to a log
    decoder.options = {"err_detect": "explode"}
    waiting, begun, damaged, lost = list[tuple[av.VideoFrame, bool]](), False, False, False
    # time of the first keyframe, and whether the packet before and this one are shown before it
    begin, early = 0, [False, False]
    # keyframes since the last damage of a packet, which decoders return some packets later
    keys = set[int | None]()
    for packet in container.demux(stream):
        keys |= {packet.pts} if packet.is_keyframe else set()
        early = [early[1], begun and packet.pts is not None and packet.pts < begin]
        try:
            frames, harmed = decoder.decode(packet), packet.is_corrupt
        except InvalidDataError:
            # of pictures that are not there; some decoders tell it with the packet behind
            frames, harmed, lost = [], not any(early), lost or (begun and not any(early)) or packet.is_keyframe
        if packet.is_keyframe and not begun:
            begun, begin = True, packet.pts or 0
        if harmed:
            damaged = True
            keys.clear()
        for frame in frames:
            damaged = frame.is_corrupt or (damaged and not (frame.key_frame and frame.pts in keys))
            waiting.append((frame, damaged or lost))
            lost = False
            # frames of type B, 16 at most, are shown before the later frame that they are made of
            if frame.pict_type != PictureType.B or len(waiting) > 16:
                yield from ((each, was or frame.is_corrupt) for each, was in waiting)
                waiting.clear()
    yield from waiting


def _whole_frames(container: InputContainer, stream: VideoStream) -> Iterator[tuple[av.VideoFrame, bool]]:
    """Decoded frames; of an interlaced video by FFmpeg's filter bwdif, one a frame."""
    decoded = _decoded(container, stream)
    first, damaged = next(decoded, (None, False))
    if first is None:
        return
    if not first.interlaced_frame:
        yield from chain([(first, damaged)], decoded)
        return
    graph: Any = Graph()
    source = graph.add_buffer(template=stream, time_base=first.time_base)
    bwdif = graph.add("bwdif", "mode=send_frame:deint=interlaced")
    graph.link_nodes(source, bwdif, graph.add("buffersink")).configure()
    for frame, is_damaged in chain([(first, damaged)], decoded, [(None, False)]):
        graph.push(frame)
        with suppress(BlockingIOError, EOFError):
            while True:
                yield graph.pull(), damaged or is_damaged
        damaged = is_damaged


def rate_of(stream: VideoStream) -> float:
    """Frames per second, of a variable rate the mean."""
    return float(stream.average_rate or stream.guessed_rate or 1)


def aspect_of(stream: VideoStream) -> float:
    """Width of a stored pixel, relative to its height."""
    return float(stream.sample_aspect_ratio or 1)
