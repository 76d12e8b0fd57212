"""A folder of clips with everything that can be wrong."""

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
