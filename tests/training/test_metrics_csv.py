"""metrics.csv: one row per step, new columns, rows past a resume cut."""

import csv
import os
from pathlib import Path

from tests.disks import small_files
from vsa.training.metrics_csv import MetricsCSV


def _rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def begin(logger, step):
    logger.load_state_dict({"step": step})
    logger.open()


def test_metrics_of_one_step_share_a_row_and_columns_grow(tmp_path):
    logger = MetricsCSV(str(tmp_path))
    begin(logger, 0)
    logger.log_metrics({"loss": 1.0}, 10)
    logger.log_metrics({"lr": 0.1}, 10)
    logger.log_metrics({"loss": 0.5}, 20)
    logger.log_metrics({"val": 2.0}, 20)
    logger.save()
    logger.log_metrics({"late": 3.0}, 20)
    logger.finalize("done")
    rows = _rows(logger.path)
    assert [r["step"] for r in rows] == ["10", "20"]
    assert rows[0]["lr"] == "0.1"
    assert rows[1]["val"] == "2"
    assert rows[1]["late"] == "3"
    assert rows[0]["val"] == ""


def test_resume_cuts_rows_past_its_step(tmp_path):
    logger = MetricsCSV(str(tmp_path))
    begin(logger, 0)
    for step in (10, 20, 30):
        logger.log_metrics({"loss": step}, step)
    logger.finalize("killed")
    # a kill in the middle of a line
    with open(logger.path, "a") as file:
        file.write("4")
    resumed_logger = MetricsCSV(str(tmp_path))
    begin(resumed_logger, 20)
    resumed_logger.log_metrics({"loss": 99}, 30)
    resumed_logger.finalize("done")
    assert [(r["step"], r["loss"]) for r in _rows(resumed_logger.path)] == [("10", "10"), ("20", "20"), ("30", "99")]
    # a kill has cut the last number
    resumed_logger.path.write_bytes(resumed_logger.path.read_bytes() + b"40,9")
    again = MetricsCSV(str(tmp_path))
    begin(again, 40)
    assert [r["step"] for r in _rows(again.path)] == ["10", "20", "30"]
    fresh = MetricsCSV(str(tmp_path))
    begin(fresh, 0)
    assert _rows(fresh.path) == []


def test_a_power_cut_leaves_the_rows_of_the_checkpoint(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    flushes, fsync = [], os.fsync

    def record(descriptor: int) -> None:
        fsync(descriptor)
        file = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        flushes.append(file.read_bytes() if file.is_file() else b"")

    monkeypatch.setattr(os, "fsync", record)
    logger = MetricsCSV(str(tmp_path))
    begin(logger, 0)
    for step in range(1, 8):
        logger.log_metrics({"loss": step}, step)
        # the columns are known: from here on rows are appended
        if step == 1:
            logger.save()
            flushes.clear()
        if step == 5:
            assert not flushes
            # as every checkpoint does
            logger.save()
            assert len(flushes) == 1
    # what was not flushed is zero, or was never written
    after, (flushed,) = logger.path.read_bytes(), flushes
    assert flushed == b"step,loss\r\n1,1\r\n2,2\r\n3,3\r\n4,4\r\n5,5\r\n"
    assert len(after) > len(flushed)
    for tail in (b"\0" * (len(after) - len(flushed)), b"", b"6,\0\0\0\0", b"6,6.2"):
        caplog.clear()
        logger.path.write_bytes(flushed + tail)
        resumed = MetricsCSV(str(tmp_path))
        begin(resumed, 5)
        assert [(row["step"], row["loss"]) for row in _rows(resumed.path)] == [(str(n), str(n)) for n in range(1, 6)]
        told = f"warning: {logger.path}: a kill or power cut has damaged its end, which was cut off"
        assert [record.getMessage() for record in caplog.records] == [told] * bool(tail)
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_a_full_disk_is_told_once_loses_no_older_row_and_never_stops(tmp_path, caplog):
    caplog.set_level("INFO")
    logger = MetricsCSV(str(tmp_path))
    begin(logger, 0)

    def log(column: str, steps: range) -> None:
        for step in steps:
            logger.log_metrics({column: 1.0}, step)
            logger.save()

    with small_files(100):
        log("loss", range(1, 100))
    steps = [int(row["step"]) for row in _rows(logger.path)]
    row_count = len(steps)
    assert steps == list(range(1, row_count + 1))
    assert 10 < row_count < 99
    # a new column rewrites the file
    with small_files(60):
        log("new", range(200, 201))
        logger.finalize("done")
    first, last = (record.getMessage() for record in caplog.records)
    assert first.startswith(f"warning: cannot write {logger.path}: File too large")
    assert last == f"warning: {logger.path} lacks the last {100 - row_count} rows, for which there was no room"
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.csv"]
    resumed_logger = MetricsCSV(str(tmp_path))
    begin(resumed_logger, row_count)
    assert [row["step"] for row in _rows(resumed_logger.path)] == [str(n + 1) for n in range(row_count)]
    # a late metric of a row that is in the file counts as a missing row until it is written
    caplog.clear()
    late = MetricsCSV(str(tmp_path / "late"))
    late.path.parent.mkdir()
    begin(late, 0)
    for step in (1, 2):
        late.log_metrics({"loss": 1.0, "val": 2.0}, step)
    late.save()
    late.log_metrics({"val": 3.0}, 2)
    with small_files(1):
        late.finalize("done")
    assert caplog.records[-1].getMessage().endswith(" lacks the last 1 rows, for which there was no room")
    # with room again nothing is missing
    caplog.clear()
    logger.finalize("done")
    assert [int(row["step"]) for row in _rows(logger.path)] == [*range(1, 100), 200]
    assert not caplog.records
