"""`vsa merge`: the sum against an independent one, what the result says of itself, refusals."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Mapping
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.commands import run_command
from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.merge import MergedTensors
from vsa.checkpoints.run_checkpoint import resolve_checkpoint, write_checkpoint
from vsa.checkpoints.run_folder import check_folder
from vsa.checkpoints.sparse_config import SPARSE_CONFIG, SparseAttentionConfig, read_sparse_config
from vsa.checkpoints.wan import export_pretrained, sparse_settings
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import WeightFiles
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.cli.convert import convert
from vsa.cli.merge import merge
from vsa.files import remove_folder
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import generate, load_run

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full:UserWarning")
STEPS = [1000.0, 757.0, 522.0]
SIZES = dict(num_attention_heads=2, attention_head_dim=16, ffn_dim=48, num_layers=2, text_dim=64, freq_dim=32)
SPARSE = partial(VideoSparseAttention, tile_thw=(2, 2, 2))


def changed(tensors: Mapping[str, Tensor], seed: int, size: float = 0.02) -> dict[str, Tensor]:
    """`tensors` after a training: each a little off."""
    generator = torch.Generator().manual_seed(seed)
    return {key: value + size * torch.randn(value.shape, generator=generator) for key, value in tensors.items()}


def without_gates(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: value for key, value in tensors.items() if not is_gate(key)}


def rewrite(run: Path, tensors: Mapping[str, Tensor] | None = None, **changes: Any) -> dict[str, Tensor]:
    """Put other weights (both groups, the averaged ones as given) and changes of its state into a run."""
    checkpoint = resolve_checkpoint(run)
    ema = dict(tensors) if tensors is not None else checkpoint.tensors("ema")
    state = {key: value for key, value in checkpoint.state.items() if key not in changes} | changes
    groups = {"model": {key: value + 1 for key, value in ema.items()}, "ema": ema}
    remove_folder(checkpoint.path)
    write_checkpoint(run / "checkpoints", groups, {k: v for k, v in state.items() if v is not None})
    return ema


class Runs:
    """The three runs in a folder and their averaged weights, with the command line that merges them."""

    def __init__(self, folder: Path, write: Callable[..., Path]):
        self.folder = folder
        write(folder / "sparse")
        for name in ("base", "few"):
            write(folder / name, attention="full")
        self.base = resolve_checkpoint(folder / "base").tensors("ema")
        gates = {k: v for k, v in resolve_checkpoint(folder / "sparse").tensors("ema").items() if is_gate(k)}
        self.sparse = rewrite(folder / "sparse", changed(self.base, 1) | gates)
        self.few = rewrite(folder / "few", changed(self.base, 2), step_list=STEPS, step=3)

    def merge(self, *options: Any, base: str = "base", sparse: str = "sparse", few: str = "few") -> dict[str, Tensor]:
        """The weights of the merged run."""
        out = self.folder / "out"
        command = [self.folder / base, "--sparse", self.folder / sparse, "--few-step", self.folder / few, out]
        run_command(merge, *command, *options)
        return resolve_checkpoint(out).tensors("model")

    def wanted(self, sparse_weight: float = 1.0, few_step_weight: float = 1.0, sign: int = 1) -> dict[str, Tensor]:
        """Plain float64 sums of whole models; `sign=-1` is the control."""
        sums = dict(self.sparse)
        for key in self.base:
            base, sparse, few = (source[key].to(torch.float64) for source in (self.base, self.sparse, self.few))
            delta = sparse_weight * sparse + few_step_weight * few - (sparse_weight + few_step_weight) * base
            sums[key] = (base + sign * delta).to(torch.float32)
        return sums


@pytest.fixture
def runs(tmp_path: Path, write_tiny_run: Callable[..., Path]) -> Runs:
    return Runs(tmp_path, write_tiny_run)


def largest_error(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max((found[key] - wanted[key]).abs().max().item() for key in wanted)


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(
        torch.equal(found[key], wanted[key]) and found[key].dtype == wanted[key].dtype for key in wanted
    )


# the sum


@pytest.mark.parametrize("weights", [(), (0.5, 1.25), (0.0, 1.0), (1.0, 0.0)])
def test_weights_are_the_sums_of_the_deltas(weights, runs):
    options = ("--sparse-weight", weights[0], "--few-step-weight", weights[1]) if weights else ()
    tensors = runs.merge(*options)
    # one rounding to float32 of values below 1
    assert largest_error(tensors, runs.wanted(*weights)) < 2**-23
    # control: the deltas the other way
    assert largest_error(tensors, runs.wanted(*weights, sign=-1)) > 0.01
    gates = [key for key in runs.sparse if is_gate(key)]
    assert len(gates) == 8
    assert all(torch.equal(tensors[key], runs.sparse[key]) for key in gates)


def test_sum_is_the_exact_one_rounded():
    generator = torch.Generator().manual_seed(0)
    base, sparse, few = (0.1 * torch.randn(64, generator=generator) for _ in range(3))
    actual = MergedTensors({"w": base}, {"w": sparse}, {"w": few}, sparse_weight=0.75, few_step_weight=1.5)["w"]
    rows = zip(base.tolist(), sparse.tolist(), few.tolist(), strict=True)
    terms = (map(Fraction, row) for row in rows)
    exact = [b + Fraction(3, 4) * (s - b) + Fraction(3, 2) * (f - b) for b, s, f in terms]
    assert actual.tolist() == torch.tensor([float(value) for value in exact]).tolist()
    # control: float32 sums are not
    assert (base + 0.75 * (sparse - base) + 1.5 * (few - base)).tolist() != actual.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_source_that_equals_the_base_changes_no_bit(dtype, runs):
    base, gates = runs.base, {key: value for key, value in runs.sparse.items() if is_gate(key)}
    base, sparse, few = ({k: v.to(dtype) for k, v in part.items()} for part in (base, runs.sparse, runs.few))
    assert not same(without_gates(sparse), base)
    assert same(MergedTensors(base, sparse, base), sparse)
    gates = {key: value.to(dtype) for key, value in gates.items()}
    assert same(MergedTensors(base, base | gates, few), few | gates)
    assert not same(MergedTensors(base, sparse, few), sparse)


def test_result_has_the_dtype_of_the_sparse_source(runs):
    half = {key: value if is_gate(key) else value.to(torch.bfloat16) for key, value in runs.sparse.items()}
    rewrite(runs.folder / "sparse", half)
    tensors = runs.merge()
    assert {key: value.dtype for key, value in tensors.items()} == {key: value.dtype for key, value in half.items()}
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16, torch.float32}
    runs.sparse = {key: value.float() for key, value in half.items()}
    # half a unit of eight bits, for values below 1
    assert largest_error({k: v.float() for k, v in tensors.items()}, runs.wanted()) < 2**-8


def test_merged_tensors_are_not_in_memory_together(runs, monkeypatch):
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    merged_tensor = MergedTensors.__getitem__

    def spy(self: MergedTensors, name: str) -> Tensor:
        nonlocal most
        tensor = merged_tensor(self, name)
        if name in runs.base:
            alive.append(weakref.ref(tensor))
            most = max(most, sum(ref() is not None for ref in alive))
        return tensor

    monkeypatch.setattr(MergedTensors, "__getitem__", spy)
    runs.merge()
    assert len(alive) >= len(runs.base)
    assert most <= 2
    # control: a whole merged model is seen
    whole = dict(MergedTensors(runs.base, runs.sparse, runs.few))
    assert most == len(runs.base) == len(whole) - 8


# the run that comes out


def test_merged_run_is_the_sparse_one_with_the_steps_of_the_few_step_one(runs, capsys):
    runs.merge()
    sparse, few, base = (resolve_checkpoint(runs.folder / name) for name in ("sparse", "few", "base"))
    checkpoint = resolve_checkpoint(runs.folder / "out")
    check_folder(runs.folder / "out", overwrite=True)
    keys = ("step", "config", "latent_mean", "latent_std", "codec", "text_encoder", "latent_shapes")
    assert {key: checkpoint.state[key] for key in keys} == {key: sparse.state[key] for key in keys}
    assert (checkpoint.step, checkpoint.state["step_list"]) == (7, STEPS)
    digests = {c.path.parts[-3]: c.state["files"]["ema.safetensors"] for c in (base, few, sparse)}
    assert checkpoint.state["merged_from"] == {
        "base": {"source": str(base.path), "digest": digests["base"]},
        "sparse": {"source": str(sparse.path), "digest": digests["sparse"]},
        "few_step": {"source": str(few.path), "digest": digests["few"]},
        "sparse_weight": 1.0,
        "few_step_weight": 1.0,
    }
    assert len(set(digests.values())) == 3
    assert capsys.readouterr().out == (
        f"{len(runs.base)} tensors merged, 8 of gates kept, timesteps {STEPS}, in {runs.folder / 'out'}\n"
    )


def test_everything_that_reads_runs_reads_the_merged_one(runs):
    tensors = runs.merge()
    run = load_run(runs.folder / "out", device="cpu")
    assert same(dict(run.model.named_parameters()), tensors)
    settings = run.settings()
    # a quarter of 8 tiles, as the sparse run was last trained
    assert (run.weights, settings.topk.number, settings.step_list, settings.steps) == ("model", 2, tuple(STEPS), 3)
    clip = generate(run, ["a red circle"], settings)
    # control: the sparse run alone makes another clip at the same steps
    rewrite(runs.folder / "sparse", step_list=STEPS)
    other = load_run(runs.folder / "sparse", device="cpu")
    assert not torch.equal(generate(other, ["a red circle"], other.settings()), clip)

    start = open_weights(str(runs.folder / "out"))
    with torch.device("meta"):
        start.check(VideoDiT(attention=SPARSE, **SIZES), "required")

    run_command(convert, runs.folder / "out", runs.folder / "export", "--no-golden")
    files, sparse = WeightFiles(runs.folder / "export"), read_sparse_config(runs.folder / "export")
    assert same({key: files.read(key) for key in files.keys}, tensors)
    assert (sparse.step_list, sparse.guidance_scale, sparse.flow_shift) == (tuple(STEPS), 1.0, None)


def test_adapters_of_the_sparse_run_are_merged_into_its_weights(runs):
    config = resolve_checkpoint(runs.folder / "sparse").state["config"]
    lora = {"_target_": "vsa.checkpoints.lora.LoRA", "rank": 2, "alpha": 4.0}
    layer = "blocks.0.attn1.to_q"
    a, b = torch.randn(2, 32, generator=torch.Generator().manual_seed(0)), torch.ones(32, 2)
    tensors = {key.replace(f"{layer}.", f"{layer}.base_layer."): value for key, value in runs.sparse.items()}
    tensors |= {f"{layer}.lora_A.default.weight": a, f"{layer}.lora_B.default.weight": b}
    rewrite(runs.folder / "sparse", tensors, config={**config, "task": {**config["task"], "lora": lora}})
    weights = runs.merge()
    runs.sparse[f"{layer}.weight"] = runs.sparse[f"{layer}.weight"] + 2 * b @ a
    assert largest_error(weights, runs.wanted()) < 1e-6
    # adapters are not merged twice
    assert resolve_checkpoint(runs.folder / "out").state["config"]["task"]["lora"] is None
    assert same(dict(load_run(runs.folder / "out", device="cpu").model.named_parameters()), weights)


# folders in diffusers' layout


def export(folder: Path, tensors: Mapping[str, Tensor], dtype: torch.dtype = torch.float32) -> None:
    attention = SPARSE if any(map(is_gate, tensors)) else FullAttention
    with torch.device("meta"):
        model = VideoDiT(attention=attention, **SIZES)
    sparse = None
    if attention is SPARSE:
        sparse = SparseAttentionConfig(
            **sparse_settings(model),
            grid_topk=((3, 5),),
            num_tiles=(12,),
            grids=((3, 4, 6),),
            flow_shift=3.0,
            guidance_scale=5.0,
        )
    model.to(dtype)
    export_pretrained(model, folder, sparse=sparse, dtype=dtype, tensors=tensors.__getitem__)


def test_diffusers_folders_give_a_diffusers_folder(runs):
    out = runs.folder / "out"
    export(runs.folder / "b/transformer", runs.base)
    export(runs.folder / "s", runs.sparse)
    export(runs.folder / "f", runs.few)
    words = [runs.folder / "b", "--sparse", runs.folder / "s", "--few-step", runs.folder / "f"]
    with pytest.raises(ValueError, match="does not name its timesteps: set --step-list"):
        run_command(merge, *words, out)
    run_command(merge, words[0], "--step-list", "900,300", *words[1:], out)
    model, info = open_network(out)
    assert largest_error(dict(model.named_parameters()), runs.wanted()) < 2**-23
    assert info.sparse is not None
    assert (info.sparse.step_list, info.sparse.grid_topk) == ((900.0, 300.0), ((3, 5),))
    assert (info.sparse.flow_shift, info.sparse.guidance_scale, info.sparse.golden) == (None, 1.0, None)


def test_pretrained_base_with_runs_gives_a_run(runs, capsys):
    # what a finetuning starts from is in bf16, its own weights are not
    runs.base = {key: value.to(torch.bfloat16) for key, value in runs.base.items()}
    export(runs.folder / "b/transformer", runs.base, torch.bfloat16)
    for name, spec in (("sparse", "b"), ("few", "b/transformer")):
        config = resolve_checkpoint(runs.folder / name).state["config"]
        rewrite(runs.folder / name, config={**config, "init_from": str(runs.folder / spec)})
    tensors = runs.merge(base="b")
    assert largest_error(tensors, runs.wanted()) < 2**-23
    assert {value.dtype for value in tensors.values()} == {torch.float32}
    assert "note" not in capsys.readouterr().out


# what is said and what is refused


@pytest.mark.parametrize(
    ("init_from", "teacher", "noted"),
    [
        ("{runs}/base", None, False),
        ("{runs}/base/checkpoints/step-00000007", None, False),
        ("{runs}/few", None, True),
        ("elsewhere/base", None, True),
        # moved since, but it says the digest of its frozen teacher
        ("elsewhere/base", "base", False),
        ("elsewhere/base", "few", True),
        (None, None, False),
    ],
)
def test_another_base_is_said(init_from, teacher, noted, runs, capsys):
    config = resolve_checkpoint(runs.folder / "sparse").state["config"]
    spec = None if init_from is None else init_from.format(runs=runs.folder)
    state: dict[str, Any] = {"config": {**config, "init_from": spec}}
    if teacher is not None:
        state["teacher"] = {"source": "x", "digest": open_weights(str(runs.folder / teacher)).digest}
    rewrite(runs.folder / "sparse", **state)
    runs.merge()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + noted
    if noted:
        path = runs.folder / "base/checkpoints/step-00000007"
        assert lines[0].endswith(f"started from {spec}, which is not known to be the base {path}")


def config_with(runs: Runs, name: str, group: str, **changes: Any) -> dict[str, Any]:
    config = resolve_checkpoint(runs.folder / name).state["config"]
    return {"config": {**config, group: {**config[group], **changes}}}


COMPRESSED = {"_target_": "vsa.attention.compressed_kv.CompressedKV"}


def hash_of(text: str) -> dict[str, str]:
    return {"id": "x", "hash": text}


CHANGES: dict[str, tuple[Callable[[Runs], object], str]] = {
    "no timesteps": (
        lambda runs: rewrite(runs.folder / "few", step_list=None),
        "few/checkpoints/step-00000003 does not name its timesteps: set --step-list",
    ),
    "timesteps that rise": (
        lambda runs: rewrite(runs.folder / "few", step_list=[500, 900]),
        r"timesteps must be strictly decreasing and in \(0, 1000\], got \[500, 900\]",
    ),
    "gates in the few-step source": (
        lambda runs: rewrite(runs.folder / "few", runs.sparse),
        r"--few-step .*few.* has gates \(blocks.0.to_gate_compress.bias, ...\), but only --sparse may be sparse",
    ),
    "gates in the base": (
        lambda runs: rewrite(runs.folder / "base", runs.sparse),
        "the base .*base.* has gates",
    ),
    "a base that was trained sparse, without gates": (
        lambda runs: rewrite(runs.folder / "base", **config_with(runs, "base", "attention", **COMPRESSED)),
        "the base .*base.* has compressed_kv attention, but only --sparse may be sparse",
    ),
    "distilled base": (
        lambda runs: rewrite(runs.folder / "base", step_list=STEPS),
        "the base .* is distilled already, to the timesteps",
    ),
    "distilled sparse source": (
        lambda runs: rewrite(runs.folder / "sparse", step_list=STEPS),
        "--sparse .* is distilled already, to the timesteps",
    ),
    "heads": (
        lambda runs: rewrite(runs.folder / "few", **config_with(runs, "few", "model", num_attention_heads=1)),
        r"few.* has model.num_attention_heads=1, the model has 2 \(the model is that of --sparse .*sparse",
    ),
    "shape": (
        lambda runs: rewrite(runs.folder / "base", {**runs.base, "proj_out.bias": torch.ones(5)}),
        r"base.*: proj_out.bias has shape \(5,\), the model needs \(64,\)",
    ),
    "missing tensor": (
        lambda runs: rewrite(runs.folder / "few", {k: v for k, v in runs.few.items() if k != "proj_out.bias"}),
        "few.* lacks 1 tensors of the model: proj_out.bias",
    ),
    "latent statistics": (
        lambda runs: rewrite(runs.folder / "sparse", latent_mean=[0.25] * 16),
        r"sparse.* has latent_mean \[0.25, .*base.* has \[-0.5, ",
    ),
    "codec": (
        lambda runs: rewrite(runs.folder / "few", codec=hash_of("other")),
        "few.* has codec hash other, .*base.* has [0-9a-f]+",
    ),
    "text encoder": (
        lambda runs: rewrite(runs.folder / "base", text_encoder=hash_of("other")),
        "sparse.* has text_encoder hash [0-9a-f]+, .*base.* has other",
    ),
    "padding": (
        lambda runs: rewrite(runs.folder / "few", **config_with(runs, "few", "data", text_padding="zeros")),
        "few.* has data.text_padding zeros, .*base.* has mask",
    ),
    "not finite": (
        lambda runs: rewrite(runs.folder / "few", {**runs.few, "proj_out.bias": torch.full((64,), torch.inf)}),
        "few.*: 64 values of proj_out.bias are NaN or infinite",
    ),
}


@pytest.mark.soak("convert, merge and verify-export of damaged files")
@pytest.mark.parametrize("name", CHANGES)
def test_sources_that_do_not_fit_are_refused(name, runs):
    change, message = CHANGES[name]
    change(runs)
    before = sorted(runs.folder.iterdir())
    with pytest.raises(ValueError, match=message) as error:
        runs.merge()
    assert "\n" not in str(error.value)
    assert sorted(runs.folder.iterdir()) == before


@pytest.mark.parametrize(
    ("places", "options", "message"),
    [
        ({"sparse": "base"}, (), "--sparse .*base.* has full attention and no gates"),
        ({"sparse": "few", "few": "sparse"}, (), "--few-step .*sparse.* has gates"),
        ({"base": "nowhere"}, (), "no such folder: .*nowhere"),
        (
            {},
            ("--step-list", "900,300"),
            r"has the step list \[1000.0, .*\], .* --step-list \[900.0, 300.0\]",
        ),
    ],
)
def test_command_lines_that_are_refused(places, options, message, runs):
    before = sorted(runs.folder.iterdir())
    with pytest.raises(ValueError, match=message):
        runs.merge(*options, **places)
    assert sorted(runs.folder.iterdir()) == before


def test_gates_without_a_word_on_their_use_are_refused(runs):
    export(runs.folder / "s", runs.sparse)
    (runs.folder / "s" / SPARSE_CONFIG).unlink()
    with pytest.raises(ValueError, match=r"sparse_attention\.json is missing"):
        runs.merge(sparse="s")


def test_the_command_writes_once(runs, capsys):
    runs.merge()
    assert len(capsys.readouterr().out.splitlines()) == 1
    state = runs.folder / "out/checkpoints/step-00000007/state.json"
    content = json.loads(state.read_text())
    with pytest.raises(ValueError, match=f"^{runs.folder / 'out'} already exists$"):
        runs.merge()
    assert json.loads(state.read_text()) == content
