"""`vsa certify` of a tiny Wan export and of dense models, against the pipeline as a user runs it."""

from __future__ import annotations

import csv
import json
import math
import os
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
from tests.data.tiny_wan import make_pipeline
from tests.integrations import tiny
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints import weight_files
from vsa.checkpoints.golden import write_golden
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.checkpoints.wan import export_pretrained
from vsa.checkpoints.weight_source import open_network
from vsa.cli.certify import certify as certify_command
from vsa.evaluation.certificate import transformer
from vsa.evaluation.certificate.folder import certify
from vsa.evaluation.certificate.subject import CertifySettings, Subject
from vsa.evaluation.video_metrics import psnr
from vsa.integrations.diffusers.pipeline import generate_videos, open_pipeline
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import clip_seeds

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

# latents of 2 x 6 x 10 are 2 x 3 x 5 tokens in 12 tiles
TILE, TILES, GRID, LATENTS = (1, 2, 2), 12, (2, 3, 5), (2, 6, 10)
PROMPTS = ["a red circle moving left", "a cat"]
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pipe = make_pipeline()
    tiny.stirred(pipe.transformer)
    folder = tmp_path_factory.mktemp("wan") / "wan"
    pipe.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def export(wan: Path) -> Path:
    """The pipeline's transformer with gates that do something, and golden tensors."""
    dense, _ = open_network(wan)
    sizes: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 32, "freq_dim": 32}
    sizes |= {"in_channels": 16, "out_channels": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 64}

    def attention(**layer: Any) -> VideoSparseAttention:
        return VideoSparseAttention(**layer, tile_thw=TILE, fine_gate=False)

    model = VideoDiT(attention=attention, **sizes)
    model.load_state_dict(dense.state_dict(), strict=False)
    for block in model.blocks:
        block.to_gate_compress.bias.data.fill_(0.5)
    config = SparseAttentionConfig(
        method="video_sparse",
        tile_thw=TILE,
        partition="cube",
        block_order="nested",
        fine_gate=False,
        gate_keys=tuple(name for name in model.state_dict() if "to_gate_" in name),
        grid_topk=((3, 4),),
        num_tiles=(TILES,),
        grids=(GRID,),
        guidance_scale=3.0,
    )
    folder = export_pretrained(model, wan.parent / "export", sparse=config)
    write_golden(open_network(folder)[0], folder)
    return folder


def settings(model: Path, **options: Any) -> CertifySettings:
    few = {"steps": 2, "timesteps": (500.0,), "repeats": 1, "queries": 30, "device": "cpu"}
    return CertifySettings(**{"model": str(model), **few, **options})


def record_of(page: Path) -> dict[str, Any]:
    return json.loads(page.with_suffix(".json").read_text())


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
    monkeypatch.setattr(weight_files, "_download", lambda *names: asked.append(names) or wan)
    subject = Subject(settings(export, pipeline="me/wan", prompts=["a cat"]))
    # what is small is downloaded before anything is measured
    assert (subject.unusable, asked) == (None, [("me/wan", "scheduler")])
    identity = subject.identity()
    assert identity["pipeline"] == wan.name
    assert {name.partition("/")[0] for name in identity["files"]} == {"transformer"}


BAD = ("nan", math.nan, math.inf, -1e-9, "0.0", None, False, 2e-4)


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
        for checks in ([*good["checks"][:place], told, *good["checks"][place + 1 :]], good["checks"][:place]):
            assert own.judged({**good, "checks": checks})["checks"][place]["failed"]
    coarse = Subject(settings(export, dtype="bfloat16")).transformers["transformer"].judged(good)
    assert [check["tolerance"] for check in coarse["checks"]] == [0.03, 0.03, 1e-4]


def test_a_stored_verdict_is_not_believed(export, tmp_path, monkeypatch):
    asked = settings(export, out=tmp_path / "out")
    certify(asked)
    path = tmp_path / "out" / "certificate" / "parity-transformer.json"
    stored = json.loads(path.read_text())
    monkeypatch.setattr(transformer.Transformer, "parity", None)
    for key, value in (("error", 0.9), ("error", "nan"), ("error", math.nan), ("compared", "something else")):
        changed = json.loads(json.dumps(stored))
        changed["result"]["checks"][0] |= {key: value, "failed": False, "tolerance": 1.0}
        path.write_text(json.dumps(changed))
        with pytest.raises(
            ValueError, match=r"fails parity .*: transformer: all tiles against the class of diffusers: "
        ):
            certify(asked)
        record = record_of(tmp_path / "out" / "certificate.html")
        assert record["parity"]["transformer"]["checks"][0]["failed"]
        assert record["facts"]["verdict"] == f"Not right: {record['failed'][0]}"
        assert "step_ms" not in record
        assert not path.exists()
    for value in ("nan", math.inf, None):
        path.write_text(json.dumps(stored | {"result": stored["result"] | {"sparse_difference": value}}))
        with pytest.raises(ValueError, match="the sparse output has values that are NaN or infinite"):
            certify(asked)
    path.write_text(json.dumps(stored | {"result": stored["result"] | {"sparse_difference": 1e-4}}))
    page = certify(asked)
    assert "parity says little, because the sparse output is within the tolerance too (1.00e-04" in page.read_text()
    assert record_of(page)["facts"]["verdict"].startswith("Right as far as parity tells (3 checks, the worst ")


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
