"""Cases of the soak: tests marked `@pytest.mark.soak("name of the case")` that provoke one kind of fault many times.

A test with an argument `attempt`, a seed, is run as often as the mark says, `attempts` in full and `short` in
`make test` (0: once, marked as slow); each parameter of another test is an attempt. `--attempts` writes the table.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from scripts.soak_rows import digest_under


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("soak")
    group.addoption("--attempts", metavar="N", help="attempts of each case, or `full`; writes the table")
    group.addoption("--seed", type=int, default=0, help="seed of the first attempt of a case")
    group.addoption("--table", type=Path, default=Path("outputs/soak.json"), help="the table; beside it as Markdown")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Table(config))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("soak")
    if mark is None or "attempt" not in metafunc.fixturenames:
        return
    asked, first = metafunc.config.getoption("attempts"), metafunc.config.getoption("seed")
    count = (mark.kwargs["short"] or 1) if asked is None else mark.kwargs["attempts"] if asked == "full" else int(asked)
    marks = [pytest.mark.slow] if asked is None and not mark.kwargs["short"] else []
    metafunc.parametrize("attempt", [pytest.param(seed, marks=marks) for seed in range(first, first + count)])


@dataclass
class Case:
    """The attempts of a case: those collected and made, the failures with their reasons, and what was noted."""

    planned: int = 0
    made: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0

    @property
    def green(self) -> bool:
        """Whether all attempts were made and survived."""
        return len(self.made) == self.planned and not self.failures

    @property
    def survived(self) -> int:
        return len(self.made - self.failures.keys())


class Table:
    """Collects the results of all cases, from the workers of pytest-xdist too, and writes them."""

    def __init__(self, config: pytest.Config):
        self.config, self.cases, self.began = config, dict[str, Case](), time.monotonic()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        marks = [(item, mark.args[0]) for item in session.items for mark in item.iter_markers("soak")]
        for _, name in marks:
            self.cases.setdefault(name, Case()).planned += 1
        for item, name in marks:
            item.user_properties.append(("soak", name))
            item.user_properties.append(("planned", self.cases[name].planned))
        if hasattr(self.config, "workeroutput"):
            self.config.workeroutput["soak"] = {name: case.planned for name, case in self.cases.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        for name, planned in getattr(node, "workeroutput", {}).get("soak", {}).items():
            self.cases.setdefault(name, Case()).planned = planned

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = [tuple(each) for each in report.user_properties]
        for name in (value for key, value in properties if key == "soak"):
            case = self.cases.setdefault(name, Case())
            case.planned = dict(properties)["planned"]
            case.seconds += report.duration
            if report.failed:
                crash = getattr(report.longrepr, "reprcrash", None)
                case.failures[report.nodeid] = _encodable(
                    " ".join(str(crash.message if crash else report.longrepr).split())
                )[:600]
            if report.failed or (report.when == "call" and report.passed):
                case.made.add(report.nodeid)
            if report.when == "teardown":
                case.notes += [str(value) for key, value in properties if key == "note"]

    @pytest.hookimpl(wrapper=True)
    def pytest_report_to_serializable(self) -> Any:
        data = yield
        # pytest-xdist ends the session at half of a surrogate pair, as hostile names have it
        return _encodable(data)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self.config, "workerinput") or self.config.getoption("attempts") is None or not self.cases:
            return
        write_table(self.config, self.cases, time.monotonic() - self.began)
        if session.exitstatus == pytest.ExitCode.OK and not all(case.green for case in self.cases.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.config.getoption("attempts") is not None and self.cases:
            terminalreporter.write_line("\n".join(lines_of(self.cases)))


def _encodable(value: Any) -> Any:
    """The value with ? for what UTF-8 cannot spell."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, dict):
        return {key: _encodable(each) for key, each in value.items()}
    return type(value)(map(_encodable, value)) if type(value) in (list, tuple) else value


def lines_of(cases: dict[str, Case]) -> list[str]:
    """The Markdown table of all cases, each with a digest of its code, with failures and notes below."""
    lines = ["| case | attempts | survived | seconds | code |", "|---|---|---|---|---|"]
    for name, case in sorted(cases.items()):
        attempts = len(case.made) if len(case.made) == case.planned else f"{len(case.made)} of {case.planned}"
        survived = case.survived if case.green else f"**{case.survived}**"
        lines.append(f"| {name} | {attempts} | {survived} | {case.seconds:.0f} | `{digest_under(name)}` |")
    each = cases.values()
    made, survived = sum(len(case.made) for case in each), sum(case.survived for case in each)
    lines += [f"| all {len(cases)} cases | {made} | {survived} | {sum(case.seconds for case in each):.0f} | |", ""]
    for name, case in sorted(cases.items()):
        lines += [f"- {name}: failed: {test}: {why}" for test, why in case.failures.items()]
        lines += [f"- {name}: {note}" for note in case.notes]
    return lines


def write_table(config: pytest.Config, cases: dict[str, Case], seconds: float) -> None:
    """Write the table as JSON and as Markdown."""
    import torch

    from vsa.checkpoints.manifest import checked_out_commit
    from vsa.files import write_whole
    from vsa.machine import machine, versions

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run = {"attempts": config.getoption("attempts"), "seed": config.getoption("seed"), "seconds": round(seconds, 1)}
    report = {"case": "soak", "date": datetime.now(UTC).date().isoformat(), "commit": checked_out_commit(), **run}
    report |= {"machine": machine(device), "versions": versions(device)}
    report["results"] = [
        {"case": name, "planned": case.planned, "attempts": len(case.made), "survived": case.survived}
        | {
            "code": digest_under(name),
            "seconds": round(case.seconds, 1),
            "failures": case.failures,
            "notes": case.notes,
        }
        for name, case in sorted(cases.items())
    ]
    path: Path = config.getoption("table")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(report, indent=1) + "\n")
    here = report["machine"]
    where = f"{here['cpu']}, {here['cores']} cores" + (f", {here['gpu']}" if "gpu" in here else "")
    title = ["# Soak", "", f"{report['date']}, commit {report['commit']}, {where}, attempts {run['attempts']}, "]
    title[-1] += f"seed {run['seed']}: {seconds:.0f} s. A failed attempt: `pytest TEST --attempts {run['attempts']}`."
    write_whole(path.with_suffix(".md"), "\n".join([*title, "", *lines_of(cases)]) + "\n")
