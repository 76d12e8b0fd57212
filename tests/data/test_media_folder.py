"""Which files of a folder are data: what is searched, left out and told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.data.test_captions import folder_of
from vsa.data.captions import read_captions
from vsa.data.media_folder import MediaFolder, media_files

LEFT_OUT = (
    *(".Trash-1000/files/x.mp4", ".ipynb_checkpoints/a.mp4", "@eaDir/a.mp4/T.jpg", ".thumbnails/a.png", ".git/a.mp4"),
    *("__MACOSX/a.mp4", "$RECYCLE.BIN/a.mp4", "System Volume Information/a.mp4", "lost+found/a.mp4", "#recycle/a.mp4"),
    *(".AppleDouble/a.mp4", "._a.mp4", "Thumbs.db", "b.mp4.part", "c.mp4.crdownload", "a.mp4~", "d.mp4.download/d.mp4"),
)


def names(folder: Path, found: MediaFolder) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in found.files]


def test_what_systems_leave_is_left_out_and_told(tmp_path: Path) -> None:
    root = folder_of(tmp_path, {name: "" for name in ("a.mp4", "deep/a.mp4", "@me/a.mp4", "#1/a.mp4", *LEFT_OUT)})
    found = media_files(root)
    # names of people and numbers are no names of systems
    assert names(root, found) == ["#1/a.mp4", "@me/a.mp4", "a.mp4", "deep/a.mp4"]
    assert sorted(found.left_out) == sorted({name.partition("/")[0] for name in LEFT_OUT})
    told = [line for line in found.lines() if "left out" in line]
    assert told == ["hidden, unfinished or of a system, left out: 17 (#recycle, $RECYCLE.BIN, .AppleDouble, ...)"]
    assert "searched: 4 folders with 4 videos and images" in list(found.lines())
    # a folder that is named is searched, and one with nothing else is told
    assert names(root / ".git", media_files(root / ".git")) == ["a.mp4"]
    only = folder_of(tmp_path / "only", {"@eaDir/a.mp4": ""})
    with pytest.raises(ValueError, match=r"^no videos in .*only, left out are @eaDir \("):
        media_files(only)


def test_linked_folders_are_read_once_and_told(tmp_path: Path) -> None:
    root = folder_of(tmp_path / "v", {"a.mp4": "", "sub/b.mp4": ""})
    other = folder_of(tmp_path / "other", {"c.mp4": "", "deep/d.mp4": "", "c.txt": "a c", "deep/d.txt": "a d"})
    targets = {"deep": other / "deep", "films": other, "films2": other, "sub2": Path("sub"), "up": Path("..")}
    targets |= {"gone": tmp_path / "nowhere", "one.mp4": other / "c.mp4"}
    for name, target in targets.items():
        (root / name).symlink_to(target)
    (other / "loop").symlink_to(root)
    found = media_files(root)
    assert names(root, found) == ["a.mp4", "deep/d.mp4", "films/c.mp4", "one.mp4", "sub/b.mp4"]
    assert found.links == {"deep": other / "deep", "films": other, "one.mp4": other / "c.mp4"}
    reasons = dict(found.ignored)
    assert sorted(reasons) == ["films/deep", "films/loop", "films2", "gone", "sub2", "up"]
    assert reasons["up"] == f"it leads to {tmp_path}, which is searched already or holds what is"
    assert reasons["gone"] == "it is a link to a missing file or to itself"
    told = list(found.lines())
    assert f"links to other places, followed: 3 (deep to {other / 'deep'}, films to {other}, " in "\n".join(told)
    # captions of a linked folder lie in it
    captions = read_captions(root, None, found.files)
    assert captions.of == {root / "deep/d.mp4": ["a d"], root / "films/c.mp4": ["a c"]}


def test_a_folder_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of(tmp_path, {"a.mp4": "", "secret/b.mp4": ""})
    real = __import__("os").scandir

    def scandir(path):
        if str(path).endswith("secret"):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr("os.scandir", scandir)
    ((name, reason),) = media_files(root).ignored
    assert name.endswith("secret")
    assert "Permission denied" in reason


def test_equal_files_are_told(tmp_path: Path) -> None:
    root = folder_of(tmp_path, {"a.mp4": "same", "b.mp4": "same", "c.mp4": "other", "d.mp4": "mess", "e.mp4": "same"})
    assert "equal files: 2 (b.mp4 and a.mp4, e.mp4 and a.mp4)" in list(media_files(root).lines())
    (root / "b.mp4").unlink()
    (root / "e.mp4").unlink()
    assert not list(media_files(root).lines())


def test_links_of_captions_stay_in_the_folder(tmp_path: Path) -> None:
    secret = folder_of(
        tmp_path / "secret", {"x.txt": "a secret", "x.jsonl": '{"video": "a.mp4", "caption": "a secret"}'}
    )
    root = folder_of(tmp_path / "v", {"a.mp4": "", "texts/a.txt": "inside"})
    for suffix in (".txt", ".caption", ".json"):
        link = root / f"a{suffix}"
        link.symlink_to(secret / "x.txt")
        captions = read_captions(root, None, [root / "a.mp4"])
        assert not captions.of
        assert captions.missing == {root / "a.mp4": f"{link} leads out of {root} to {secret / 'x.txt'}: copy it"}
        link.unlink()
    for name in ("captions.jsonl", "metadata.jsonl", "videos2caption.json"):
        (root / name).symlink_to(secret / "x.jsonl")
        with pytest.raises(ValueError, match=rf"{name} leads out of .*v to .*x\.jsonl: name it with --captions$"):
            read_captions(root, None, [root / "a.mp4"])
        (root / name).unlink()
    # one that the user names may lie anywhere, and links inside are of the folder
    (root / "named.jsonl").symlink_to(secret / "x.jsonl")
    assert read_captions(root, root / "named.jsonl", [root / "a.mp4"]).of == {root / "a.mp4": ["a secret"]}
    (root / "a.txt").symlink_to("texts/a.txt")
    assert read_captions(root, None, [root / "a.mp4"]).of == {root / "a.mp4": ["inside"]}


def test_captions_beside_what_links_of_videos_lead_to(tmp_path: Path) -> None:
    films = folder_of(tmp_path / "films", {"x.mp4": "", "x.txt": "of x", "y.txt": "of another"})
    root = folder_of(tmp_path / "v", {"b.mp4": ""})
    for name, target in {"a.mp4": "x.mp4", "a.txt": "x.txt"}.items():
        (root / name).symlink_to(films / target)
    assert read_captions(root, None, [root / "a.mp4"]).of == {root / "a.mp4": ["of x"]}
    (root / "a.txt").unlink()
    (root / "a.txt").symlink_to(films / "y.txt")
    assert "leads out of" in read_captions(root, None, [root / "a.mp4"]).missing[root / "a.mp4"]
    # what links alone call a video and its text is neither
    for video, text in {"passwd": "passwd", "x.mp4": "x.mp4", "key.png": "key.pem", "key": "key.txt"}.items():
        for name, target in {"c.mp4": video, "c.txt": text}.items():
            (films / target).touch()
            (root / name).symlink_to(films / target)
        refusal = f"{root / 'c.txt'} leads out of {root} to {films / text}: copy it"
        assert read_captions(root, None, [root / "c.mp4"]).missing == {root / "c.mp4": refusal}
        (root / "c.mp4").unlink()
        (root / "c.txt").unlink()
    # the cache of the hub: links to files by their digests
    cache = folder_of(
        tmp_path / "datasets--me--films", {"blobs/1": "", "blobs/2": "of a", "snapshots/main/sub/x.mp4": ""}
    )
    snapshot = cache / "snapshots" / "main"
    for name, blob in {"a.mp4": "1", "a.txt": "2"}.items():
        (snapshot / name).symlink_to(Path("../../blobs", blob))
    assert read_captions(snapshot, None, [snapshot / "a.mp4"]).of == {snapshot / "a.mp4": ["of a"]}
