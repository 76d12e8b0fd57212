"""The readers of text, JSON, YAML and CSV: bounded, never waiting, and every error names the file."""

import os
import socket
import time
from pathlib import Path

import pytest

from vsa.files import (
    MAX_DEPTH,
    MAX_LEVELS,
    check_kind,
    inner_name,
    open_regular,
    parse_json,
    read_bytes,
    read_csv,
    read_json,
    read_text,
    read_yaml,
)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket", "link to a pipe"])
def test_only_regular_files_are_opened_and_nothing_waits(tmp_path, kind):
    path = tmp_path / "x"
    listener = socket.socket(socket.AF_UNIX)
    if "pipe" in kind:
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        listener.bind(str(path))
    if "link" in kind:
        link = tmp_path / "link"
        link.symlink_to(path)
        path = link
    start = time.monotonic()
    with listener, pytest.raises((ValueError, OSError), match=str(path)):
        open_regular(path)
    assert time.monotonic() - start < 1


def test_files_are_read_up_to_a_limit(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"12345")
    assert read_bytes(path, limit=5) == b"12345"
    with pytest.raises(ValueError, match=f"{path} has more than 4 B"):
        read_bytes(path, limit=4)
    with open(path, "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(ValueError, match=f"{path} has more than 67.1 MB"):
        read_json(path)
    with pytest.raises(FileNotFoundError):
        read_bytes(tmp_path / "missing")


def test_links_that_lead_out_of_a_folder_are_refused(tmp_path):
    folder = tmp_path / "run"
    (folder / "deep").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (folder / "own").write_text("own")
    (folder / "deep" / "link").symlink_to("../own")
    (folder / "out").symlink_to("../secret")
    (folder / "up").symlink_to("..")
    assert read_text(folder / "deep" / "link", inside=folder) == "own"
    for name in ("out", "up/secret", "../secret", "deep/../../secret"):
        with pytest.raises(ValueError, match="leads out of"):
            read_text(folder / name, inside=folder)
        # the user's own links are followed
        assert read_text(folder / name) == "secret"


def test_text_is_utf8_without_a_byte_order_mark(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfa\r\nb\xc3\xa9")
    assert read_text(path) == "a\nbé"
    for damage, word in ((b"\xff\xfe", "UTF-8"), (b"a\0", "NUL")):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=f"{path}.*{word}"):
            read_text(path)


def _nested(levels: int, opening: str = "[", closing: str = "]") -> str:
    return opening * levels + closing * levels


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", "5", '"x"', _nested(MAX_DEPTH + 1), _nested(100_000), "[" * 1_000_000),
        *('{"a":' * 100_000, '{"a": 1' + "0" * 5000 + "}", '{"a": 1, "a": 2}', '{"a": \0}', "\ufffe{}"),
    ],
)
def test_damaged_json_is_one_error_that_names_the_file(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=str(path)) as caught:
        read_json(path)
    assert len(str(caught.value)) < 300 + len(str(path))


def test_good_json_is_read():
    text = _nested(MAX_DEPTH)
    assert repr(parse_json(text, "x", list)) == text
    assert parse_json(b'\xef\xbb\xbf{"a": [1, 1e3, null]}', "x") == {"a": [1, 1000.0, None]}


SHAPE = {"name": str, "steps?": int, "loss": float, "clips": [{"file": str | None}], "of": {str: float}}
GOOD = {"name": "a", "steps": 3, "loss": 1, "clips": [{"file": None}, {"file": "x", "more": 1}], "of": {"x": 0.5}}


def test_kinds_of_values_are_checked():
    check_kind(GOOD, SHAPE, "x")
    check_kind({name: value for name, value in GOOD.items() if name != "steps"}, SHAPE, "x")
    for name, value, message in [
        ("name", 5, "run.json has name=5, expected text"),
        ("steps", True, "run.json has steps=True, expected an integer"),
        ("loss", "x", "run.json has loss='x', expected a number"),
        ("clips", {}, r"run.json has clips=\{\}, expected a list"),
        ("clips", [{}], r"run.json lacks clips\[0\].file"),
        ("clips", [{"file": []}], r"run.json has clips\[0\].file=\[\], expected text, or null"),
        ("of", {"x": None}, "run.json has of.x=None, expected a number"),
    ]:
        with pytest.raises(ValueError, match=message):
            check_kind(GOOD | {name: value}, SHAPE, "run.json")
    with pytest.raises(ValueError, match=r"run.json holds \[\], expected an object"):
        check_kind([], SHAPE, "run.json")


def test_yaml_is_bounded_in_depth_and_aliases(tmp_path):
    path = tmp_path / "config.yaml"
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12))
    damages = [bomb, "a: " + _nested(MAX_LEVELS + 1), "a: &a [*a]", "a: [", "- 1", "", "a: 2024-99-99", "a: \x07"]
    for text in [*damages, "a: !!python/object/apply:os.system [x]", "[" * 100_000]:
        path.write_text(text)
        start = time.monotonic()
        with pytest.raises(ValueError, match=str(path)):
            read_yaml(path)
        assert time.monotonic() - start < 2
    path.write_text("a: &a {b: [1, 2.5, x]}\nc: *a\n")
    assert read_yaml(path) == {"a": {"b": [1, 2.5, "x"]}, "c": {"b": [1, 2.5, "x"]}}


def test_csv_has_the_columns_and_whole_rows(tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('step,loss\n1,"2,5"\n2\n3,1.25')
    assert read_csv(path, growing=True) == (["step", "loss"], [{"step": "1", "loss": "2,5"}])
    with pytest.raises(ValueError, match=f"{path}: line 3 has 1 cells, expected 2"):
        read_csv(path)
    with pytest.raises(ValueError, match=f"{path} has no column at, it has step, loss"):
        read_csv(path, ["step", "at"], growing=True)
    for damage in (b"", b"\xff\xfe", b"step\n1\n\0\0", b'step\n"' + b"x" * 200_000 + b'"\n', b'step\n"1\n'):
        path.write_bytes(damage)
        with pytest.raises(ValueError, match=str(path)):
            read_csv(path, ["step"])


@pytest.mark.parametrize("name", ["", "/x", "../x", "a/../x", "a//x", "./x", "a\0", "a\n", 5, None, ["x"]])
def test_names_inside_files_stay_in_their_folder(name):
    with pytest.raises(ValueError, match="index names"):
        inner_name(name, "index")


def test_plain_names_inside_files_are_taken():
    for name in ("x.safetensors", "step-5/default/01-ein Hund.gif", "..x", "a..b", Path("x").name):
        assert inner_name(name, "index") == name
