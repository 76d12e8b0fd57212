"""`vsa certify`: parity, step time, recall and paired renders of a model with sparse attention, as a page and JSON.

Every result is a file, so that the same command after an interruption measures only what is missing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

from vsa.checkpoints.weight_files import read_json
from vsa.errors import refuse_unwritable
from vsa.evaluation.certificate.subject import RECALL, RENDERS, CertifySettings, Subject
from vsa.evaluation.comparison.agreement import SHOWN_PROMPTS, Denoised, joined
from vsa.evaluation.comparison.figures import denoising_table, means, number, result_table, share
from vsa.evaluation.comparison.measure import Row
from vsa.evaluation.record import plain, write_record
from vsa.files import file_digest, refuse_others
from vsa.pages.page import Page, Table

PAGE, DATA, RECORD, MAKER = "certificate.html", "certificate", "certificate.json", "vsa certify"
STEP = "step time"
CAREFUL = (
    "Parity and step time are of random inputs at half noise, in eager mode; recall and renders are of the prompts or "
    "clips that were given, and hold for these.",
    "Dense means dense attention with the same weights, also for a model that was trained with sparse attention.",
)


def certify(asked: CertifySettings) -> Path:
    """Certify a model; returns the path of the page.

    Raises:
        ValueError: bad input, or outputs that should be equal and are not, after the page is written.
    """
    local = Path(asked.model).exists()
    name = f"{Path(asked.model).resolve().name}-certificate"
    out = asked.out or (Path(asked.model).resolve().parent / name if local else Path(name))
    refuse_unwritable(out)
    refuse_others(out, (RECORD, PAGE), MAKER)
    subject = Subject(asked)
    if asked.pipeline is not None and subject.unusable is not None:
        raise ValueError(f"--pipeline {asked.pipeline}: {subject.unusable}")
    parts = _Parts(out / DATA, subject.identity())
    results: dict[str, Any] = {"parity": {}}
    missing = dict(subject.missing)
    for key, transformer in subject.transformers.items():
        results["parity"][key] = transformer.judged(parts.get(f"parity-{key}", {}, transformer.parity))
    failed, weak = _judged(results["parity"])
    if failed:
        # the next command measures it again
        for key in results["parity"]:
            (parts.folder / f"parity-{key}.json").unlink()
        missing = dict.fromkeys((STEP, RECALL, RENDERS), "the model fails parity")
    if STEP not in missing:
        first = next(iter(subject.transformers.values()))
        results["step_ms"] = parts.get("step", {"repeats": asked.repeats}, partial(first.step_ms, asked.repeats))
    sampling = {name: getattr(asked, name) for name in ("steps", "guidance", "flow_shift")}
    if RECALL not in missing:
        names = ("layers", "timesteps", "queries", "repeats")
        own = sampling | {name: getattr(asked, name) for name in names} | {"prompts": subject.prompts[:1]}
        own |= {"clips": subject.clips()}
        results["recall"] = parts.get("recall", own, subject.recall)
    if RENDERS not in missing:
        results["renders"] = {}
        for prompt in subject.prompts:
            own, picture = sampling | {"prompt": prompt}, out / _picture(prompt)
            render = partial(subject.render, prompt, picture)
            results["renders"][prompt] = parts.get(_name(prompt), own, render, picture)
    facts, sentences = subject.facts(), [f"{part}: {reason}" for part, reason in missing.items()]
    facts = {"verdict": _verdict(results, failed, weak), **facts}
    if (out / RECORD).is_file() and (before := read_json(out / RECORD)["facts"]["command"]) != facts["command"]:
        print(f"{out / PAGE} replaces that of: {before}")
    write_record(out / RECORD, {"made_by": MAKER, "facts": facts, **results, "failed": failed, "missing": sentences})
    page = _write(out, facts, results, [*failed, *weak], sentences)
    if failed:
        raise ValueError(f"{asked.model} fails parity ({page}): {'; '.join(failed)}")
    print(*weak, *sentences, facts["verdict"], sep="\n")
    return page


class _Parts:
    """Results in files, each with the settings that it depends on."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder, self.identity = folder, identity

    def get(
        self, name: str, settings: Mapping[str, Any], measure: Callable[[], Any], picture: Path | None = None
    ) -> Any:
        """The result of a file of equal settings and its picture, else that of `measure`, which becomes the file.

        A file that was altered is no result: it is measured again.
        """
        path, own = self.folder / f"{name}.json", json.loads(json.dumps({**self.identity, **settings}))
        stored = read_json(path) if path.is_file() else {}
        if stored == {"settings": own, **_sealed(stored.get("result"), picture)}:
            print(f"{name}: measured before, {path}")
            return stored["result"]
        print(f"{name}: measuring")
        # as it is read later
        result = json.loads(json.dumps(plain(measure())))
        write_record(path, {"settings": own, **_sealed(result, picture)})
        return result


def _sealed(result: Any, picture: Path | None) -> dict[str, Any]:
    """A result with its digest and that of its picture."""
    digest = hashlib.sha256(json.dumps(result).encode()).hexdigest()
    drawn = file_digest(picture) if picture is not None and picture.is_file() else None
    return {"result": result, "digest": digest, "picture": drawn}


def _judged(parity: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Sentences on the checks that failed, and on those that could hardly fail."""
    failed, weak = [], []
    for key, result in parity.items():
        for check in result["checks"]:
            if check["failed"]:
                line = f"{check['error']:.2e}, more than {check['tolerance']:g}"
                failed.append(f"{key}: {check['compared']}: {line}")
        tolerance, apart = max(check["tolerance"] for check in result["checks"]), result["sparse_difference"]
        if not math.isfinite(apart):
            failed.append(f"{key}: the sparse output has values that are NaN or infinite")
        elif not apart > tolerance:
            weak.append(
                f"{key}: parity says little, because the sparse output is within the tolerance too ({apart:.2e} of "
                f"{tolerance:g}): --dtype float32 tells more"
            )
    return failed, weak


def _verdict(results: Mapping[str, Any], failed: Sequence[str], weak: Sequence[str]) -> str:
    """Whether the model is right, how good and how fast it is, in a sentence."""
    checks = [check for result in results["parity"].values() for check in result["checks"]]
    if failed:
        return f"Not right: {failed[0]}"
    worst = max(checks, key=lambda check: check["error"] / check["tolerance"])
    right = "Right as far as parity tells" if weak else "Right"
    right += f" ({len(checks)} checks, the worst {worst['error']:.2g} of {worst['tolerance']:g} allowed)"
    good = [f"{share(row.recall)} recall" for row in means(_rows(results))[1:] if row.recall is not None]
    good += [f"{number(row.psnr)} dB PSNR against dense clips" for row in _denoised(results)[1:]]
    dense, sparse = (median(results["step_ms"][name]) for name in ("dense", "sparse"))
    fast = f"a step {dense / sparse:.2f} times as fast as dense"
    return f"{right}; how good: {' and '.join(good) or 'not measured'}; how fast: {fast}"


def _name(prompt: str) -> str:
    return f"render-{hashlib.blake2b(prompt.encode(), digest_size=6).hexdigest()}"


def _picture(prompt: str) -> str:
    return f"{DATA}/{_name(prompt)}.png"


def _write(
    out: Path, facts: Mapping[str, str], results: Mapping[str, Any], warnings: Sequence[str], missing: Sequence[str]
) -> Path:
    page = Page(out / PAGE, title="Certificate", facts=facts, warnings=[*warnings, *CAREFUL], folder=DATA)
    page.table(_parity_table(results["parity"]))
    if "step_ms" in results:
        page.table(_time_table(results["step_ms"]))
    if rows := _rows(results):
        sparse = [row for row in rows if row.method != rows[0].method]
        heads = [
            (row.capture, row.layer, row.timestep, head, value)
            for row in sparse
            for head, value in enumerate(row.head_recall or ())
        ]
        data = page.csv("heads", ("clip", "layer", "timestep", "head", "recall"), heads)
        page.table(_recall_table(sparse), data=data)
        page.table(result_table(rows, "Attention alone", "Means over clips, layers and timesteps."))
    if denoised := _denoised(results):
        note = f"Prompts: {len(results['renders'])}, each from the same noise, dense and sparse."
        page.table(denoising_table(denoised, note))
        for prompt in list(results["renders"])[:SHOWN_PROMPTS]:
            page.picture("Clips", "Dense above, sparse below.", out / _picture(prompt))
    page.missing(missing)
    return page.write(f"Every number in {RECORD}, the results in {DATA}/")


def _rows(results: Mapping[str, Any]) -> list[Row]:
    """Recall by method, dense first; an expert has none outside of its noise levels."""
    return [Row(**{k: v for k, v in row.items() if k != "recall_p5"}) for row in results.get("recall", ())]


def _denoised(results: Mapping[str, Any]) -> list[Denoised]:
    """Clips of all prompts by method, dense first."""

    def one(values: Mapping[str, Any]) -> Denoised:
        # infinity is text in JSON
        psnr = [float(value) for value in values["clip_psnr"]]
        return Denoised(**{**values, "clip_psnr": psnr, "frames": torch.empty(0)})

    return [joined(list(map(one, own))) for own in zip(*results.get("renders", {}).values(), strict=True)]


def _parity_table(parity: Mapping[str, Any]) -> Table:
    rows = [
        [key, c["compared"], f"{c['error']:.2e}", f"{c['tolerance']:g}", "FAILED" if c["failed"] else "ok"]
        for key, result in parity.items()
        for c in result["checks"]
    ]
    apart = "; ".join(f"{key} {result['sparse_difference']:.2e}" for key, result in parity.items())
    note = f"Largest difference relative to the largest value. For scale, sparse against dense output: {apart}."
    return Table(["transformer", "compared", "difference", "tolerance", ""], rows, title="Parity", note=note, long=[1])


def _time_table(times: Mapping[str, Sequence[float]]) -> Table:
    dense = median(times["dense"])
    rows = [
        [name, number(median(ms), 4), f"{number(min(ms), 4)} to {number(max(ms), 4)}", f"{dense / median(ms):.2f}"]
        for name, ms in times.items()
    ]
    note = f"One forward of one clip, median of {len(times['dense'])}; guidance takes two."
    return Table(["attention", "ms", "from, to", "speed-up"], rows, title="Step time", note=note)


def _recall_table(rows: Sequence[Row]) -> Table:
    headings = ["clip", "layer", "timestep", ("mean", "over the heads"), ("p5", "5th percentile of the heads"), "least"]
    cells = []
    for row in rows:
        heads = row.head_recall or ()
        values = (row.recall, row.recall_p5, min(heads, default=None))
        cells.append([row.capture, str(row.layer), f"{row.timestep:g}", *map(share, values)])
    note = "Share of the exact attention weights on the pairs that are computed, by layer and timestep (1000 is noise)."
    return Table(headings, cells, title="Recall by head", note=note, long=[0])
