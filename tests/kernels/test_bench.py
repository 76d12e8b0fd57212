"""`scripts/bench` prints no speed for a wrong kernel."""

from __future__ import annotations

import importlib
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from vsa_kernels.block_index import BlockIndex
from vsa_kernels.coarse_fine import coarse_fine_attn
from vsa_kernels.operators import OPERATORS

from tests.kernels.benching import FAST, damaged
from tests.kernels.interpreted import INTERPRETED, further
from vsa.models.blocks import TransformerBlock

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
CASES = ("fine", "coarse", "vsa", "layer")


def _problem(shape, lists: str = "random"):
    return importlib.import_module("scripts.bench.problems").problem(shape, lists, torch.float32, CPU)


def test_a_right_kernel_gets_a_table_and_a_report(bench, tmp_path, capsys):
    out = tmp_path / "new" / "report.json"
    bench.main(["fine", "--repeats", "2", "--out", str(out)])
    report = json.loads(out.read_text())
    assert report["command"] == "python -m scripts.bench fine --repeats 2"
    assert [(r["op"], r["pass"]) for r in report["rows"]] == [
        (op, kind) for op in ("dense", "gather") for kind in ("forward", "backward", "forward + backward")
    ]
    assert all(r["min_ms"] <= r["median_ms"] <= r["max_ms"] for r in report["rows"])
    assert report["rows"][3]["sparsity"] == 0.75
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
    output = capsys.readouterr().out
    assert all(line in output for line in report["checks"])
    assert all(f"| {name} |" in output for name in OPS[case])
    if case == "coarse":
        *pieces, total = report["rows"]
        assert total["median_ms"] == pytest.approx(sum(r["median_ms"] for r in pieces), abs=1e-3)


def test_peers_are_timed_in_two_tile_sizes_after_a_comparison_with_fp64(bench, tmp_path, monkeypatch):
    peers = importlib.import_module("scripts.bench.peers")
    monkeypatch.setattr(peers, "_CHECKED", (bench.tiny,))
    peers.check_peers.cache_clear()
    right, wrong = peers.check_peers(("dense",), torch.float32, CPU)
    assert "dense torch.float32, 64 tokens, relative errors from fp64: out " in right["dense"]
    assert not wrong
    # a wrong peer is left out, with the reason
    peers.check_peers.cache_clear()
    results = peers._results
    monkeypatch.setattr(peers, "_results", lambda op: {**results(op), "dk": results(op)["dk"] * 1.01})
    right, wrong = peers.check_peers(("dense",), torch.float32, CPU)
    assert not right
    assert "dk is off by 0.01" in wrong["dense"]
    peers.check_peers.cache_clear()
    out = tmp_path / "report.json"
    bench.main(["peers", *FAST, "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    assert [(row["block"], row["topk"]) for row in rows[::3]] == [(8, 2), (16, 1)]


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
    ("case", "lists", "part"), [further("fine", "sinks", ""), further("coarse", "local", ": transposed index")]
)
def test_triton_runs(bench, checks, monkeypatch, capsys, case, lists, part):
    # the small checks are slow in the interpreter, and test_coarse_fine.py and others make them there
    for name in ("check", "check_operator"):
        monkeypatch.setattr(checks, name, lambda *a: "")
    smaller = replace(bench.tiny, grid_thw=(2, 4, 4), heads=1, head_dim=16)
    monkeypatch.setattr(importlib.import_module("scripts.bench.problems"), "CPU_SHAPES", (smaller,))
    bench.main([case, "--shapes", "tiny", "--repeats", "1", "--backends", "triton", "--lists", lists])
    output = capsys.readouterr().out
    assert f"| triton{part} | backward |" in output


@pytest.mark.parametrize("case", CASES)
def test_a_wrong_result_stops_every_case(bench, checks, monkeypatch, tmp_path, capsys, case):
    if case == "fine":
        monkeypatch.setattr(checks, "run", damaged(checks.run, lambda result: {**result, "dk": result["dk"] * 1.01}))
        match = "gather is wrong, no speed is printed: dk"
    elif case == "layer":
        right = checks.Layer.attention
        wrong = lambda self: right(self) * (1.001 if self.block.method.backend == "gather" else 1)  # noqa: E731
        monkeypatch.setattr(checks.Layer, "attention", wrong)
        match = "layer on backend gather is wrong, no speed is printed: out"
    else:
        right = checks.coarse_fine_attn
        monkeypatch.setattr(
            checks, "coarse_fine_attn", damaged(right, lambda result: result._replace(out=result.out * 1.001))
        )
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
        results, name = right(layer), "gradient of attn2.to_v.weight"
        # not in the fp64 results
        return results | ({} if layer.x.dtype == torch.float64 else {name: results[name] * 1.05})

    monkeypatch.setattr(checks.Layer, "results", wrong)
    with pytest.raises(ValueError, match=r"gradient of attn2\.to_v\.weight is off by"):
        checks.check_block("eager", dtype, CPU)


@pytest.mark.slow
def test_a_compiled_block_without_self_attention_is_right(bench, checks):
    checks.check_block("compiled", torch.float32, CPU)


@pytest.mark.slow
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
    result = coarse_fine_attn(
        p.case.q, p.case.k, p.case.v, p.gate_coarse, p.gate_fine, **blocks, topk=2, backend="gather"
    )
    checks.check_measured_operator(p, result, "it")
    with pytest.raises(ValueError, match="output of query block"):
        checks.check_measured_operator(p, result._replace(out=result.out - p.gate_coarse * 1e-2), "it")
    # other lists, with the fine output that belongs to them
    other = BlockIndex.from_dense(~result.index.to_dense(8))
    other = replace(other, kv_indices=other.kv_indices[..., :2], kv_num_blocks=torch.full_like(other.kv_num_blocks, 2))
    fine = checks.block_sparse_attn(p.case.q, p.case.k, p.case.v, other, **blocks)[0]
    with pytest.raises(ValueError, match="does not list its best blocks"):
        checks.check_measured_operator(p, result._replace(index=other, fine=fine), "it")


def test_flops_count_real_pairs_and_whole_tiles(bench):
    problems, timing = (importlib.import_module(f"scripts.bench.{name}") for name in ("problems", "timing"))
    shape = replace(bench.tiny, grid_thw=(3, 4, 4))
    p = _problem(shape)
    sizes, dense = p.case.kv_blocks.sizes, p.case.index.to_dense(8)
    pairs = int((dense * sizes[:, None] * sizes).sum())
    assert problems.pair_counts(p.case, "gather") == (pairs, int(dense.sum()) * 8 * 8)
    assert problems.pair_counts(p.case, "triton") == (pairs, int(dense.sum()) * 16 * 16)
    op = timing.Op(name="x", call=lambda: None, head_dim=8, pairs=10, executed=20, products=7)
    assert op.flops("forward") == (4 * 8 * 20, 4 * 8 * 10)
    assert op.flops("backward") == (14 * 8 * 20, 10 * 8 * 10)
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
    padded_q = peers.pad(p.case.q, slots, p)
    assert padded_q.shape == (1, 2, 64, 8)
    assert torch.equal(padded_q.transpose(1, 2)[:, slots], p.case.q)
    assert padded_q.count_nonzero() == p.case.q.count_nonzero()
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


def _enlarged(right):
    """An operator whose results in fp32 are too large by a thousandth."""

    def wrong(x, *others, **options):
        results = right(x, *others, **options)
        factor = 1 + 1e-3 * (x.dtype == torch.float32)
        return tuple(factor * y for y in results) if isinstance(results, tuple) else factor * results

    return wrong


@pytest.mark.parametrize("case", [name for name, operator in OPERATORS.items() if operator.elementwise])
def test_elementwise_cases_run_and_a_wrong_operator_stops_them(bench, monkeypatch, tmp_path, capsys, case):
    module = importlib.import_module(f"{OPERATORS[case].module.rpartition('.')[0]}.cases")
    elementwise = importlib.import_module("scripts.bench.elementwise")
    out = tmp_path / "report.json"
    bench.main([case, "--repeats", "1", "--out", str(out)])
    copy, forward, both = json.loads(out.read_text())["rows"]
    assert [(r["op"], r["pass"]) for r in (copy, forward, both)] == [
        ("copy", "forward"), ("eager", "forward"), ("eager", "forward + backward")
    ]  # fmt: skip
    assert copy["share_of_copy"] == 1
    tensors = {"residual_norm": 10, "gated_residual": 6}.get(case, 5)
    assert both["share_of_copy"] == pytest.approx(tensors / 2 * copy["median_ms"] / both["median_ms"], abs=1e-3)
    assert both["gb_per_s"] == pytest.approx(tensors * 2 * 999 * 240 * 4 / both["median_ms"] / 1e6, abs=0.06)
    output = capsys.readouterr().out
    assert "the other sign of an input is noticed" in output
    assert "| small | 2 x 3 x 999 x 80 | float32 | eager | forward |" in output
    right = getattr(module, case)

    def damaged_cases(damage):
        return lambda p: (call._replace(function=damage(call.function)) for call in right(p))

    def sign(f):
        return lambda x, y, *rows, **kw: f(x, y.abs() if x.dtype == torch.float32 else y, *rows, **kw)

    for damage in (sign, _enlarged):
        monkeypatch.setattr(module, case, damaged_cases(damage))
        with pytest.raises(ValueError, match=r"is wrong, no speed is printed: result 0 is off by"):
            bench.main([case, "--repeats", "1"])
    monkeypatch.setattr(module, case, right)
    monkeypatch.setitem(elementwise._TOLERANCE, torch.float32, 10.0)
    with pytest.raises(ValueError, match="does not notice the other sign of input 0"):
        bench.main([case, "--repeats", "1"])
    with pytest.raises(ValueError, match=r"--shapes must be of small, pretrain_120m, wan1\.3b.*, got tiny"):
        bench.main([case, "--shapes", "tiny"])
    assert capsys.readouterr().out == ""


def test_gpu_time_is_broken_down_as_in_a_profile(bench, monkeypatch):
    breakdown = importlib.import_module("scripts.bench.timing").breakdown
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    x = torch.randn(1000, 1000)
    kinds = breakdown(lambda: (x @ x).sin())
    # without a GPU the kinds of the host's operators
    assert {"linear layers", "elementwise and norms"} <= set(kinds)
    assert not {"host: launches and Python", "idle: host and device wait", "waiting for data"} & set(kinds)


def test_old_reports_still_print(bench, capsys, tmp_path):
    with tarfile.open(ROOT / "benchmarks" / "raw" / "kernels.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    other = tmp_path / "other.json"
    other.write_text("{}")
    bench.main(["table", *map(str, sorted((tmp_path / "kernels").glob("*.json"))), str(other)])
    output = capsys.readouterr().out
    assert "| 16k | 1 x 2 x 16384 x 64 | 64 | 87.5% | float32 | gather | forward |" in output
    assert "other.json: not a report" in output


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
