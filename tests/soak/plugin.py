"""Rows of the soak: tests marked `@pytest.mark.soak("name of the row")` that provoke one kind of fault many times.

A test with an argument `attempt`, the seed of a try, has as many tries as the mark says, `tries` in full and `short` in
`make test` (0: one try, marked as slow); each case of another test is a try. `--tries` writes the table of all rows.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--tries", metavar="N", help="tries a row, or `full`; writes the table of the rows")
    group.addoption("--seed", type=int, default=0, help="seed of the first try of a row")
    group.addoption("--table", type=Path, default=Path("outputs/soak.json"), help="the table; beside it as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("soak")
    if mark is None or "attempt" not in metafunc.fixturenames:
        return
    asked, first = metafunc.config.getoption("tries"), metafunc.config.getoption("seed")
    count = (mark.kwargs["short"] or 1) if asked is None else mark.kwargs["tries"] if asked == "full" else int(asked)
    marks = [pytest.mark.slow] if asked is None and not mark.kwargs["short"] else []
    metafunc.parametrize("attempt", [pytest.param(seed, marks=marks) for seed in range(first, first + count)])


@dataclass
class Row:
    """The tries of a row: those that were collected, made and lost, with the reasons, and what they noted."""

    planned: int = 0
    made: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0

    @property
    def green(self) -> bool:
        """Whether all tries were made and survived."""
        return len(self.made) == self.planned and not self.lost

    @property
    def survived(self) -> int:
        return len(self.made - self.lost.keys())


class Table:
    """Collects the results of all rows, from the workers of pytest-xdist too, and writes them."""

    def __init__(self, config: pytest.Config):
        self.config, self.rows, self.began = config, dict[str, Row](), time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        marks = [(item, mark.args[0]) for item in session.items for mark in item.iter_markers("soak")]
        for _, name in marks:
            self.rows.setdefault(name, Row()).planned += 1
        for item, name in marks:
            item.user_properties.append(("soak", name))
            item.user_properties.append(("planned", self.rows[name].planned))
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["soak"] = {name: row.planned for name, row in self.rows.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, planned in getattr(node, "workeroutput", {}).get("soak", {}).items():
            self.rows.setdefault(name, Row()).planned = planned

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = [tuple(each) for each in report.user_properties]
        for name in (value for key, value in properties if key == "soak"):
            row = self.rows.setdefault(name, Row())
            row.planned = dict(properties)["planned"]
            row.seconds += report.duration
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                row.lost[report.nodeid] = _encodable(
                    " ".join(str(crash.message if crash else report.longrepr).split())
                )[:600]
            if report.failed or (report.when == "call" and report.passed):
                row.made.add(report.nodeid)
            if report.when == "teardown":
                row.notes += [str(value) for key, value in properties if key == "note"]

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Any:
        data = yield
        # pytest-xdist ends the session at half of a surrogate pair, as hostile names have it
        return _encodable(data)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput") or self.config.getoption("tries") is None or not self.rows:
            return
        write_table(self.config, self.rows, time.monotonic() - self.began)
        if session.exitstatus == pytest.ExitCode.OK and not all(row.green for row in self.rows.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.getoption("tries") is not None and self.rows:
            terminalreporter.write_line("\n".join(lines_of(self.rows)))


def _encodable(value: Any) -> Any:
    """The value with ? for what UTF-8 cannot spell."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _encodable(each) for key, each in value.items()}
    return type(value)(map(_encodable, value)) if type(value) in (list, tuple) else value


def lines_of(rows: dict[str, Row]) -> list[str]:
    """The Markdown table of all rows, with lost tries and notes below."""
    lines = ["| row | tried | survived | seconds |", "|---|---|---|---|"]
    for name, row in sorted(rows.items()):
        tried = len(row.made) if len(row.made) == row.planned else f"{len(row.made)} of {row.planned}"
        survived = row.survived if row.green else f"**{row.survived}**"
        lines.append(f"| {name} | {tried} | {survived} | {row.seconds:.0f} |")
    each = rows.values()
    made, survived = sum(len(row.made) for row in each), sum(row.survived for row in each)
    lines += [f"| all {len(rows)} rows | {made} | {survived} | {sum(row.seconds for row in each):.0f} |", ""]
    for name, row in sorted(rows.items()):
        lines += [f"- {name}: lost: {test}: {why}" for test, why in row.lost.items()]
        lines += [f"- {name}: {note}" for note in row.notes]
    return lines


def write_table(config: pytest.Config, rows: dict[str, Row], seconds: float) -> None:
    """Write the table as JSON and as Markdown."""
    import torch

    from vsa.checkpoints.run_folder import checked_out_commit
    from vsa.files import write_whole
    from vsa.machine import machine, versions

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = {"tries": config.getoption("tries"), "seed": config.getoption("seed"), "seconds": round(seconds, 1)}
    report = {"case": "soak", "date": datetime.now(UTC).date().isoformat(), "commit": checked_out_commit(), **run}
    report |= {"machine": machine(device), "versions": versions(device)}
    report["results"] = [
        {"row": name, "planned": row.planned, "tried": len(row.made), "survived": row.survived}
        | {"seconds": round(row.seconds, 1), "failures": row.lost, "notes": row.notes}
        for name, row in sorted(rows.items())
    ]
    path: Path = config.getoption("table")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(report, indent=1) + "\n")
    here = report["machine"]
    where = f"{here['cpu']}, {here['cores']} cores" + (f", {here['gpu']}" if "gpu" in here else "")
    title = ["# Soak", "", f"{report['date']}, commit {report['commit']}, {where}, tries {run['tries']}, "]
    title[-1] += f"seed {run['seed']}: {seconds:.0f} s. A lost try: `pytest TEST --tries {run['tries']}`."
    write_whole(path.with_suffix(".md"), "\n".join([*title, "", *lines_of(rows)]) + "\n")
