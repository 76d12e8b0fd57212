"""What is captured is what the layers of a model see, and a file brings it back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from vsa.data.toy_videos import render_clip
from vsa.evaluation.comparison.captures import Capture, Captures, load_captures, save_captures
from vsa.evaluation.comparison.measure import measure
from vsa.evaluation.comparison.methods import AS_TRAINED, Method, parse_method
from vsa.evaluation.comparison.runs import RunModel
from vsa.evaluation.inspection.clip import Clip
from vsa.evaluation.sparge_tuning import TuneSettings, tune_sparge
from vsa.sampling.pipeline import SamplingPipeline, load_run


@pytest.fixture(scope="module")
def run(tiny_run_dir: Path) -> SamplingPipeline:
    return load_run(tiny_run_dir, device="cpu")


@pytest.fixture(scope="module")
def clip(run: SamplingPipeline) -> Clip:
    video, _, _ = render_clip(0, 1, size=(16, 64, 64))
    return Clip(name="a.mp4", caption="a red circle", video=video, latents=run.codec.encode(video))


@pytest.fixture(scope="module")
def seen(run: SamplingPipeline, clip: Clip) -> tuple[Captures, dict[str, list[torch.Tensor]]]:
    """Captures of both layers at two timesteps, and by hooks what went in and out of the layers meanwhile."""
    hook_tensors: dict[str, list[torch.Tensor]] = {"v": [], "out": [], "gate": []}
    handles = []
    for block in run.model.blocks:
        to_v, to_out, gate = block.attn1.to_v, block.attn1.to_out[0], block.to_gate_compress
        handles.append(to_v.register_forward_hook(lambda _, args, out: hook_tensors["v"].append(out)))
        handles.append(to_out.register_forward_hook(lambda _, args, out: hook_tensors["out"].append(args[0])))
        handles.append(gate.register_forward_hook(lambda _, args, out: hook_tensors["gate"].append(out)))
    captures = RunModel(run).capture([clip], layers=(0, 1), timesteps=(800.0, 300.0), seed=3)
    for handle in handles:
        handle.remove()
    return captures, hook_tensors


def test_captures_are_in_raster_order_with_their_places(seen, run, tiny_config):
    captures, hook_tensors = seen
    assert captures.attention == tiny_config()["attention"]
    assert [(item.name, item.layer, item.timestep) for item in captures.items] == [
        ("a.mp4", layer, timestep) for timestep in (800, 300) for layer in (0, 1)
    ]
    layout = run.model.layout_for((16, 4, 8, 8))
    for place, item in enumerate(captures.items):
        assert (item.grid_thw, tuple(item.q.shape), item.topk) == ((4, 4, 4), (1, 64, 2, 16), 2)
        # the model's own order is another one
        assert torch.equal(layout.unpermute(hook_tensors["v"][place]), item.v.flatten(2))
        assert not torch.equal(hook_tensors["v"][place], item.v.flatten(2))
        assert torch.equal(layout.unpermute(hook_tensors["gate"][place]), item.extra["gate_compress"].flatten(2))
        assert set(item.extra) == {"gate_compress", "gate_fine"}
        assert item.place == f"a.mp4, layer {item.layer}, timestep {item.timestep:g}"


def test_its_own_method_is_measured_with_its_gates(seen, run):
    captures, hook_tensors = seen
    assert captures.attention is not None
    own = Method(label=AS_TRAINED, family=AS_TRAINED, config=captures.attention, trained=True)
    methods = [parse_method("full"), parse_method("video_sparse topk=2", tile_thw=(2, 2, 2)), own]
    layout = run.model.layout_for((16, 4, 8, 8))
    for place, item in enumerate(captures.items):
        _, free, own_row = measure(item, methods, queries=None, repeats=1)
        q, k, v = (x.double().transpose(1, 2) for x in (item.q, item.k, item.v))
        exact = ((q @ k.transpose(-1, -2) / 4).softmax(-1) @ v).transpose(1, 2).flatten(2)
        # what the layer itself made of it, by the hook
        error = layout.unpermute(hook_tensors["out"][place]).double() - exact
        assert own_row.error_l1 == pytest.approx(float(error.abs().sum() / exact.abs().sum()), rel=1e-4)
        assert (own_row.topk, own_row.tiles, own_row.density) == (2, 8, 0.25)
        # the same tiles without gates are another output
        assert own_row.recall == pytest.approx(free.recall, abs=1e-6)
        assert abs(own_row.error_l1 - free.error_l1) > 0.01


def test_watching_changes_nothing(seen, run, clip):
    captures, _ = seen
    model = RunModel(run)
    again = model.capture([clip], layers=(1,), timesteps=(300.0,), seed=3)
    assert [item.layer for item in again.items] == [1]
    assert torch.equal(again.items[0].q, captures.items[-1].q)
    other = model.capture([clip], layers=(1,), timesteps=(300.0,), seed=4)
    assert not torch.equal(other.items[0].q, captures.items[-1].q)


def test_a_file_brings_captures_back(seen, tmp_path: Path):
    captures, _ = seen
    copy = load_captures(save_captures(captures, tmp_path / "q.safetensors"))
    assert (copy.source, copy.attention) == (captures.source, captures.attention)
    assert len(copy.items) == 4
    for ours, theirs in zip(copy.items, captures.items, strict=True):
        for name in ("name", "grid_thw", "layer", "timestep", "topk"):
            assert getattr(ours, name) == getattr(theirs, name)
        for name in "qkv":
            assert torch.equal(getattr(ours, name), getattr(theirs, name))
        assert ours.extra.keys() == theirs.extra.keys()
        assert all(torch.equal(x, theirs.extra[name]) for name, x in ours.extra.items())


def test_a_file_keeps_the_texts_of_a_row(tmp_path: Path):
    x = torch.randn(1, 8 + 6, 2, 4)
    item = Capture(name="a", grid_thw=(2, 2, 2), q=x, k=x + 1, v=x + 2, before=[2, 1], after=[3])
    path = save_captures(Captures(items=[item], source="x"), tmp_path / "q.safetensors")
    (copy,) = load_captures(path).items
    assert copy.segments == item.segments
    assert [(segment.kind, segment.num_tokens) for segment in copy.segments] == [
        ("text", 2), ("text", 1), ("video", 8), ("text", 3)
    ]  # fmt: skip
    assert torch.equal(copy.q, x)
    save_captures(Captures(items=[replace(item, after=[2])], source="x"), path)
    with pytest.raises(ValueError, match=r"0.q must be .* the 13 tokens of \(2, 2, 2\) and 5 of text, got \[1, 14"):
        load_captures(path)
    save_captures(Captures(items=[item], source="x"), path)
    with pytest.raises(ValueError, match="layer 0: a has text in its rows, which are tuned for video alone"):
        tune_sparge(TuneSettings(captures=path, out=tmp_path / "tuned"))


def test_files_that_are_none_are_refused(tmp_path: Path):
    def expect_refusal(message: str, path: Path) -> None:
        with pytest.raises(ValueError, match=message) as error_info:
            load_captures(path)
        assert "\n" not in str(error_info.value)

    path = tmp_path / "q.safetensors"
    expect_refusal("no such file of captures: .*q.safetensors", path)
    path.write_text("no tensors")
    expect_refusal("q.safetensors is (damaged|not a complete file of captures)", path)
    x = torch.zeros(1, 8, 2, 4)
    save_file({"a": x}, path)
    expect_refusal("holds no captures: expected format .*, got None", path)
    entry = {"name": "a", "grid_thw": [2, 2, 2], "layer": 0, "timestep": None, "topk": None}
    for tensors, captures, message in (
        ({"0.q": x, "0.k": x}, [entry], "not a complete file of captures: '0.v'"),
        ({"0.q": x, "0.k": x, "0.v": x[:, :7]}, [entry], r"q.safetensors: 0.v must be .* got \[1, 7, 2, 4\]"),
        ({"0.q": x}, [], "holds no captures"),
        ({"0.q": x, "0.k": x, "0.v": x / 0}, [entry], "q.safetensors: captures: 64 values of 0.v are NaN or infinite"),
    ):
        facts = {"source": "here", "attention": None, "captures": captures}
        tensors = {name: one.clone() for name, one in tensors.items()}
        save_file(tensors, path, metadata={"format": "vsa-captures-1", "captures": json.dumps(facts)})
        expect_refusal(message, path)
