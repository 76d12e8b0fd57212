"""A folder of clips with everything that can be wrong, and a decoder that fails as libraries do."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video


def write_spoilt(folder: Path) -> Path:
    """Two good clips, and one file for everything that can be wrong."""
    for i, name in enumerate(("a", "b", "empty", "latin", "silent")):
        write_video(folder / f"{name}.mp4", render_clip(0, i, size=(8, 32, 32))[0])
        (folder / f"{name}.txt").write_text(f"clip {name}")
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes("gr\xfcn".encode("latin-1"))
    (folder / "silent.txt").unlink()
    write_video(folder / "one.mp4", render_clip(0, 0, size=(1, 32, 32))[0])
    write_video(folder / "two.mp4", render_clip(0, 0, size=(2, 32, 32))[0])
    (folder / "zero.mp4").write_bytes(b"")
    for name in ("one", "two", "zero"):
        (folder / f"{name}.txt").write_text(name)
    lines = ['{"video": "gone.mp4", "caption": "x"}', "{", '{"video": "silent.mp4", "captions": ["", " "]}']
    (folder / "captions.jsonl").write_text("\n".join(lines))
    (folder / "folder.mp4").mkdir()
    (folder / "link.mp4").symlink_to(folder.parent / "nowhere.mp4")
    return folder


# prepended to the decoder process: names of files simulate the faults that real files cause in libraries
_DECODER = """
import os, time
import vsa.data.video_files as video_files

def opened(path, *threads, real=video_files._opened):
    if path.name.startswith("hang"):
        time.sleep(1e6)
    if path.name.startswith("abort"):
        os.abort()
    if path.name.startswith("exit"):
        os._exit(0)
    if path.name.startswith("segment"):
        os.kill(os.getpid(), 11)
    if path.name.startswith("grow"):
        grown = [bytes(1 << 20)]
        while True:
            grown.append(bytearray(1 << 26))
    return real(path, *threads)

video_files._opened = opened
"""


@contextmanager
def faulty_decoder(folder: Path) -> Iterator[None]:
    """Let decoder processes started in the block hang, crash, exit or grow at files with such names."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_DECODER)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
