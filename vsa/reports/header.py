"""Header of a report: what was compared, and differences between the runs that limit the comparison."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from vsa.reports.figures import families, sequence_length
from vsa.reports.run_tables import duration
from vsa.reports.runs import Missing, Run, code_versions
from vsa.reports.statistics import FEWEST_SAMPLES
from vsa.reports.variants import Variant, shown

# settings of how the data are read, which do not change the data set
_READING = ("batch_size", "num_workers", "caption_dropout", "val_batches", "val_fraction")


def facts(root: Path, runs: Sequence[Run], variants: Sequence[Variant], missing: Sequence[Missing]) -> dict[str, str]:
    """Facts about the runs for the header, by heading."""
    running = sum(run.status == "running" for run in runs)
    run_counts = f"{len(runs)} in {len(variants)} variants, seeds {_listed({run.seed for run in runs})}"
    run_counts += f"; {running} still running" if running else ""
    lost = sum(one.status in ("failed", "refused", "unreadable") for one in missing)
    run_counts += f"; {lost} failed, refused or unreadable" if lost else ""
    created = sorted(str(run.manifest["created"])[:16] for run in runs if "created" in run.manifest)
    devices = {run.point.device for run in runs if run.point is not None and run.point.device}
    counted = [flops for run in runs if (flops := run.last("throughput/flops_total")) is not None]
    flops, of = sum(counted), "" if len(counted) == len(runs) else f" (of {len(counted)} runs, missing for the others)"
    seconds = sum(run.total("seconds") or 0.0 for run in runs)
    entries = {
        "Runs": run_counts,
        "Where": shown_path(root) + (f", on {_listed(devices)}" if devices else ""),
        "When": f"started {created[0]} to {created[-1]}" if created else "",
        "Code": ", ".join(f"{version}: {count} runs" for version, count in code_versions(runs).items()),
        "Data": "; ".join(f"{text}: {count} runs" for text, count in Counter(_data_name(run) for run in runs).items()),
        "Validation": "; ".join(_validation_sets(runs)),
        "Training": f"{flops:.3g} executed FLOPs{of}, {duration(seconds)} in all" if flops or seconds else "",
        "Page": f"written {datetime.now().astimezone().isoformat(sep=' ', timespec='minutes')}",
    }
    return {name: text for name, text in entries.items() if text}


def differences(runs: Sequence[Run], missing: Sequence[Missing]) -> list[str]:
    """Sentences about differences between the runs in data, validation and code, and about unfinished runs."""
    return [*_of_data(runs), *_of_validation(runs), *_of_code(runs), *_of_state(runs, missing)]


def _of_data(runs: Sequence[Run]) -> Iterator[str]:
    runs_with_settings = [run for run in runs if run.settings]
    settings = [_data(run) for run in runs_with_settings]
    keys = dict.fromkeys(key for each in settings for key in each)
    differing = [key for key in keys if len({each.get(key, "unset") for each in settings}) > 1]
    if differing:
        values = (f"{key} ({_listed({shown(each.get(key, 'unset')) for each in settings})})" for key in differing[:4])
        more = f" and {len(differing) - 4} more" if len(differing) > 4 else ""
        yield f"The runs were trained on different data: they differ in {', '.join(values)}{more}."
    kinds = Counter("distillations" if run.distilled else "trainings on data" for run in runs)
    if len(kinds) > 1:
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        yield f"The runs are of different kinds ({counts}): the gap of a distillation is not a loss on data."


def _data(run: Run) -> dict[str, Any]:
    """Settings that determine the data set, without copies of the run's seed."""
    data_settings = {key: value for key, value in run.settings.items() if key.startswith("data.")}
    return {key: value for key, value in data_settings.items() if key.split(".")[1] not in (*_READING, "seed")}


def _data_name(run: Run) -> str:
    if not run.settings:
        return "unknown data"
    target, root = (run.settings.get(f"data.{key}") for key in ("_target_", "root"))
    return " ".join(str(part) for part in (shown(target) if target else "data", root) if part)


def _validation_sets(runs: Sequence[Run]) -> list[str]:
    descriptions = []
    for run in runs:
        keys = run.validation.get("current", {})
        if keys:
            samples = len({sample for sample, _ in keys})
            descriptions.append(f"{samples} samples at {len(keys)} noise levels")
        else:
            descriptions.append("no validation.csv")
    return [f"{text}: {count} runs" for text, count in Counter(descriptions).items()]


def _of_validation(runs: Sequence[Run]) -> Iterator[str]:
    validated = [run for run in runs if run.validation.get("current")]
    samples = {frozenset(sample for sample, _ in run.validation["current"]) for run in validated}
    if len(samples) > 1:
        yield f"The runs were validated on {len(samples)} different sets of samples, which are not paired."
        return
    if samples and (count := len(min(samples, key=len))) < FEWEST_SAMPLES:
        yield f"Only {count} samples are held out: their losses say little about others, and there are no p-values."
    by_seed: dict[Any, set[frozenset[tuple[str, float]]]] = {}
    for run in validated:
        by_seed.setdefault(run.seed, set()).add(frozenset(run.validation["current"]))
    if any(len(keys) > 1 for keys in by_seed.values()):
        yield "Runs of one seed were validated at different noise levels: they are not paired."
    without = len(runs) - len(validated)
    if without and validated:
        yield f"{without} of {len(runs)} runs have no validation.csv and are left out of the paired tests."


def _of_code(runs: Sequence[Run]) -> Iterator[str]:
    versions = code_versions(runs)
    if len(versions) > 1:
        yield f"The runs were trained by {len(versions)} versions of the code: {', '.join(versions)}."
    changed = [version for version in versions if version.endswith("+)")]
    if changed:
        yield f"Files were changed after the commit in {', '.join(changed)}: the commit does not say what ran."


def _of_state(runs: Sequence[Run], missing: Sequence[Missing]) -> Iterator[str]:
    states = Counter(run.status for run in runs if run.status != "finished")
    if states:
        counts = ", ".join(f"{count} {state}" for state, count in states.items())
        yield f"Not all runs have finished ({counts}): their last losses are not final."
    for run in runs:
        if run.damaged:
            yield f"The record of {run.name} is left out: {run.damaged}."
    waiting = sum(one.status == "waiting" for one in missing)
    if waiting:
        yield f"Points of the sweep that have not started: {waiting}."


def not_shown(variants: Sequence[Variant], drawn: Sequence[str]) -> list[str]:
    """One sentence about each figure that could not be drawn, with what it needs."""
    runs = [run for variant in variants for run in variant.ended]
    lengths, topks = ({sequence_length(run) for run in runs}, {run.last("sparsity/topk") for run in runs})
    of_family = [[run for variant in members for run in variant.ended] for members in families(variants).values()]
    sizes = max((len({run.parameters for run in own} - {None}) for own in of_family), default=0)
    sentences = {
        "loss": "Loss: no run has logged one yet.",
        "pareto": "Loss and step time: needs two variants with a loss and a step time.",
        "loss_by_timestep": "Loss by timestep: needs a validation.",
        "topk_by_length": "Top-k by sequence length: needs runs that vary both, "
        f"lengths found: {len(lengths - {None})}, values of top-k: {len(topks - {None})}.",
        "scaling": f"Scaling: needs at least three sizes of one family of variants, found {sizes}.",
        "diagnostics": "Recall and gates: needs runs with callbacks=diagnostics.",
    }
    return [sentence for key, sentence in sentences.items() if key not in drawn]


def _listed(values: set[Any] | Mapping[Any, Any]) -> str:
    ordered = sorted(map(str, values), key=lambda text: (len(text), text))
    return ", ".join(ordered[:6]) + (f" and {len(ordered) - 6} more" if len(ordered) > 6 else "")


def shown_path(folder: Path) -> str:
    """A folder as the page shows it, relative to the working directory if it is below it."""
    # pages are shared, and absolute paths are meaningless on other machines
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)
