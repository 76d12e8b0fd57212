"""A page holds bytes of regular files of the run folder alone, wherever links in it lead."""

from __future__ import annotations

import base64
import os
from pathlib import Path

import pytest

from tests.reports.fake_runs import write_run
from vsa.reports.report import report
from vsa.sampling.sample_writer import DATA_CLIPS

pytestmark = pytest.mark.soak("report pages hold bytes of their run alone")
SECRET = b"what nobody may share, " * 5


@pytest.fixture
def run(tmp_path: Path, no_pictures) -> Path:
    """A run with clips, beside a file that is not its own."""
    run = write_run(tmp_path / "runs" / "one", prompts=("a red circle",))
    (tmp_path / "secret").write_bytes(SECRET)
    return run


def holds_secret(page: Path) -> bool:
    text = page.read_text(encoding="utf-8")
    return base64.b64encode(SECRET).decode()[:60] in text or SECRET.decode()[:20] in text


def clips_of(run: Path) -> list[Path]:
    return sorted((run / "samples").rglob("*.gif"))


@pytest.mark.parametrize(
    ("which", "target", "single"),
    [
        *((which, target, True) for which in ("clip", "attention.png", "loss.png") for target in ("secret", "pipe")),
        ("clip", "secret", False),
        ("clip", "missing", True),
    ],
)
def test_a_link_out_of_the_run_is_no_picture(run: Path, tmp_path: Path, which: str, target: str, single: bool):
    os.mkfifo(tmp_path / "pipe")
    path = clips_of(run)[0] if which == "clip" else run / which
    path.unlink(missing_ok=True)
    path.symlink_to(tmp_path / target)
    page = report([run if single else run.parent])
    assert not holds_secret(page)


def test_a_picture_of_the_run_is_one(run: Path):
    # controls: the clip itself, and by a link within the run
    clip = clips_of(run)[0]
    clip.write_bytes(SECRET)
    assert holds_secret(report([run]))
    clip.rename(clip.parent / "other")
    clip.symlink_to("other")
    assert holds_secret(report([run]))


def test_a_folder_of_clips_elsewhere_is_left_out(run: Path, tmp_path: Path):
    clips_of(run)[0].write_bytes(SECRET)
    (run / "samples").rename(tmp_path / "samples")
    (run / "samples").symlink_to(tmp_path / "samples")
    assert not holds_secret(report([run]))


def test_data_clips_elsewhere_are_left_out(run: Path, tmp_path: Path):
    folder = run / DATA_CLIPS
    folder.mkdir()
    (folder / "samples.json").write_text(
        '{"clips": [{"prompt": "a red circle", "codec": "x.gif", "original": "y.gif"}]}'
    )
    for name in ("x.gif", "y.gif"):
        (folder / name).symlink_to(tmp_path / "secret")
    assert not holds_secret(report([run]))


@pytest.mark.parametrize("name", ["metrics.csv", "run.json", "config.yaml", "validation.csv"])
def test_a_record_that_lies_elsewhere_is_refused(run: Path, tmp_path: Path, name: str):
    path = run / name
    if not path.exists():
        path.write_text("x")
    path.rename(tmp_path / name)
    path.symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match=rf"{name} leads out of the run folder"):
        report([run])


def test_figures_are_written_to_no_other_place(run: Path, tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (run.parent / "report").symlink_to(tmp_path / "mine")
    with pytest.raises(ValueError, match=r"report is a link to .*mine"):
        report([run.parent])
    assert not list((tmp_path / "mine").iterdir())


def test_control_characters_of_names_and_reasons_are_written_out(run: Path, capsys, monkeypatch):
    # a name in one line
    monkeypatch.setenv("COLUMNS", "300")
    evil = "a\x1b]0;title\x07b\x1b[2Jc\x9bd\u202ee"
    run.rename(run.parent / evil)
    write_run(run.parent / "two")
    (run.parent / "sweep.json").write_text(
        '{"points": [{"name": "x", "status": "failed", "reason": "because\\u001b[2J of\\u0007", "overrides": []}]}'
    )
    report([run.parent])
    out = capsys.readouterr().out
    assert r"a\x1b]0;title\x07b\x1b[2Jc\x9bd\u202ee" in "".join(out.split())
    assert r"because\x1b[2J of\x07" in out
    assert not set("\x1b\x07\x9b\u202e") & set(out)
