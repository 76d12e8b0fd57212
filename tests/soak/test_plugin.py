"""The table of the soak: a case is green only if all attempts were made and survived, on any number of workers."""

import json
import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from scripts import soak_rows

ROOT = Path(__file__).parents[2]
CASES = """
import os, time
import pytest

@pytest.mark.soak("good", attempts=5, short=2)
def test_good(attempt, record_property):
    if attempt == 7:
        record_property("note", "the first")

@pytest.mark.soak("cases")
@pytest.mark.parametrize("case", ["a", "b"])
def test_cases(case):
    pass

@pytest.mark.soak("fails once", attempts=5, short=2)
def test_fails(attempt):
    assert attempt != 8, "of\\nseed 8 \\ud800"

@pytest.mark.soak("not made", attempts=5, short=2)
def test_not_made(attempt):
    if attempt == 9:
        pytest.skip("no GPU")

@pytest.mark.soak("hangs", attempts=1, short=1)
@pytest.mark.timeout(1)
def test_hangs(attempt):
    time.sleep(60)

@pytest.mark.soak("dies", attempts=1, short=0)
def test_dies(attempt):
    if "PYTEST_XDIST_WORKER" in os.environ:
        os._exit(9)
"""


def soak(folder: Path, *arguments: str) -> tuple[int, str]:
    """Status and output of pytest on the cases above, in a fork: a new process would import torch for the table."""
    (folder / "test_mine.py").write_text(CASES)
    words = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(folder), str(folder)]
    words += ["-p", "tests.soak.plugin", "-p", "no:cacheprovider", *arguments, "--table", str(folder / "soak.json")]

    def run() -> None:
        os.chdir(folder)
        with open("output", "wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
        for name in [name for name in os.environ if name.startswith("PYTEST")]:
            del os.environ[name]
        os.environ["PYTHONPATH"] = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
        sys.exit(int(pytest.main(words)))

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode is not None
    return process.exitcode, (folder / "output").read_text()


@pytest.mark.parametrize(
    "workers", [(), pytest.param(("-n", "2"), marks=pytest.mark.slow)], ids=["one process", "workers"]
)
def test_what_fails_is_shown_as_failed(tmp_path, workers):
    status, output = soak(tmp_path, "--attempts", "full", "--seed", "7", *workers)
    assert status == 1, output
    dies = "| dies | 0 of 1 | **0** |" if workers else "| dies | 1 | 1 |"
    for line in (
        *("| good | 5 | 5 |", "| cases | 2 | 2 |", "| fails once | 5 | **4** |", "| not made | 4 of 5 | **4** |"),
        *("| hangs | 1 | **0** |", dies, "- good: the first", "test_fails[8]: AssertionError: of seed 8 ?"),
    ):
        assert line in output
        assert line in (tmp_path / "soak.md").read_text()
    report = json.loads((tmp_path / "soak.json").read_text())
    assert (report["case"], report["seed"], report["attempts"]) == ("soak", 7, "full")
    assert {"commit", "machine", "versions", "date"} <= set(report)
    (case,) = [case for case in report["results"] if case["case"] == "fails once"]
    assert (case["planned"], case["attempts"], case["survived"]) == (5, 5, 4)
    assert list(case["failures"]) == ["test_mine.py::test_fails[8]"]


def test_missing_attempt_fails_and_short_form_writes_no_table(tmp_path):
    assert soak(tmp_path, "--attempts", "3", "-k", "good or cases")[0] == 0
    assert [case["attempts"] for case in json.loads((tmp_path / "soak.json").read_text())["results"]] == [2, 3]
    (tmp_path / "soak.json").unlink()
    # seeds 0 to 9
    assert soak(tmp_path, "--attempts", "10", "-k", "not_made")[0] == 1
    (tmp_path / "soak.json").unlink()
    # the short form: two attempts of each but of the slow one
    status, output = soak(tmp_path, "-m", "not slow", "-k", "not hangs")
    assert (status, "8 passed, 2 deselected" in output) == (0, True), output
    assert not (tmp_path / "soak.json").exists()


def test_a_row_is_older_once_anything_that_its_tests_reach_has_changed(tmp_path, monkeypatch):
    folders = {name: tmp_path / name for name in ("vsa", "vsa_kernels", "tests")}
    files = {
        "tests/test_one.py": '@pytest.mark.soak("one", attempts=3)\ndef test_one(attempt):\n    from vsa.b import c\n',
        "vsa/__init__.py": "",
        "vsa/b/__init__.py": "import vsa.d",
        "vsa/b/c.py": "import os",
        "vsa/d.py": "from vsa_kernels import e",
        "vsa_kernels/__init__.py": "",
        "vsa_kernels/e.py": "x = 1",
        "vsa/other.py": "x = 1",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(soak_rows, "ROOT", tmp_path)
    monkeypatch.setattr(soak_rows, "FOLDERS", folders)
    page = "| one | 3 | 3 | 1 | `{}` |\n| two | 3 | 3 | 1 | `0123456789ab` |\n"

    def age() -> str:
        soak_rows.tests_of.cache_clear()
        soak_rows.imported.cache_clear()
        return soak_rows.with_age(page)

    try:
        soak_rows.tests_of.cache_clear()
        page = page.format(soak_rows.digest_under("one"))
        assert age() == "| one | 3 | 3 | 1 | current |\n| two | 3 | 3 | 1 | older |\n"
        for name in files:
            (tmp_path / name).write_text(f"{files[name]}\n# changed")
            assert age().startswith(f"| one | 3 | 3 | 1 | {'current' if name == 'vsa/other.py' else 'older'} |"), name
            (tmp_path / name).write_text(files[name])
    finally:
        soak_rows.tests_of.cache_clear()
        soak_rows.imported.cache_clear()
