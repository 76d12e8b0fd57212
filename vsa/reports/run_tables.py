"""Tables of the page of one run: settings, environment, starts, faults, cost and checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import numpy as np

from vsa.checkpoints.run_checkpoint import list_checkpoints, step_of
from vsa.config import check_targets, target_class
from vsa.pages.page import Cell, Table
from vsa.reports.runs import Run, code_versions
from vsa.reports.tables import count, number
from vsa.reports.variants import shown
from vsa.settings import arguments_of

# settings without information: the title names the run, and the others repeat its folder
_IDENTITY = ("name", "run", "output_dir", "run_dir", "overwrite")
_FOLDERS = (".run_dir", ".root_dir", ".save_dir")
_HYDRA = ("._partial_", "._convert_", "._recursive_")


def settings_tables(run: Run) -> list[Table]:
    """Two foldable tables: settings that differ from the defaults of their classes, and all others."""
    if not run.settings:
        return []
    defaults = class_defaults(run.settings)
    hidden = (*_FOLDERS, *_HYDRA)
    settings = {k: v for k, v in run.settings.items() if k not in _IDENTITY and not k.endswith(hidden)}
    usual = {key for key, value in settings.items() if key in defaults and defaults[key] == value}
    parts = (
        ("Settings of this run", "Settings that differ from the defaults of their classes.", False),
        ("Settings left at their defaults", "", True),
    )
    tables = []
    for (title, note, folded), keys in zip(parts, (settings.keys() - usual, usual), strict=True):
        rows = [[key.removesuffix("._target_"), shown(settings[key])] for key in settings if key in keys]
        if rows:
            heading = f"{title} ({len(rows)})"
            tables.append(Table(["setting", "value"], rows, title=heading, note=note, long=[-1], folded=folded))
    return tables


def class_defaults(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults of the constructors that the settings belong to, by dotted key, without classes that no longer exist."""
    defaults: dict[str, Any] = {"seed": 0}
    for key, target in settings.items():
        group = key.removesuffix("._target_")
        if group == key:
            continue
        try:
            # an untrusted file must not import classes of other packages
            check_targets({group: {"_target_": target}})
            arguments = arguments_of(target_class(str(target)))
        except (ValueError, ImportError, AttributeError, TypeError):
            continue
        for name, argument in arguments.items():
            default = argument.default
            if isinstance(default, (list, tuple, Mapping)):
                default = json.dumps(default if isinstance(default, Mapping) else [*default])
            defaults[f"{group}.{name}"] = default
    plain = ("ckpt_path", "init_from", "flop_budget", "sample_token_budget", "second_budget")
    return {**dict.fromkeys(plain), "resume.allow": "[]", **defaults}


def environment_table(run: Run) -> Table | None:
    """Code, versions and devices as recorded by the starts of the run; older runs recorded only the code."""
    facts = {"code": ", ".join(code_versions([run]))} if run.manifest else {}
    environments = [each for each in run.environments if each]
    for name in dict.fromkeys(name for each in environments for name in each):
        values = [_listed(each.get(name)) for each in environments]
        # only the starts at which the value changed
        facts[name] = "; then ".join(
            text for i, text in enumerate(values) if text and (i == 0 or text != values[i - 1])
        )
    if not facts:
        return None
    return Table(["what", "of this run"], [*facts.items()], title="Environment", long=[-1], folded=False)


def _listed(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {text}" for name, text in value.items())
    return "" if value is None else str(value)


def starts_table(run: Run) -> Table | None:
    """Table of all starts of the run, the first one and resumes."""
    if not run.starts:
        return None
    rows = []
    for place, start in enumerate(run.starts):
        last = start is run.starts[-1]
        how = start.get("how") or ("running" if last and run.writing else "killed: no end was recorded")
        reason = str(start.get("reason", ""))
        end = start.get("last_step", run.steps if last else None)
        start_time, end_time = str(start.get("began", "")), str(start.get("ended", ""))
        texts = [str(place + 1), start_time[:19], str(start.get("step", "")), "" if end is None else str(end)]
        spent = seconds_between(start_time, end_time)
        took = "" if spent is None else duration(spent)
        rows.append([*texts, took, Cell(how, reason)])
    headings = ["start", "began", "from step", "to step", "took", "ended"]
    note = "A resumed run continues from a checkpoint, bit for bit as without the interruption."
    return Table(headings, rows, title="Starts and resumes", note=note, long=[-1])


def faults_table(run: Run) -> Table:
    """Table of the recorded faults and how they were handled."""
    rows = [*faults(run)] or [("none", "", "No faults were recorded.")]
    return Table(["fault", "count", "what was done"], rows, title="Faults", long=[-1])


def faults(run: Run) -> Iterator[tuple[str, str, str]]:
    """Kind, count and handling of each recorded fault."""
    for many, when in _counted(run, "skipped_steps"):
        yield "gradients were not finite", many, f"these updates were skipped; {when}"
    for many, when in _counted(run, "fake_score/skipped_steps"):
        yield "the critic's gradients were not finite", many, f"these updates were skipped; {when}"
    bad = run.last("bad_samples")
    if bad:
        causes = {n.partition("/")[2]: c[1][-1] for n, c in run.metrics.items() if n.startswith("bad_samples/")}
        cause_list = ", ".join(f"{cause} {many:.0f}" for cause, many in sorted(causes.items()))
        yield "bad samples", f"{bad:.0f}", f"replaced by other samples ({cause_list}); bad_samples.txt lists them"
    for many, when in _counted(run, "loss_spikes/rollbacks"):
        yield "loss spikes", many, f"rolled back and continued on other data; {when}"
    steps, losses = run.train
    infinite = steps[~np.isfinite(losses)]
    if len(infinite):
        yield "losses that are not finite", str(len(infinite)), f"logged at {_steps(infinite)}"
    dumps = sorted(path.name for path in (run.folder / "nan-dumps").glob("step-*"))
    if dumps:
        yield "dumped steps", str(len(dumps)), f"vsa replay runs them again: nan-dumps/{dumps[0]}"
    ends = run.starts if run.status != "running" else run.starts[:-1]
    killed = sum("how" not in start for start in ends)
    if killed:
        yield "killed", str(killed), "a resume continues from the newest complete checkpoint"
    for how in ("stopped", "failed"):
        reasons = [str(start.get("reason") or "no reason recorded") for start in run.starts if start.get("how") == how]
        if reasons:
            yield how, str(len(reasons)), "; ".join(dict.fromkeys(reasons))


def _counted(run: Run, name: str) -> Iterator[tuple[str, str]]:
    """The last value of a count above 0, and the steps at which it has grown."""
    steps, totals = run.curve(name)
    if len(totals) and totals[-1] > 0:
        yield f"{totals[-1]:.0f}", f"logged at {_steps(steps[np.diff(totals, prepend=0) > 0])}"


def _steps(steps: np.ndarray) -> str:
    shown_steps = ", ".join(str(step) for step in steps[:6].tolist())
    return f"step{'s' * (len(steps) > 1)} {shown_steps}" + (f" and {len(steps) - 6} more" if len(steps) > 6 else "")


def cost_table(run: Run) -> Table | None:
    """Time, FLOPs, tokens and device-hours."""
    seconds, flops, tokens = map(run.total, ("seconds", "flops", "tokens"))
    walls = [seconds_between(str(s.get("began", "")), str(s.get("ended", ""))) for s in run.starts]
    known_walls = [wall for wall in walls if wall is not None]
    counts = [each.get("processes", 1) for each in run.environments]
    processes = [count if isinstance(count, int) else 1 for count in counts]
    rows: list[tuple[str, str, str]] = [("optimizer steps", str(run.steps), "")]
    if seconds is not None:
        rows.append(("training", duration(seconds), "only steps, without validation, sampling and saving"))
    if known_walls:
        lost = len(walls) - len(known_walls)
        part = f"; {lost} of {len(walls)} starts have no recorded end" if lost else ""
        rows.append(("whole run", duration(sum(known_walls)), f"from the first step on, over all starts{part}"))
        hours = sum(w * p for w, p in zip(walls, processes, strict=True) if w is not None) / 3600
        rows.append(("device-hours", f"{hours:.3g}", f"of {max(processes)} process{'es' * (max(processes) > 1)}"))
    if flops is not None:
        rows.append(("executed FLOPs", f"{flops:.3g}", "of the trained network, with the pairs it computes"))
    if tokens is not None:
        rows.append(("tokens", count(tokens), "of the videos trained on"))
    for name, label in (("throughput/tflops_executed", "executed TFLOP/s"), ("throughput/mfu", "FLOPs utilisation")):
        values = run.curve(name)[1]
        if len(values):
            rows.append((label, f"{np.median(values):.3g}", "median"))
    size = sum(path.stat().st_size for path in (run.folder / "checkpoints").rglob("*") if path.is_file())
    if size:
        rows.append(("checkpoints on disk", f"{size / 1e6:,.1f} MB", ""))
    return Table(["what", "how much", ""], rows, title="Cost", long=[-1])


def checkpoints_table(run: Run) -> Table | None:
    """Table of the checkpoints, which can be resumed from or sampled."""
    rows = []
    steps, losses = run.val
    for path in list_checkpoints(run.folder / "checkpoints"):
        files = {file.stem: file.stat().st_size for file in sorted(path.glob("*.safetensors"))}
        step = step_of(path)
        before = losses[steps <= step]
        loss = number(float(before[-1]), 4) if len(before) else ""
        size, parts = f"{sum(files.values()) / 1e6:,.1f}", ", ".join(files)
        rows.append([path.name, str(step), loss, size, parts])
    if not rows:
        return None
    headings = ["checkpoint", "step", ("validation loss", "the last one up to it"), "MB", "files"]
    note = "ckpt_path=last continues from the newest checkpoint, and vsa sample uses it."
    return Table(headings, rows, title="Checkpoints", note=note, long=[-1])


def seconds_between(began: str, ended: str) -> float | None:
    """Seconds between two ISO 8601 times of the manifest, None if one is missing."""
    try:
        return (datetime.fromisoformat(ended) - datetime.fromisoformat(began)).total_seconds()
    except (ValueError, TypeError):
        return None


def duration(seconds: float) -> str:
    """A duration as text in seconds, minutes or hours."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"
