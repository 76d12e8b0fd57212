"""Which points of a sweep count as finished."""

from __future__ import annotations

import json
import os

import pytest

from vsa.checkpoints.run_folder import locked
from vsa.sweeps.job_queue import Job
from vsa.sweeps.points import Point
from vsa.sweeps.record import SweepRecord


def test_a_run_stopped_in_its_last_step_is_not_finished(tmp_path):
    """It lacks its last validation, whatever its process ended with."""
    point = Point("a", ())
    record = SweepRecord(tmp_path, sweep="s", command="vsa sweep s", settings=())
    record.note({point: Job("a", (), tmp_path / "a.log", status="finished")})
    assert not record.finished(point)
    (tmp_path / "a").mkdir()
    manifest = tmp_path / "a" / "run.json"
    ends = {
        "stopped": [{"how": "stopped"}],
        "killed": [{"step": 0}],
        "went on": [{"how": "stopped"}, {"how": "finished"}],
    }
    for how, starts in ends.items():
        manifest.write_text(json.dumps({"written_by": "vsa-train", "starts": starts}))
        assert record.finished(point) == (how == "went on")
    # of an earlier version
    manifest.write_text('{"written_by": "vsa-train"}')
    assert record.finished(point)


def test_a_point_that_is_started_over_is_set_aside_with_its_log(tmp_path):
    """Whatever lies in its folder; the next one takes the next name that neither a run nor a log has."""
    point, record = Point("a", ()), SweepRecord(tmp_path, sweep="s", command="vsa sweep s", settings=())
    assert record.forget(point) is None
    (tmp_path / "a.2.log").write_text("mine")
    for number, name in ((1, "a.1"), (2, "a.3")):
        (tmp_path / "a" / "notes").mkdir(parents=True)
        (tmp_path / "a" / "notes" / "mine").write_text(f"notes {number}")
        (tmp_path / "a.log").write_text(f"log {number}")
        record.note({point: Job("a", (), tmp_path / "a.log", status="finished")})
        assert record.forget(point) == tmp_path / name
        assert (tmp_path / name / "notes" / "mine").read_text() == f"notes {number}"
        assert (tmp_path / f"{name}.log").read_text() == f"log {number}"
        assert not record.changed(point)
    assert sorted(os.listdir(tmp_path)) == ["a.1", "a.1.log", "a.2.log", "a.3", "a.3.log", "sweep.json"]
    # a run that goes on there is in nobody's way
    (tmp_path / "a").mkdir()
    with locked(tmp_path / "a"), pytest.raises(ValueError, match="is in use by process"):
        record.forget(point)
    assert (tmp_path / "a").is_dir()
