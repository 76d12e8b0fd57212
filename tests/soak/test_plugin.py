"""The table of the soak: a row is green only if all of its tries were made and survived, on any number of workers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROWS = """
import os, time
import pytest

@pytest.mark.soak("good", tries=5, short=2)
def test_good(attempt, record_property):
    if attempt == 7:
        record_property("note", "the first")

@pytest.mark.soak("cases")
@pytest.mark.parametrize("case", ["a", "b"])
def test_cases(case):
    pass

@pytest.mark.soak("loses one", tries=5, short=2)
def test_loses(attempt):
    assert attempt != 8, "of\\nseed 8 \\ud800"

@pytest.mark.soak("not made", tries=5, short=2)
def test_not_made(attempt):
    if attempt == 9:
        pytest.skip("no GPU")

@pytest.mark.soak("hangs", tries=1, short=1)
@pytest.mark.timeout(1)
def test_hangs(attempt):
    time.sleep(60)

@pytest.mark.soak("dies", tries=1, short=0)
def test_dies(attempt):
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(9)
"""


def soak(folder: Path, *arguments: str) -> tuple[int, str]:
    """Status and output of pytest on the rows above."""
    (folder / "test_rows.py").write_text(ROWS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(folder),
        str(folder),
    ]
    command += ["-p", "tests.soak.plugin", "-p", "no:cacheprovider", *arguments, "--table", str(folder / "soak.json")]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST")}
    environment["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "workers"])
def test_what_fails_is_shown_as_failed(tmp_path, workers):
    status, output = soak(tmp_path, "--tries", "full", "--seed", "7", *workers)
    assert status == 1, output
    dies = "| dies | 0 of 1 | **0** |" if workers else "| dies | 1 | 1 |"
    for line in (
        *("| good | 5 | 5 |", "| cases | 2 | 2 |", "| loses one | 5 | **4** |", "| not made | 4 of 5 | **4** |"),
        *("| hangs | 1 | **0** |", dies, "- good: the first", "test_loses[8]: AssertionError: of seed 8 ?"),
    ):
        assert line in output
        assert line in (tmp_path / "soak.md").read_text()
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["case"], report["seed"], report["tries"]) == ("soak", 7, "full")
    assert {"commit", "machine", "versions", "date"} <= set(report)
    (row,) = [row for row in report["results"] if row["row"] == "loses one"]
    assert (row["planned"], row["tried"], row["survived"]) == (5, 5, 4)
    assert list(row["failures"]) == ["test_rows.py::test_loses[8]"]


def test_a_missing_try_is_enough_for_red_and_the_short_form_writes_no_table(tmp_path):
    assert soak(tmp_path, "--tries", "3", "-k", "good or cases")[0] == 0
    assert [row["tried"] for row in json.loads((tmp_path / "soak.json").read_text())["results"]] == [2, 3]
    (tmp_path / "soak.json").unlink()
    # seeds 0 to 9
    assert soak(tmp_path, "--tries", "10", "-k", "not_made")[0] == 1
    (tmp_path / "soak.json").unlink()
    # the short form: two tries of each but of the slow one
    status, output = soak(tmp_path, "-m", "not slow", "-k", "not hangs")
    assert (status, "8 passed, 2 deselected" in output) == (0, True), output
    assert not (tmp_path / "soak.json").exists()
