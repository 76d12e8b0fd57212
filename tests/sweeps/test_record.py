"""Which points of a sweep count as finished."""

from __future__ import annotations

import json

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
