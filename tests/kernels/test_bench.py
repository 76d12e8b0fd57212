"""`scripts/bench` prints no speed for a wrong kernel, and `scripts/tune.py` writes what it should."""

from __future__ import annotations

import importlib
import json
import os
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vsa_kernels import launch
from vsa_kernels.block_index import BlockIndex
from vsa_kernels.coarse_fine import coarse_fine_attn

from scripts import tune
from vsa.models.blocks import TransformerBlock

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASES = ("fine", "coarse", "vsa", "layer")
FAST = ["--shapes", "tiny", "--repeats", "2"]


@pytest.fixture
def bench(monkeypatch):
    module = importlib.import_module("scripts.bench.__main__")
    problems = importlib.import_module("scripts.bench.problems")
    tiny = problems.Shape(name="tiny", grid_thw=(4, 4, 4), tile_thw=(2, 2, 2), heads=2, head_dim=8, topk=2)
    monkeypatch.setattr(problems, "CPU_SHAPES", (tiny,))
    module.tiny = tiny
    return module


@pytest.fixture
def checks(bench):
    return importlib.import_module("scripts.bench.checks")


def _problem(shape, lists: str = "random"):
    return importlib.import_module("scripts.bench.problems").problem(shape, lists, torch.float32, CPU)


def test_a_right_kernel_gets_a_table_and_a_report(bench, tmp_path, capsys):
    out = tmp_path / "new" / "report.json"
    bench.main(["fine", "--repeats", "2", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["command"] == "python -m scripts.bench fine --repeats 2"
    assert [(r["op"], r["pass"]) for r in report["rows"]] == [
        (op, kind) for op in ("dense", "gather") for kind in ("forward", "forward + backward")
    ]
    assert all(r["min_ms"] <= r["median_ms"] <= r["max_ms"] for r in report["rows"])
    assert report["rows"][2]["sparsity"] == 0.75
    assert "| tiny | 1 x 2 x 64 x 8 | 8 | 75.0% | random | float32 | gather |" in capsys.readouterr().out
    bench.main(["table", str(out)])
    assert "| tiny |" in capsys.readouterr().out


OPS = {
    "fine": {"dense", "gather"},
    "vsa": {"dense", "gather", "gather, no fine gate"},
    "coarse": {
        *("gather: pooling of q, k, v", "gather: coarse attention", "gather: scores", "gather: top-k"),
        "gather: sum without the coarse attention's backward",
    },
    "step": {"dense", "gather", "free"},
    "layer": {
        *("attention, dense", "attention, gather", "block, dense", "block, gather"),
        "block without self-attention, eager",
    },
}


@pytest.mark.parametrize("case", CASES)
def test_every_case_runs(bench, tmp_path, capsys, case):
    out = tmp_path / "report.json"
    lists = [] if case in ("layer", "step") else ["--lists", "local"]
    bench.main([case, *FAST, *lists, "--out", str(out)])
    report = json.loads(out.read_text())
    assert {r["op"] for r in report["rows"]} == OPS[case]
    assert report["checks"]
    printed = capsys.readouterr().out
    assert all(line in printed for line in report["checks"])
    assert all(f"| {name} |" in printed for name in OPS[case])
    if case == "coarse":
        *pieces, total = report["rows"]
        assert total["median_ms"] == pytest.approx(sum(r["median_ms"] for r in pieces), abs=1e-3)


def test_a_training_step_is_timed_at_every_level_of_checkpointing(bench, tmp_path):
    out = tmp_path / "report.json"
    bench.main(["step", *FAST, "--levels", "attention", "full", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(r["op"], r["activation_checkpointing"], r["strategy"]) for r in rows] == [
        (op, level, "plain") for level in ("attention", "full") for op in ("dense", "gather", "free")
    ]
    assert {r["pass"] for r in rows} == {"training step, recomputing attention", "training step, recomputing full"}


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
@pytest.mark.parametrize(
    ("case", "lists", "part"), [("fine", "sinks", "dk, dv"), ("coarse", "local", "transposed index")]
)
def test_triton_runs(bench, checks, monkeypatch, capsys, case, lists, part):
    # the small checks are slow in the interpreter, and test_coarse_fine.py and others make them there
    for name in ("check", "check_operator"):
        monkeypatch.setattr(checks, name, lambda *a: "")
    smaller = replace(bench.tiny, grid_thw=(2, 4, 4), heads=1, head_dim=16)
    monkeypatch.setattr(importlib.import_module("scripts.bench.problems"), "CPU_SHAPES", (smaller,))
    bench.main([case, "--shapes", "tiny", "--repeats", "1", "--backends", "triton", "--lists", lists])
    printed = capsys.readouterr().out
    assert f"| triton: {part} | backward |" in printed


def _damaged(right, tamper):
    def wrong(*args, **kwargs):
        got = right(*args, **kwargs)
        return tamper(got) if kwargs.get("backend", args[-1]) == "gather" else got

    return wrong


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_result_stops_every_case(bench, checks, monkeypatch, tmp_path, capsys, case):
    if case == "fine":
        monkeypatch.setattr(checks, "run", _damaged(checks.run, lambda got: {**got, "dk": got["dk"] * 1.01}))
        match = "gather is wrong, no speed is printed: dk"
    elif case == "layer":
        right = checks.Layer.attention
        wrong = lambda self: right(self) * (1.001 if self.block.method.backend == "gather" else 1)  # noqa: E731
        monkeypatch.setattr(checks.Layer, "attention", wrong)
        match = "layer on backend gather is wrong, no speed is printed: out"
    else:
        right = checks.coarse_fine_attn
        monkeypatch.setattr(checks, "coarse_fine_attn", _damaged(right, lambda got: got._replace(out=got.out * 1.001)))
        match = "operator on backend gather is wrong, no speed is printed: out"
    with pytest.raises(ValueError, match=match):
        bench.main([case, *FAST, "--out", str(tmp_path / "x.json")])
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_a_check_that_cannot_fail_stops_every_case(bench, checks, monkeypatch, case):
    monkeypatch.setattr(checks, "assert_within_budget", lambda *a: None)
    with pytest.raises(ValueError, match="does not notice a damaged input"):
        bench.main([case, *FAST])


def _off(from_tokens: int):
    """Stands for `compiled_body`: the body, but 0.1% off in gradients and output for so many tokens and more."""

    def body(block, x, cond, ctx):
        out = TransformerBlock.body(block, x, cond, ctx)
        return out * (1.001 if x.shape[1] >= from_tokens else 1)

    return lambda **_: body


def test_a_block_without_self_attention_is_timed_eager_and_compiled(bench, checks, monkeypatch, tmp_path):
    # the body as it is: what torch makes of it takes a minute
    monkeypatch.setattr(checks, "compiled_body", _off(10**6))
    out = tmp_path / "report.json"
    bench.main(["layer", "--shapes", "smoke", "--repeats", "2", "--modes", "eager", "compiled", "--out", str(out)])
    report = json.loads(out.read_text())
    rows = [row for row in report["rows"] if row["op"].startswith("block without")]
    assert [(row["op"], row["pass"]) for row in rows] == [
        (f"block without self-attention, {mode}", kind)
        for mode in ("eager", "compiled")
        for kind in ("forward", "forward + backward")
    ]
    assert all(row["speedup"] is None for row in rows)
    for mode in ("eager", "compiled"):
        line = f"the {mode} block without self-attention torch.float32: out and gradients right by fp64"
        assert sum(check.startswith(line) for check in report["checks"]) == 1


@pytest.mark.parametrize(
    ("tokens", "match"),
    [
        (0, "the compiled block without self-attention: out is off by 0.001, no speed"),
        # more than the 60 of the small problem
        (64, "block without self-attention, compiled: out is off by 0.001, no speed"),
    ],
)
def test_a_wrong_block_without_self_attention_stops_its_case(bench, checks, monkeypatch, capsys, tokens, match):
    monkeypatch.setattr(checks, "compiled_body", _off(tokens))
    with pytest.raises(ValueError, match=match):
        bench.main(["layer", *FAST, "--modes", "compiled"])
    assert capsys.readouterr().out == ""


def test_the_check_of_a_block_has_a_control(bench, checks, monkeypatch):
    monkeypatch.setattr(checks, "refuse_far", lambda *a: None)
    with pytest.raises(ValueError, match="eager block without self-attention does not notice a damaged input"):
        checks.check_block("eager", torch.float32, CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_gradients_of_a_block_are_noticed(bench, checks, monkeypatch, dtype):
    checks.check_block("eager", dtype, CPU)
    right = checks.Layer.results

    def wrong(layer):
        got, name = right(layer), "gradient of attn2.to_v.weight"
        # not in the fp64 results
        return got | ({} if layer.x.dtype == torch.float64 else {name: got[name] * 1.05})

    monkeypatch.setattr(checks.Layer, "results", wrong)
    with pytest.raises(ValueError, match=r"gradient of attn2\.to_v\.weight is off by"):
        checks.check_block("eager", dtype, CPU)


@pytest.mark.slow
def test_a_compiled_block_without_self_attention_is_right(bench, checks):
    checks.check_block("compiled", torch.float32, CPU)


def test_the_block_of_a_named_model_has_its_width(bench, monkeypatch):
    cases, timing = (importlib.import_module(f"scripts.bench.{name}") for name in ("cases", "timing"))
    monkeypatch.setattr(cases, "measure", lambda ops, setup: [{tuple(x.shape) for x in op.inputs} for op in ops])
    setup = timing.Setup(backends=["gather"], peers=[], lists="random", device=CPU, dtype=torch.float32, repeats=1)
    wan = cases.layer(replace(bench.tiny, heads=12, head_dim=128), setup).rows
    assert len(wan) == 5
    assert all((8960, 1536) in shapes for shapes in wan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_budgets_leave_room_for_rounding(checks, dtype):
    checks.check("gather", dtype, CPU)
    checks.check_operator("gather", dtype, CPU)


@pytest.fixture
def strides(bench, monkeypatch):
    """The module of the case, with a small problem: windows that need masks, and some that need none."""
    module = importlib.import_module("scripts.bench.neighborhood")
    small = replace(
        module.CPU_WINDOWS[0], grid_thw=(3, 8, 8), window_thw=(3, 4, 4), q_tile_thw=(1, 4, 4), tile_thw=(1, 2, 4),
        strides=((1, 1, 1), (1, 4, 4)), heads=2, head_dim=8,
    )  # fmt: skip
    monkeypatch.setattr(module, "CPU_WINDOWS", (small,))
    return module


def test_neighborhood_runs_every_stride(bench, strides, tmp_path, capsys):
    out = tmp_path / "report.json"
    bench.main(["neighborhood", "--repeats", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    ours = [row for row in report["rows"] if row["op"].startswith("gather")]
    assert [(row["op"], row["pass"]) for row in ours] == [
        (f"gather{order}, stride {stride}", kind)
        for stride in ("1x1x1", "1x4x4")
        for order in ("", ", permuted")
        for kind in ("forward", "forward + backward")
    ]
    assert all(row["bound"] == 4 for row in report["rows"])
    for row in ours:
        assert row["baseline"] == "dense"
        assert row["share_of_bound"] == pytest.approx(row["speedup"] / 4, abs=1e-3)
        # blocked attention is made of whole tiles
        assert (row["masked"] == 0) == (row["stride"] == "1x4x4")
        assert (row["tile_bound"] == 4) == (row["stride"] == "1x4x4")
    printed = capsys.readouterr().out
    assert "| gather, permuted, stride 1x4x4 | forward + backward |" in printed
    assert "1x4x4: bound 4.00x by FLOPs, 4.00x by listed tiles, 0% of them with a fine mask" in printed


def test_neighborhood_of_the_command_line(bench, strides, tmp_path, capsys):
    out = tmp_path / "report.json"
    how = ["--window", "2x8x4", "--strides", "2x8x2", "--q-tile", "3x2x2", "--kv-tile", "3x2x2"]
    bench.main(["neighborhood", *how, "--repeats", "1", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert {row.get("stride") for row in rows} == {None, "2x8x2"}
    assert {(row["window"], row["block"], row["q_block"], row["bound"]) for row in rows} == {("2x8x4", 12, 12, 3.0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--window", "4x4x4"], "window of time must be at most its 3 tokens, got 4"),
        (["--strides", "1x5x1"], "stride of height must be at most its window 4, got 5"),
        (["--q-tile", "1x3x4"], "divide"),
        (["--shapes", "tiny"], "--shapes must be of small-6x16x16, hunyuan-30x48x80, got tiny"),
    ],
)
def test_neighborhoods_that_do_not_fit(bench, strides, options, message):
    with pytest.raises(ValueError, match=message):
        bench.main(["neighborhood", *options])


@pytest.mark.parametrize("text", ["8x8", "1x0x1", "axbxc", "-1x2x3"])
def test_a_window_is_three_numbers(bench, strides, text, capsys):
    with pytest.raises(SystemExit):
        bench.main(["neighborhood", f"--window={text}"])
    assert f"must be three positive numbers as in 18x24x24, got '{text}'" in capsys.readouterr().err


def test_a_schedule_is_the_mean_of_its_steps(bench, tmp_path, capsys):
    out = tmp_path / "report.json"
    bench.main(["dynamic_hilbert", *FAST, "--out", str(out)])
    report = json.loads(out.read_text())
    # 8 blocks: 30%, 20% and 10% of them, rounded down to one at least
    rows = {row["op"]: row for row in report["rows"]}
    assert list(rows) == [
        *("dense", "reorder of q, k, v, out", "scores of sub-blocks"),
        *("top-2", "gather, top-2", "top-1", "gather, top-1"),
        *("gather, mean of the sparse steps", "gather, mean, reordered in each"),
    ]
    assert {row["pass"] for row in rows.values()} == {"forward"}
    # 12 steps of 38 keep 2 blocks, 26 one; three of them select
    ms = {name: row["median_ms"] for name, row in rows.items()}
    mean = 12 * ms["gather, top-2"] + 26 * ms["gather, top-1"] + 3 * ms["scores of sub-blocks"]
    mean = (mean + ms["top-2"] + 2 * ms["top-1"]) / 38
    assert ms["gather, mean of the sparse steps"] == pytest.approx(mean, abs=1e-3)
    assert ms["gather, mean, reordered in each"] == pytest.approx(mean + ms["reorder of q, k, v, out"], abs=1e-3)
    assert rows["gather, mean of the sparse steps"]["sparsity"] == pytest.approx(1 - 50 / 38 / 8)
    assert rows["gather, mean of the sparse steps"]["baseline"] == "dense"
    printed = capsys.readouterr().out
    assert (
        "tiny: 38 of 50 steps are sparse, 83.55% in the mean: bound 6.08x by listed blocks; 3 of them select" in printed
    )


def test_a_wrong_neighborhood_stops_its_case(bench, checks, strides, monkeypatch, capsys):
    monkeypatch.setattr(strides, "run", _damaged(strides.run, lambda got: {**got, "dq": got["dq"] * 1.01}))
    with pytest.raises(ValueError, match="backend gather is wrong, no speed is printed: dq"):
        bench.main(["neighborhood", "--repeats", "1"])
    monkeypatch.setattr(checks, "assert_within_budget", lambda *a: None)
    with pytest.raises(ValueError, match="does not notice a damaged input"):
        bench.main(["neighborhood", "--repeats", "1"])
    assert capsys.readouterr().out == ""


def test_the_measured_neighborhood_is_checked(bench, strides, monkeypatch):
    shape = strides.CPU_WINDOWS[0]
    p = strides.WindowProblem.of(shape, torch.float32, CPU)
    stride = (1, 1, 1)
    right = strides.block_sparse_attn
    strides.check_windows(p, p.case(stride), stride, "gather")
    # the index of another stride
    with pytest.raises(ValueError, match="stride 1x1x1: out is off by"):
        strides.check_windows(p, p.case((1, 4, 4)), stride, "gather")
    for name in ("q", "k", "v"):

        def wrong(*args, name=name, **kwargs):
            leaves = [
                x.detach() + 1.01 * (x - x.detach()) if n == name else x for n, x in zip("qkv", args[:3], strict=True)
            ]
            return right(*leaves, *args[3:], **kwargs)

        monkeypatch.setattr(strides, "block_sparse_attn", wrong)
        with pytest.raises(ValueError, match=f"d{name} is off by"):
            strides.check_windows(p, p.case(stride), stride, "gather")
    monkeypatch.setattr(strides, "block_sparse_attn", right)
    # tokens brought back in another order
    shifted = replace(p, tiles=replace(p.tiles, inverse=p.tiles.inverse.roll(1)))
    with pytest.raises(ValueError, match="out is off by"):
        strides.check_windows(shifted, p.case(stride), stride, "gather")


def test_the_measured_problem_itself_is_checked(bench, checks, monkeypatch):
    case = _problem(bench.tiny).case
    right = checks.block_sparse_attn
    checks.check_measured(case, "gather")

    def off(q, *args, **kwargs):
        return right(q, *args, **kwargs)[0] + 1e-3, None

    monkeypatch.setattr(checks, "block_sparse_attn", off)
    with pytest.raises(ValueError, match=r"query block \d+ is off by"):
        checks.check_measured(case, "gather")
    for name in ("q", "k", "v"):

        def wrong(*args, name=name, **kwargs):
            # right values, gradient of one input 1% too large
            args = [
                x.detach() + 1.01 * (x - x.detach()) if n == name else x for n, x in zip("qkv", args[:3], strict=True)
            ]
            return right(*args, case.index, **kwargs)

        monkeypatch.setattr(checks, "block_sparse_attn", wrong)
        with pytest.raises(ValueError, match=f"d{name} of .* is off by"):
            checks.check_measured(case, "gather")


def test_the_measured_operator_is_checked(bench, checks):
    p = _problem(bench.tiny)
    blocks = {"q_blocks": p.case.q_blocks, "kv_blocks": p.case.kv_blocks}
    got = coarse_fine_attn(p.case.q, p.case.k, p.case.v, p.gate_coarse, p.gate_fine, **blocks, topk=2, backend="gather")
    checks.check_measured_operator(p, got, "it")
    with pytest.raises(ValueError, match="output of query block"):
        checks.check_measured_operator(p, got._replace(out=got.out - p.gate_coarse * 1e-2), "it")
    # other lists, with the fine output that belongs to them
    other = BlockIndex.from_dense(~got.index.to_dense(8))
    other = replace(other, kv_indices=other.kv_indices[..., :2], kv_num_blocks=torch.full_like(other.kv_num_blocks, 2))
    fine = checks.block_sparse_attn(p.case.q, p.case.k, p.case.v, other, **blocks)[0]
    with pytest.raises(ValueError, match="does not list its best blocks"):
        checks.check_measured_operator(p, got._replace(index=other, fine=fine), "it")


def test_flops_count_real_pairs_and_whole_tiles(bench):
    problems, timing = (importlib.import_module(f"scripts.bench.{name}") for name in ("problems", "timing"))
    ragged = replace(bench.tiny, grid_thw=(3, 4, 4))
    p = _problem(ragged)
    sizes, dense = p.case.kv_blocks.sizes, p.case.index.to_dense(8)
    pairs = int((dense * sizes[:, None] * sizes).sum())
    assert problems.pair_counts(p.case, "gather") == (pairs, int(dense.sum()) * 8 * 8)
    assert problems.pair_counts(p.case, "triton") == (pairs, int(dense.sum()) * 16 * 16)
    op = timing.Op(name="x", call=lambda: None, head_dim=8, pairs=10, executed=20, products=7)
    assert op.flops("forward") == (4 * 8 * 20, 4 * 8 * 10)
    assert op.flops("forward + backward") == (18 * 8 * 20, 14 * 8 * 10)


def test_local_lists_overlap_more_than_random_ones(bench):
    grid = replace(bench.tiny, grid_thw=(8, 8, 8), topk=8)
    shared = {}
    for lists in ("random", "local"):
        mask = _problem(grid, lists).case.index.to_dense(64).float()
        shared[lists] = float((mask[:, :, :-1] * mask[:, :, 1:]).sum(-1).mean())
    assert shared["local"] > 2 * shared["random"]
    wide = _problem(replace(grid, group=2), "local").case
    assert (wide.q_blocks.num, wide.kv_blocks.num, wide.q_blocks.max_size) == (32, 64, 16)


def test_sinks_are_in_every_list_and_lists_keep_their_length(bench):
    grid = replace(bench.tiny, grid_thw=(8, 8, 8), topk=8)
    random, sinks = (_problem(grid, lists).case.index.to_dense(64).sum(-2) for lists in ("random", "sinks"))
    assert (sinks == 64).sum(-1).tolist() == [[4, 4]]
    assert int((random == 64).sum()) == 0
    assert int(sinks.sum()) == int(random.sum()) == 2 * 64 * 8


def test_peers_get_the_same_problem(bench):
    peers = importlib.import_module("scripts.bench.peers")
    p = _problem(replace(bench.tiny, grid_thw=(3, 4, 4)))
    slots = peers.padded_slots(p)
    padded = peers.pad(p.case.q, slots, p)
    assert padded.shape == (1, 2, 64, 8)
    assert torch.equal(padded.transpose(1, 2)[:, slots], p.case.q)
    assert padded.count_nonzero() == p.case.q.count_nonzero()
    # FlexAttention's lists, in the format its mask wants
    wide = _problem(replace(bench.tiny, grid_thw=(8, 8, 8), tile_thw=(4, 4, 4), topk=4))
    indices, counts = peers.flex_lists(wide)
    from torch.nn.attention.flex_attention import BlockMask

    mask = BlockMask.from_kv_blocks(torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=128)
    assert mask.shape == (1, 2, 512, 512)
    assert torch.equal(mask.to_dense().sum(-1), torch.full((1, 2, 4), 2))


def test_a_peer_that_refuses_is_skipped_with_its_reason(bench, monkeypatch, tmp_path, capsys):
    peers = importlib.import_module("scripts.bench.peers")

    def refuse(*args):
        raise RuntimeError("no kernel\nfor this")

    monkeypatch.setattr(peers.F, "scaled_dot_product_attention", refuse)
    out = tmp_path / "x.json"
    bench.main(["fine", *FAST, "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["skipped"] == [{"name": "tiny", "op": "dense", "reason": "RuntimeError: no kernel for this"}]
    assert {r["speedup"] for r in report["rows"]} == {None}
    assert "Not measured: dense at tiny: RuntimeError: no kernel for this" in capsys.readouterr().out


DISTILL_PARTS = (
    *(f"generator update, step {i}" for i in (1, 2, 3)),
    "generator optimizer and average",
    *(f"critic update, step {i}" for i in (1, 2, 3)),
    *("critic optimizer", "whole iteration, step 2", "generator update, mean", "critic update, mean"),
    *("iteration without generator update", "iteration with generator update"),
    "mean iteration, 1 in 5 with generator update",
)


def test_an_iteration_of_distillation_is_timed_in_parts_and_whole(bench, tmp_path, capsys):
    out = tmp_path / "report.json"
    bench.main(["distill", "--shapes", "tiny", "--repeats", "1", "--out", str(out)])
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
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
    assert f"eager, gather generator: iteration with generator update {_seconds(rows, 'gather')} s" in printed


def _seconds(rows, name: str) -> str:
    return f"{rows[f'{name}: iteration with generator update']['median_ms'] / 1e3:.3f}"


def test_selection_runs_and_a_wrong_share_stops_it(bench, monkeypatch, tmp_path, capsys):
    module = importlib.import_module("scripts.bench.selection")
    wide = replace(bench.tiny, name="wide", grid_thw=(4, 8, 4), group=2)
    monkeypatch.setattr(importlib.import_module("scripts.bench.problems"), "CPU_SHAPES", (bench.tiny, wide))
    out = tmp_path / "report.json"
    bench.main(["selection", "--repeats", "1", "--out", str(out)])
    report = json.loads(out.read_text())
    ours = [f"reference: {op}" for op in ("share", "share, masks of heads", "top-k", "means and similarity")]
    assert [r["op"] for r in report["rows"]] == 2 * ["dense", *ours, "prediction", "stable sort"]
    assert "selection by share on reference: right" in capsys.readouterr().out
    right = module.select_share
    for damage, match in (
        (lambda x, share, **kw: right(x, share / 2, **kw), "reference: the blocks of query block . are not the share"),
        (lambda x, share, **kw: right(x, 0.9, **kw), "does not notice a wrong share"),
    ):
        monkeypatch.setattr(module, "select_share", damage)
        with pytest.raises(ValueError, match=match):
            bench.main(["selection", "--repeats", "1"])
    assert capsys.readouterr().out == ""


def test_norm_and_rotation_runs_and_a_wrong_one_stops_it(bench, monkeypatch, tmp_path, capsys):
    module = importlib.import_module("scripts.bench.norm_rope")
    out = tmp_path / "report.json"
    bench.main(["norm_rope", "--repeats", "1", "--out", str(out)])
    copy, forward, both = json.loads(out.read_text())["rows"]
    assert [(r["op"], r["pass"]) for r in (copy, forward, both)] == [
        ("copy", "forward"), ("eager", "forward"), ("eager", "forward + backward")
    ]  # fmt: skip
    assert copy["share_of_copy"] == 1
    assert both["share_of_copy"] == pytest.approx(2.5 * copy["median_ms"] / both["median_ms"], abs=1e-3)
    assert both["gb_per_s"] == pytest.approx(5 * 2 * 999 * 240 * 4 / both["median_ms"] / 1e6, abs=0.06)
    printed = capsys.readouterr().out
    assert "a rotation backwards is noticed" in printed
    assert "| small | 2 x 3 x 999 x 80 | float32 | eager | forward |" in printed
    right = module.ours
    for damage, match in (
        (lambda *a, **kw: 1.001 * right(*a, **kw), "reference is wrong, no speed is printed: out is off by 0.001"),
        (lambda x, w, cos, sin, **kw: right(x, w, cos, sin.abs(), **kw), "reference is wrong, no speed is printed"),
    ):
        monkeypatch.setattr(module, "ours", damage)
        with pytest.raises(ValueError, match=match):
            bench.main(["norm_rope", "--repeats", "1"])
    monkeypatch.setattr(module, "ours", right)
    monkeypatch.setattr(module, "_TOLERANCE", {torch.float32: 10.0})
    with pytest.raises(ValueError, match="does not notice a rotation backwards"):
        bench.main(["norm_rope", "--repeats", "1"])
    with pytest.raises(ValueError, match=r"--shapes must be of small, pretrain_120m, wan1\.3b, wan14b, got tiny"):
        bench.main(["norm_rope", "--shapes", "tiny"])
    assert capsys.readouterr().out == ""


@pytest.fixture
def at_work(bench):
    return importlib.import_module("scripts.bench.distill").Distillation(bench.tiny, "gather", False, CPU)


ROLES = ("generator", "fake_score", "real_score")


def test_an_iteration_of_distillation_moves_what_it_trains(at_work):
    nets = at_work.networks
    before = {role: [p.detach().clone() for p in getattr(nets, role).parameters()] for role in ROLES}

    def moved(role: str) -> list[bool]:
        return [not torch.equal(a, b) for a, b in zip(before[role], getattr(nets, role).parameters(), strict=True)]

    at_work.check()
    assert not any(moved("generator") + moved("fake_score"))
    # large steps, to tell the average from the weights
    for optimizer in at_work.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = 0.1
    at_work.iteration(2)
    assert all(moved("generator") + moved("fake_score"))
    assert not any(moved("real_score"))
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
        scored = right(self, networks, *args, **kwargs)
        return replace(scored, loss=tamper(scored.loss, networks))

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
    report, printed = json.loads(out.read_text()), capsys.readouterr().out
    rows = {r["op"]: r for r in report["rows"]}
    guided = "dense, 4 steps, guidance 5"
    forms = [f"dense, 1 step, guidance 5, {form}" for form in ("two forwards", "one forward of two")]
    dense = [*forms, "dense, 3 steps", guided, "dense, 4 steps"]
    assert list(rows) == [*dense, "gather, 3 steps", "gather, 4 steps, guidance 5"]
    ratio = rows[guided]["median_ms"] / rows["gather, 3 steps"]["median_ms"]
    assert rows["gather, 3 steps"]["speedup"] == pytest.approx(ratio, abs=1e-3)
    form = min(forms, key=lambda op: rows[op]["median_ms"]).rpartition(", ")[2]
    assert f"faster than others by {ratio:.1f}x {guided}, {form} (the paper: 50.9x)" in printed
    assert "Not measured: VAE decode in float32 at tiny: ModuleNotFoundError" in printed
    assert "Not measured: text encoder, captions: 2 at tiny: ModuleNotFoundError" in printed


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
    assert f"eager, with text encoder and {vae}: {ratio:.2f}x, gather, 3 steps" in capsys.readouterr().out


def test_what_is_denoised_is_what_the_samplers_make(bench, denoise, monkeypatch):
    pytest.importorskip("omegaconf")
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
            steps=4, guidance=5.0, flow_shift=3.0, topk=8, latent_shape=tuple(clip.noise.shape[1:]),
            batch_size=1, text_padding="zeros",
        )  # fmt: skip
        sampled = sample_latents(models["dense"], Captions(), ["a"], clip.seeds, settings)
    assert torch.allclose(apart, together, atol=1e-4)
    assert torch.allclose(together, sampled, atol=1e-4)
    # guidance is in it
    alone = clip.many_steps(clip.conditioned(models["dense"], 8), 4)
    assert not torch.allclose(alone, sampled, atol=1e-2)


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
    from vsa.attention.sparsity import resolve_topk

    cases, problems = (importlib.import_module(f"scripts.bench.{name}") for name in ("cases", "problems"))
    for case in ("distill", "denoise"):
        (shape,) = problems.choose_shapes(cases.CASES[case].gpu_shapes, False, torch.device("cuda"))
        # 61 frames of 448 x 832 in latents of 16 x 56 x 104
        assert shape.tokens == 16 * 28 * 52
        assert shape.topk == resolve_topk(0.8, shape.tiles)
        assert importlib.import_module("scripts.bench.step").named_model(shape) == "wan_1_3b"


def test_old_reports_still_print(bench, capsys):
    bench.main(["table", *map(str, sorted((ROOT / "benchmarks").glob("*.json")))])
    printed = capsys.readouterr().out
    assert "| 16k | 1 x 2 x 16384 x 64 | 64 | 87.5% | float32 | gather | forward |" in printed
    assert "quickstart-2026-11-21.json: not a report" in printed


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["fine", "--shapes", "nowhere"], "--shapes must be of tiny, .*, got nowhere"),
        (
            ["vsa", "--shapes", "wide-16k-d128"],
            "wide-16k-d128 has query blocks of several tiles: only fine and selection support it",
        ),
        (["fine", *FAST, "--repeats", "0"], "--repeats must be at least 1, got 0"),
        pytest.param(
            ["fine", "--device", "cuda"],
            "finds no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
    ],
)
def test_bad_arguments_are_refused(bench, monkeypatch, argv, message):
    if "vsa" in argv:
        small = importlib.import_module("scripts.bench.problems")
        wide = replace(bench.tiny, name="wide-16k-d128", group=2)
        monkeypatch.setattr(small, "GPU_SHAPES", (wide,))
    with pytest.raises(ValueError, match=message):
        bench.main(argv)


def test_a_table_of_no_report_is_refused(bench, tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(ValueError, match=r"x\.json is not a report"):
        bench.main(["table", str(tmp_path / "x.json")])


@pytest.mark.skipif(torch.cuda.is_available() or INTERPRETED, reason="needs a machine without a GPU; once is enough")
def test_tuning_without_a_gpu_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["tune.py", "fwd"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / "tune.py"), run_name="__main__")
    assert stop.value.code == 1
    assert capsys.readouterr().err == "error: tuning needs a CUDA device, but torch finds none\n"


def test_tuned_configurations_are_written_as_they_are_read(tmp_path):
    text = launch.CONFIGS.read_text()
    assert tune.dump(json.loads(text)) == text
    path = tmp_path / "configs.json"
    path.write_text(text)
    config = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1, "DESC": 0, "maxnreg": None}
    tune.write(path, "fwd", 100, 16, 96, config)
    table, before = json.loads(path.read_text()), json.loads(text)
    assert list(table["fwd"]) == ["80", "90", "100"]
    assert list(table["fwd"]["100"]["16"]) == ["64", "96", "112", "128", "256"]
    assert table["fwd"]["100"]["16"].pop("96") == config
    assert table["fwd"].pop("100") == before["fwd"]["90"]
    assert table == before


def test_candidates_hold_the_pinned_one_and_what_the_grid_does_not_know():
    pinned = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2, "DESC": 1, "maxnreg": None}
    pinned |= {"DP_FIRST": 0, "NEW": 3}
    found = tune.candidates("dkv", torch.bfloat16, 90, pinned)
    assert found[0] == pinned
    assert found.count(pinned) == 1
    assert all(config["NEW"] == 3 and config["DP_FIRST"] in (0, 1) for config in found)
    assert all(config.keys() == pinned.keys() for config in found)
    assert all(config["DESC"] == 0 for config in tune.candidates("fwd", torch.float16, 80, {})[1:])


@pytest.mark.skipif(not INTERPRETED, reason="needs TRITON_INTERPRET=1")
def test_candidates_are_checked_in_the_interpreter():
    for kernel in tune.KERNELS:
        config = launch.config(kernel, 16, torch.float32, CPU)
        p = tune.problem(kernel, 16, torch.float32, CPU, tokens=32, topk=2, heads=1, block=8)
        tune.checked(p, config, torch.float32)
        with pytest.raises(ValueError, match="wrong result"):
            tune.checked(p._replace(want=tuple(1.01 * x for x in p.want)), config, torch.float32)
