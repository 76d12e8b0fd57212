"""Bench of whole models: iterations of distillation, and denoising."""

from __future__ import annotations

import importlib
import json
import re
import sys
from dataclasses import replace

import pytest
import torch

from tests.kernels.benching import FAST

CPU = torch.device("cpu")

DISTILL_PARTS = (
    *(f"generator update, step {i}" for i in (1, 2, 3)),
    "generator optimizer and average",
    *(f"critic update, step {i}" for i in (1, 2, 3)),
    *("critic optimizer", "whole iteration, step 2", "generator update, mean", "critic update, mean"),
    *("iteration without generator update", "iteration with generator update"),
    "mean iteration, 1 in 5 with generator update",
)


@pytest.mark.slow
def test_an_iteration_of_distillation_is_timed_in_parts_and_whole(bench, tmp_path, capsys):
    out = tmp_path / "report.json"
    bench.main(["distill", "--shapes", "tiny", "--repeats", "1", "--out", str(out)])
    report, output = json.loads(out.read_text()), capsys.readouterr().out
    assert [r["op"] for r in report["rows"]] == [f"{name}: {p}" for name in ("dense", "gather") for p in DISTILL_PARTS]
    rows = {r["op"]: r for r in report["rows"]}
    for name in ("dense", "gather"):
        ms = {part: rows[f"{name}: {part}"]["median_ms"] for part in DISTILL_PARTS}
        updates = [sum(ms[f"{role} update, step {i}"] for i in (1, 2, 3)) / 3 for role in ("generator", "critic")]
        without = updates[1] + ms["critic optimizer"]
        whole = updates[0] + ms["generator optimizer and average"] + without
        assert ms["iteration without generator update"] == pytest.approx(without, abs=1e-2)
        assert ms["iteration with generator update"] == pytest.approx(whole, abs=1e-2)
        assert ms[DISTILL_PARTS[-1]] == pytest.approx((whole + 4 * without) / 5, abs=1e-2)
    last = rows[f"gather: {DISTILL_PARTS[-1]}"]
    assert last["baseline"] == f"dense: {DISTILL_PARTS[-1]}"
    assert last["speedup"] == pytest.approx(rows[last["baseline"]]["median_ms"] / last["median_ms"], abs=1e-3)
    note = f"iteration with generator update {_seconds(rows, 'gather')} s"
    assert f"eager, gather generator, recomputing full: {note}" in output


@pytest.mark.slow
def test_a_distillation_is_timed_at_every_level_of_checkpointing(bench, monkeypatch, tmp_path):
    module, levels = importlib.import_module("scripts.bench.distill"), []
    prepare = module.parallelize

    def recorded(dit, mesh, plan, device):
        levels.append(plan.activation_checkpointing)
        return prepare(dit, mesh, plan, device)

    monkeypatch.setattr(module, "parallelize", recorded)
    out = tmp_path / "report.json"
    bench.main(["distill", *FAST, "--levels", "none", "full", "--out", str(out)])
    # generator, critic, teacher of a dense and of a sparse generator
    assert levels == 6 * ["none"] + 2 * ["full", "full", "none"]
    report = json.loads(out.read_text())
    whole = [row for row in report["rows"] if "whole" in row["op"]]
    assert [row["activation_checkpointing"] for row in whole] == ["none", "none", "full", "full"]
    assert [row["speedup"] == 1 for row in whole if row["op"].startswith("dense")] == [True, True]
    assert {row["pass"] for row in whole} == {f"distillation, recomputing {level}" for level in ("none", "full")}


def _seconds(rows, name: str) -> str:
    return f"{rows[f'{name}: iteration with generator update']['median_ms'] / 1e3:.3f}"


@pytest.fixture
def at_work(bench):
    return importlib.import_module("scripts.bench.distill").Distillation(bench.tiny, "gather", False, CPU)


ROLES = ("generator", "fake_score", "real_score")


def test_an_iteration_of_distillation_moves_what_it_trains(at_work):
    nets = at_work.networks
    before = {role: [p.detach().clone() for p in getattr(nets, role).parameters()] for role in ROLES}

    def changes(role: str) -> list[bool]:
        return [not torch.equal(a, b) for a, b in zip(before[role], getattr(nets, role).parameters(), strict=True)]

    at_work.check()
    assert not any(changes("generator") + changes("fake_score"))
    # large steps, to tell the average from the weights
    for optimizer in at_work.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = 0.1
    at_work.iteration(2)
    assert all(changes("generator") + changes("fake_score"))
    assert not any(changes("real_score"))
    assert all(p.grad is None for role in before for p in getattr(nets, role).parameters())
    average = zip(at_work.average, before["generator"], nets.generator.parameters(), strict=True)
    assert all(torch.allclose(a, old + 0.02 * (new - old), rtol=0, atol=1e-6) for a, old, new in average)


@pytest.mark.parametrize(
    ("tamper", "message"),
    [
        (lambda loss, nets: loss + nets.fake_score.proj_out.weight.sum(), "update reaches the fake_score"),
        (lambda loss, nets: loss * float("nan"), "update has no finite loss"),
        (lambda loss, nets: loss * 0, r"update has (\d+) of \1 gradients, their norm is 0.0"),
    ],
)
def test_gradients_in_the_wrong_network_stop_the_case(bench, monkeypatch, capsys, tamper, message):
    objective = importlib.import_module("scripts.bench.distill").DistributionMatching
    right = objective.generator_update

    def wrong(self, networks, *args, **kwargs):
        result = right(self, networks, *args, **kwargs)
        return replace(result, loss=tamper(result.loss, networks))

    monkeypatch.setattr(objective, "generator_update", wrong)
    with pytest.raises(ValueError, match=f"the generator's {message}"):
        bench.main(["distill", *FAST])
    assert capsys.readouterr().out == ""


@pytest.fixture
def denoise(bench, monkeypatch):
    module = importlib.import_module("scripts.bench.denoise")
    monkeypatch.setattr(module, "_STEPS", 4)
    return module


def test_denoising_is_compared_with_many_guided_steps(bench, denoise, monkeypatch, tmp_path, capsys):
    # of the encoder and the VAE there is a test of its own
    for package in ("diffusers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    out = tmp_path / "report.json"
    bench.main(["denoise", *FAST, "--out", str(out)])
    report, output = json.loads(out.read_text()), capsys.readouterr().out
    rows = {r["op"]: r for r in report["rows"]}
    guided_op = "dense, 4 steps, guidance 5"
    forms = [f"dense, 1 step, guidance 5, {form}" for form in ("two forwards", "one forward of two")]
    dense = [*forms, "dense, 3 steps", guided_op, "dense, 4 steps"]
    assert list(rows) == [*dense, "gather, 3 steps", "gather, 4 steps, guidance 5"]
    ratio = rows[guided_op]["median_ms"] / rows["gather, 3 steps"]["median_ms"]
    assert rows["gather, 3 steps"]["speedup"] == pytest.approx(ratio, abs=1e-3)
    form = min(forms, key=lambda op: rows[op]["median_ms"]).rpartition(", ")[2]
    assert f"faster than others by {ratio:.1f}x {guided_op}, {form} (the paper: 50.9x)" in output
    assert "Not measured: VAE decode in float32 at tiny: ModuleNotFoundError" in output
    assert "Not measured: text encoder, captions: 2 at tiny: ModuleNotFoundError" in output


@pytest.mark.slow
def test_text_encoder_and_vae_are_added_to_both(bench, denoise, monkeypatch, tmp_path, capsys):
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    monkeypatch.setattr(denoise, "_VAE_DTYPES", ("float32",))
    out = tmp_path / "report.json"
    bench.main(["denoise", "--shapes", "tiny", "--repeats", "1", "--out", str(out)])
    rows = {r["op"]: r["median_ms"] for r in json.loads(out.read_text())["rows"]}
    vae = "VAE decode in float32"
    totals = {}
    # only the guided model reads the empty caption too
    for op, captions in (("dense, 4 steps, guidance 5", 2), ("gather, 3 steps", 1)):
        totals[op] = rows[op] + rows[f"text encoder, captions: {captions}"] + rows[vae]
        assert rows[f"{op}, text encoder, {vae}"] == pytest.approx(totals[op], abs=1e-3)
    ratio = totals["dense, 4 steps, guidance 5"] / totals["gather, 3 steps"]
    note = re.search(rf"eager, with text encoder and {vae}: ([\d.]+)x, gather, 3 steps", capsys.readouterr().out)
    assert note is not None
    # of times before they are rounded to a microsecond
    assert float(note[1]) == pytest.approx(ratio, abs=0.01)


def test_what_is_denoised_is_what_the_samplers_make(bench, denoise, monkeypatch):
    pytest.importorskip("omegaconf")
    from vsa.attention.kept_tiles import KeptTiles
    from vsa.diffusion.rollout import rollout
    from vsa.sampling.pipeline import SampleSettings, sample_latents

    setup = importlib.import_module("scripts.bench.timing").Setup(
        backends=["gather"], peers=[], lists="random", device=CPU, dtype=torch.float32, repeats=1
    )
    models = denoise._same_weights(bench.tiny, setup)
    clip = denoise.Clip(bench.tiny, models["dense"], torch.float32, CPU)
    # one token each, or the captions average out
    clip.text, clip.null = 50 * clip.text[:, :1], 50 * clip.null[:, :1]
    # a network with weights at zero would return zeros and draw less power
    assert all(p.any() for p in models["dense"].parameters())

    class Captions:
        max_tokens = 1

        def encode_batch(self, captions):
            return [{"": clip.null[0], "a": clip.text[0]}[caption] for caption in captions]

    with torch.no_grad():
        velocity = clip.conditioned(models["gather"], 2)
        few = clip.few_steps(velocity)
        assert torch.equal(few, rollout(velocity, clip.noise, clip.seeds, (1000, 757, 522), 2))
        apart, together = (clip.many_steps(clip.guided(models["dense"], 8, form), 4) for form in (False, True))
        settings = SampleSettings(
            steps=4, guidance=5.0, flow_shift=3.0, topk=KeptTiles.of(8),
            latent_shape=tuple(clip.noise.shape[1:]), batch_size=1, text_padding="zeros",
        )  # fmt: skip
        samples = sample_latents(models["dense"], Captions(), ["a"], clip.seeds, settings)
    assert torch.allclose(apart, together, atol=1e-4)
    assert torch.allclose(together, samples, atol=1e-4)
    # guidance is in it
    alone = clip.many_steps(clip.conditioned(models["dense"], 8), 4)
    assert not torch.allclose(alone, samples, atol=1e-2)


def test_a_generator_that_is_not_the_dense_model_stops_the_case(bench, denoise, monkeypatch, capsys):
    for package in ("diffusers", "transformers"):
        monkeypatch.setitem(sys.modules, package, None)
    right = denoise._same_weights

    def wrong(*args):
        models = right(*args)
        models["gather"].blocks[1].attn1.to_v.weight.mul_(1.001)
        return models

    monkeypatch.setattr(denoise, "_same_weights", wrong)
    with pytest.raises(ValueError, match="3-step generator on gather is wrong, no speed is printed: all tiles"):
        bench.main(["denoise", *FAST])
    monkeypatch.setattr(denoise, "_same_weights", right)
    # all tiles kept: nothing is sparse
    whole = replace(bench.tiny, name="whole", topk=8)
    monkeypatch.setattr(importlib.import_module("scripts.bench.problems"), "CPU_SHAPES", (whole,))
    with pytest.raises(ValueError, match="does not notice a damaged input"):
        bench.main(["denoise", "--shapes", "whole", "--repeats", "1"])
    assert capsys.readouterr().out == ""


def test_calls_of_seconds_are_warmed_up_as_they_say(bench):
    timing, calls = importlib.import_module("scripts.bench.timing"), []
    setup = timing.Setup(backends=[], peers=[], lists="random", device=CPU, dtype=torch.float32, repeats=3)
    op = timing.Op(
        name="x", call=lambda: calls.append("call"), passes=("forward",), warm_up=lambda: calls.append("warm-up")
    )
    (row,) = timing.measure([op], setup)
    assert calls == ["warm-up", "warm-up", "call", "call", "call"]
    assert row["repeats"] == 3


def test_distillation_is_measured_at_its_published_sparsity(bench):
    from vsa.attention.kept_tiles import Budget

    cases, problems = (importlib.import_module(f"scripts.bench.{name}") for name in ("cases", "problems"))
    for case in ("distill", "denoise"):
        (shape,) = problems.choose_shapes(cases.CASES[case].gpu_shapes, False, torch.device("cuda"))
        # 61 frames of 448 x 832 in latents of 16 x 56 x 104
        assert shape.tokens == 16 * 28 * 52
        assert shape.topk == Budget(sparsity=0.8).tiles(shape.tiles)
        assert importlib.import_module("scripts.bench.step").named_model(shape) == "wan_1_3b"
