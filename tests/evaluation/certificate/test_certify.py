"""`vsa certify` of a tiny Wan export and of dense models, against the pipeline as a user runs it."""

from __future__ import annotations

import csv
import math
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.commands import run_command
from tests.evaluation.certificate.conftest import LATENTS, TILE, WEIGHTS, record_of, settings
from tests.integrations import tiny
from vsa.cli.certify import certify as certify_command
from vsa.evaluation.certificate import transformer
from vsa.evaluation.certificate.folder import certify
from vsa.evaluation.certificate.subject import Subject
from vsa.evaluation.video_metrics import psnr
from vsa.integrations.diffusers.pipeline import generate_videos, open_pipeline
from vsa.sampling.pipeline import clip_seeds

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

PROMPTS = ["a red circle moving left", "a cat"]


def test_an_export_is_certified_as_its_pipeline_renders_it(wan, export, monkeypatch, capsys):
    asked = settings(export, pipeline=str(wan), prompts=PROMPTS)
    render, asked_for = Subject.render, []

    def interrupted(subject: Subject, prompt: str, picture: Path) -> Any:
        if asked_for:
            raise KeyboardInterrupt
        asked_for.append(prompt)
        return render(subject, prompt, picture)

    monkeypatch.setattr(Subject, "render", interrupted)
    with pytest.raises(KeyboardInterrupt):
        certify(asked)

    def again(*_: Any) -> Any:
        raise AssertionError("what is there is measured again")

    for owner, name in ((transformer.Transformer, "parity"), (transformer.Transformer, "step_ms"), (Subject, "recall")):
        monkeypatch.setattr(owner, name, again)
    monkeypatch.setattr(Subject, "render", lambda *own: asked_for.append(own[1]) or render(*own))
    page = certify(asked)
    assert asked_for == PROMPTS
    assert page == wan.parent / "export-certificate" / "certificate.html"
    record = record_of(page)
    assert (record["failed"], record["missing"]) == ([], [])
    (parity,) = record["parity"].values()
    assert [check["error"] < 1e-5 for check in parity["checks"]] == [True] * 3
    assert parity["sparse_difference"] > 1e-2
    assert min(record["step_ms"]["dense"] + record["step_ms"]["sparse"]) > 0

    # 3 and 4 of 12 tiles
    trained = [row for row in record["recall"] if row["method"] == "as trained"]
    assert [(row["layer"], row["timestep"], row["topk"]) for row in trained] == [(0, 500, 3), (1, 500, 4)]
    for row in trained:
        assert 0.1 < row["recall_p5"] <= row["recall"] < 0.9
        assert len(row["head_recall"]) == 2
    with open(page.parent / "certificate" / "heads.csv") as file:
        assert [float(line["recall"]) for line in csv.DictReader(file)] == [
            x for r in trained for x in r["head_recall"]
        ]

    # the export's base weights are those of the pipeline
    opened, plain = open_pipeline(wan, transformer=export), open_pipeline(wan)
    clip = {"size": (48, 80), "frames": 5, "guidance": 3.0, "steps": 2}
    for prompt in PROMPTS:
        dense, sparse = record["renders"][prompt]
        latents: list[Tensor] = []
        videos = []
        for pipe in (opened, plain):
            with torch.no_grad():
                seeds = clip_seeds(0, [prompt]).tolist()
                videos.append(generate_videos(pipe, [prompt], seeds=seeds, keep=latents.append, **clip))
        assert sparse["psnr"] == pytest.approx(psnr(*videos), abs=1e-3)
        assert sparse["cosine"] == pytest.approx(float(F.cosine_similarity(*(x.flatten() for x in latents), dim=0)))
        assert (dense["density"], dense["psnr"]) == (1, None)
        # tiles have 1 to 4 tokens
        assert 0.1 < sparse["density"] < 0.45
    text = page.read_text()
    for words in (
        "Parity",
        "Step time",
        "Recall by head",
        "Denoising runs",
        "as trained",
        "golden tensors",
        "vsa-train",
    ):
        assert words in text, words

    # the sentence on top has the numbers of the tables
    worst = max(parity["checks"], key=lambda check: check["error"] / check["tolerance"])
    dense, sparse = (median(record["step_ms"][name]) for name in ("dense", "sparse"))
    kept = sum(row["recall"] for row in trained) / len(trained)
    means = [-10 * math.log10(sum(10 ** (-row["psnr"] / 10) for _, row in record["renders"].values()) / 2)]
    assert record["facts"]["verdict"] == (
        f"Right (3 checks, the worst {worst['error']:.2g} of 0.0001 allowed); how good: {kept:.1%} recall and "
        f"{means[0]:.3g} dB PSNR against dense clips; how fast: a step {dense / sparse:.2f} times as fast as dense"
    )
    assert text.index("verdict") < text.index(record["facts"]["verdict"]) < text.index("Parity and step time are")
    # another command says whose page it replaces, and no picture stands for another
    monkeypatch.setattr("sys.argv", ["vsa", "certify", "again"])
    first, second = (page.parent / "certificate").glob("render-*.png")
    first.unlink()
    shutil.copy(page.parent / "certificate" / "heads.csv", second)
    capsys.readouterr()
    asked_for.clear()
    certify(asked)
    assert sorted(asked_for) == sorted(PROMPTS)
    assert f"{page} replaces that of: {record['facts']['command']}\n" in capsys.readouterr().out
    certify(asked)
    assert "replaces" not in capsys.readouterr().out
    assert sorted(asked_for) == sorted(PROMPTS)


def test_a_damaged_weight_fails(export, tmp_path, monkeypatch):
    damaged = tmp_path / "damaged"
    shutil.copytree(export, damaged)
    tensors = load_file(damaged / WEIGHTS)
    tensors["blocks.1.attn1.to_v.weight"][0] += 1
    save_file(tensors, damaged / WEIGHTS)
    with pytest.raises(ValueError, match=r"damaged fails parity .*: transformer: golden tensors, layer 1 the worst: "):
        run_command(certify_command, damaged, "--device", "cpu")
    page = tmp_path / "damaged-certificate" / "certificate.html"
    assert "FAILED" in page.read_text()
    record = record_of(page)
    assert record["missing"][0] == "step time: the model fails parity"
    assert [check["error"] < 1e-5 for check in record["parity"]["transformer"]["checks"]] == [True, True, False]
    # the failure is not kept
    shutil.copy(export / WEIGHTS, damaged / WEIGHTS)
    page = certify(settings(damaged))
    lines = record_of(page)["missing"]
    assert lines == [
        f"{part}: needs a VAE and a text encoder, name a WanPipeline with --pipeline"
        for part in ("recall by head", "paired renders")
    ]


@pytest.mark.parametrize("state", ["_whole", "_gated"])
def test_parity_compares_what_it_says(export, state, monkeypatch):
    """The sparse model in place of the one that keeps all tiles."""
    monkeypatch.setattr(transformer.Transformer, state, transformer.Transformer._sparse)
    checks = Subject(settings(export)).transformers["transformer"].parity()["checks"]
    assert [check["error"] > 1e-2 for check in checks] == [check["failed"] for check in checks]
    assert [check["failed"] for check in checks] == [state == "_whole", state == "_gated", False]


def test_an_expert_of_low_noise_is_known_by_its_folder(export, tmp_path):
    folder = shutil.copytree(export, tmp_path / "transformer_2")
    assert [*Subject(settings(folder)).transformers] == ["transformer_2"]
    assert [*Subject(settings(export)).transformers] == ["transformer"]


def test_other_families_get_what_is_known_of_them(tmp_path):
    tiny.ltx().model.save_pretrained(tmp_path / "ltx")
    words = ["--sparsity", "0.5", "--tile", "2", "2", "4", "--latents", "3", "5", "7", "--prompt", "a cat"]
    run_command(certify_command, tmp_path / "ltx", *words, "--device", "cpu", "--repeats", "1")
    record = record_of(tmp_path / "ltx-certificate" / "certificate.html")
    (check,) = record["parity"]["transformer"]["checks"]
    assert check["error"] < 1e-5 < 1e-2 < record["parity"]["transformer"]["sparse_difference"]
    assert len(record["step_ms"]["sparse"]) == 1
    reason = "needs a VAE and a text encoder, name a LTXPipeline with --pipeline"
    assert record["missing"] == [f"recall by head: {reason}", f"paired renders: {reason}"]


def test_bad_input_is_one_line(wan, export, tmp_path):
    tiny.ltx2().model.save_pretrained(tmp_path / "ltx2")
    cases = {
        "is dense: give --sparsity S or --topk K": settings(wan),
        "--topk 3 applies to dense models": settings(export, topk=3),
        "topk 13 is above the 12 tiles": settings(wan, topk=13, tile=TILE, latents=LATENTS),
        "must be multiples of the patch": settings(wan, topk=3, latents=(2, 5, 10)),
        "expected either topk=K or sparsity=SHARE": settings(wan, method="pooled_tail"),
        "unknown|known|expected": settings(wan, method="no_such_method", topk=3),
        "no such folder: .*nowhere": settings(tmp_path / "nowhere"),
        "has layers 0 to 1, got 2": settings(export, layers=[2]),
        "no such video: nowhere": settings(export, clips="nowhere"),
        "class_name must be a class that can be trained": settings(tmp_path / "ltx2", topk=3),
    }
    for message, asked in cases.items():
        with pytest.raises(ValueError, match=message) as error:
            certify(asked)
        assert "\n" not in str(error.value)
    assert not list(tmp_path.rglob("certificate.json"))
    (tmp_path / "certificate.html").write_text("another's")
    with pytest.raises(ValueError, match="is not from `vsa certify`"):
        certify(settings(export, out=tmp_path))
    with pytest.raises(ValueError, match="--timesteps must be in"):
        settings(export, timesteps=(1001.0,))
