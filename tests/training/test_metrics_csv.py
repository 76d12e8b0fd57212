"""metrics.csv: one row per step, new columns, rows past a resume cut."""

import csv

from vsa.training.metrics_csv import MetricsCSV


def _rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_metrics_of_one_step_share_a_row_and_columns_grow(tmp_path):
    logger = MetricsCSV(str(tmp_path))
    logger.start(0)
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
    logger.start(0)
    for step in (10, 20, 30):
        logger.log_metrics({"loss": step}, step)
    logger.finalize("killed")
    # a kill in the middle of a line
    with open(logger.path, "a") as file:
        file.write("4")
    resumed = MetricsCSV(str(tmp_path))
    resumed.start(20)
    resumed.log_metrics({"loss": 99}, 30)
    resumed.finalize("done")
    assert [(r["step"], r["loss"]) for r in _rows(resumed.path)] == [("10", "10"), ("20", "20"), ("30", "99")]
    fresh = MetricsCSV(str(tmp_path))
    fresh.start(0)
    assert _rows(fresh.path) == []
