"""What a certificate believes: results of the files that were opened, and verdicts computed from their numbers."""

from __future__ import annotations

import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.evaluation.certificate.conftest import LATENTS, TILE, WEIGHTS, record_of, settings
from vsa.checkpoints import weight_files
from vsa.evaluation.certificate import transformer
from vsa.evaluation.certificate.folder import certify
from vsa.evaluation.certificate.subject import Subject

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")


def altered(path: Path) -> None:
    """Another byte at the end of a file, of the same size and time stamp."""
    stat, content = path.stat(), path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_weights_under_a_kept_size_and_time_stamp_are_measured_anew(export, tmp_path, capsys):
    """Also in the folder of another model's results, and the results of equal weights under another name are kept."""
    asked = settings(shutil.copytree(export, tmp_path / "mine"))
    certify(asked)
    shutil.copytree(export, tmp_path / "other")
    shutil.copytree(tmp_path / "mine-certificate", tmp_path / "other-certificate")
    capsys.readouterr()
    certify(settings(tmp_path / "other"))
    assert "parity-transformer: measured before" in capsys.readouterr().out
    weights = tmp_path / "mine" / WEIGHTS
    tensors, stat = load_file(weights), weights.stat()
    tensors["blocks.1.attn1.to_v.weight"][0] += 1
    save_file(tensors, weights, {"format": "pt"})
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    with pytest.raises(ValueError, match=r"mine fails parity .*: golden tensors, layer 1 the worst: "):
        certify(asked)


def test_every_opened_file_tells_results_apart(wan, export, tmp_path):
    pipe, model = (shutil.copytree(folder, tmp_path / folder.name) for folder in (wan, export))
    videos = tmp_path / "videos"
    videos.mkdir()
    (model / "notes").mkdir()
    (videos / "a.mp4").write_bytes(b"film")
    (videos / "a.txt").write_text("a cat")

    subject = Subject(settings(model, pipeline=str(pipe), clips=str(videos)))

    def identity() -> Any:
        return json.dumps([subject.identity(), subject.clips()], sort_keys=True)

    before = identity()
    opened = [model / "golden.safetensors", model / "sparse_attention.json", model / WEIGHTS, videos / "a.mp4"]
    opened += [videos / "a.txt", pipe / "model_index.json", pipe / "tokenizer" / "tokenizer.json"]
    opened += [
        pipe / "scheduler" / "scheduler_config.json",
        *(pipe / "vae").iterdir(),
        *(pipe / "text_encoder").iterdir(),
    ]
    for path in opened:
        content = path.read_bytes()
        if path.suffix == ".json":
            path.write_bytes(content + b"\n")
        else:
            altered(path)
        assert identity() != before, path
        path.write_bytes(content)
    # the export takes its place
    altered(pipe / "transformer" / WEIGHTS)
    assert identity() == before


def test_a_pipeline_of_the_hub_goes_by_its_commit(wan, export, monkeypatch):
    asked = []
    monkeypatch.setattr(weight_files, "model_files", lambda name, *files: asked.append((name, files[0])) or wan)
    subject = Subject(settings(export, pipeline="me/wan", prompts=["a cat"]))
    # what is small is downloaded before anything is measured
    assert (subject.unusable, asked) == (None, [("me/wan", "scheduler/*")])
    identity = subject.identity()
    assert identity["pipeline"] == wan.name
    assert {name.partition("/")[0] for name in identity["files"]} == {"transformer"}


BAD = ("nan", math.nan, math.inf, -1e-9, 2e-4)


def test_a_verdict_is_computed_from_numbers_by_ones_own_tolerances(export):
    own = Subject(settings(export)).transformers["transformer"]
    names = [
        "all tiles against the class of diffusers",
        "gates and all tiles against the network of this project",
        "golden tensors, layer 1 the worst",
    ]
    good = {"checks": [{"compared": name, "error": 9e-5} for name in names], "sparse_difference": 0.5}
    judged = own.judged(good)
    assert [(c["compared"], c["error"], c["tolerance"]) for c in judged["checks"]] == [(n, 9e-5, 1e-4) for n in names]
    assert [check["failed"] for check in judged["checks"]] == [False] * 3
    for place, name in enumerate(names):
        told = {"compared": name, "tolerance": 1e9, "failed": False}
        for stored in ({**told, "error": value} for value in BAD):
            changed = own.judged({**good, "checks": [*good["checks"][:place], stored, *good["checks"][place + 1 :]]})
            assert [check["failed"] for check in changed["checks"]] == [i == place for i in range(3)], stored
        assert own.judged({**good, "checks": good["checks"][:place]})["checks"][place]["failed"]
    coarse = Subject(settings(export, dtype="bfloat16")).transformers["transformer"].judged(good)
    assert [check["tolerance"] for check in coarse["checks"]] == [0.03, 0.03, 1e-4]
    # an export may ask for a smaller tolerance of its golden tensors, not for a larger one
    for asked, limit in ((0.02, 1e-4), (1e-5, 1e-5)):
        strict = replace(own, sparse=replace(own.sparse, golden_tolerance=asked)).judged(good)
        assert [check["tolerance"] for check in strict["checks"]] == [1e-4, 1e-4, limit]
    dense = replace(own, sparse=replace(own.sparse, golden=None, golden_tolerance=None)).judged(good)
    assert [check["compared"] for check in dense["checks"]] == names[:2]


SHAPES = (None, [], 5, {}, "x", {"checks": [None]}, {"dense": None})


def test_an_altered_result_is_measured_again(wan, export, tmp_path, capsys):
    """Of every part: a number that somebody would rather have, a verdict, and values of any shape."""
    asked = settings(export, out=tmp_path / "out", pipeline=str(wan), prompts=("a cat",))
    first = record_of(certify(asked))
    folder = tmp_path / "out" / "certificate"
    results = {path: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    assert [path.stem.split("-")[0] for path in results] == ["parity", "recall", "render", "step"]
    parity = folder / "parity-transformer.json"
    better = [{"failed": False, "tolerance": 1.0}, {"error": 0.0}, {"error": "nan"}, {"compared": "something else"}]
    for start, change in enumerate(better):
        for place, (path, stored) in enumerate(results.items()):
            path.write_text(json.dumps(stored | {"result": SHAPES[(2 * start + place) % len(SHAPES)]}))
        changed = json.loads(json.dumps(results[parity]))
        changed["result"]["checks"][0] |= change
        parity.write_text(json.dumps(changed))
        capsys.readouterr()
        record = record_of(certify(asked))
        assert capsys.readouterr().out.count(": measuring") == len(results)
        assert {key: record[key] for key in ("parity", "failed")} == {key: first[key] for key in ("parity", "failed")}
    # control
    certify(asked)
    assert capsys.readouterr().out.count(": measured before") == len(results)


def test_parity_that_says_little_is_told(export, tmp_path, monkeypatch):
    parity = transformer.Transformer.parity
    own: dict[str, Any] = {}
    monkeypatch.setattr(transformer.Transformer, "parity", lambda self: {**parity(self), **own})
    for value in ("nan", math.inf):
        own["sparse_difference"] = value
        with pytest.raises(ValueError, match="the sparse output has values that are NaN or infinite"):
            certify(settings(export, out=tmp_path / "out"))
        # it is measured again
        assert not (tmp_path / "out" / "certificate" / "parity-transformer.json").exists()
    own["sparse_difference"] = 1e-4
    page = certify(settings(export, out=tmp_path / "out"))
    assert "parity says little, because the sparse output is within the tolerance too (1.00e-04" in page.read_text()
    assert record_of(page)["facts"]["verdict"].startswith("Right as far as parity tells (3 checks, the worst ")


def test_a_failed_check_is_told_first_and_measured_again(export, tmp_path, monkeypatch):
    parity = transformer.Transformer.parity

    def wrong(self: transformer.Transformer) -> dict[str, Any]:
        found = parity(self)
        found["checks"][0]["error"] = 0.9
        return found

    with monkeypatch.context() as patch:
        patch.setattr(transformer.Transformer, "parity", wrong)
        with pytest.raises(
            ValueError, match=r"fails parity .*: transformer: all tiles against the class of diffusers: "
        ):
            certify(settings(export, out=tmp_path / "out"))
    record = record_of(tmp_path / "out" / "certificate.html")
    assert record["parity"]["transformer"]["checks"][0]["failed"]
    assert record["facts"]["verdict"] == f"Not right: {record['failed'][0]}"
    assert "step_ms" not in record
    assert record_of(certify(settings(export, out=tmp_path / "out")))["facts"]["verdict"].startswith("Right (3 checks")


@torch.no_grad()
def test_a_sparse_output_that_is_not_finite_fails(export, monkeypatch):
    sparse, run = transformer.Transformer._sparse, transformer.Transformer._run
    broken = []
    monkeypatch.setattr(transformer.Transformer, "_sparse", lambda *own: broken.append(1) or sparse(*own))
    monkeypatch.setattr(
        transformer.Transformer, "_run", lambda *own: run(*own) * (math.nan if broken and not broken.clear() else 1)
    )
    asked = settings(export, out=export.parent / "not-finite")
    with pytest.raises(ValueError, match=r"transformer: the sparse output has values that are NaN or infinite$"):
        certify(asked)


def test_differences_are_of_the_largest_entry_in_both_directions():
    expected = torch.tensor([4.0, -8.0, 0.0])
    for change in (torch.tensor([0.0, 0.0, 2.0]), torch.tensor([-2.0, 1.0, 0.0])):
        assert transformer._difference(expected + change, expected) == 0.25
    assert math.isnan(transformer._difference(expected * math.nan, expected))


def test_a_pipeline_that_cannot_be_used_is_refused_before_measuring(wan, export, tmp_path, monkeypatch):
    monkeypatch.setattr(transformer.Transformer, "parity", None)
    other, partial = tmp_path / "ltx", tmp_path / "partial"
    for folder in (other, partial):
        folder.mkdir()
        shutil.copy(wan / "model_index.json", folder)
    index = json.loads((wan / "model_index.json").read_text())
    (other / "model_index.json").write_text(json.dumps(index | {"_class_name": "LTXPipeline"}))
    file = tmp_path / "a-file"
    file.write_text("")
    cases = {
        r"--pipeline .*ltx: WanTransformer3DModel needs a WanPipeline, .*ltx is a LTXPipeline": (export, other),
        r"--pipeline .*partial: .*partial has no vae and no text_encoder": (export, partial),
        r"--pipeline .*: a dense model is rendered in its own pipeline": (wan / "transformer", wan),
        "no such folder: .*nowhere": (export, tmp_path / "nowhere"),
        "a-file/model_index.json is missing": (export, file),
        "model_index.json is missing": (export, tmp_path),
    }
    for message, (model, pipeline) in cases.items():
        budget = {} if model == export else {"topk": 3, "tile": TILE, "latents": LATENTS}
        with pytest.raises(ValueError, match=message):
            certify(settings(model, pipeline=str(pipeline), out=tmp_path / "out", prompts=["a cat"], **budget))
    assert not (tmp_path / "out").exists()


def test_a_dense_model_takes_its_own_pipeline_by_another_path(wan):
    asked = settings(wan, topk=3, tile=TILE, latents=LATENTS, prompts=["a cat"], pipeline=f"{wan}/../{wan.name}")
    assert (Subject(asked).unusable, Subject(asked).missing) == (None, {})
