"""Cases of the benchmark: the ops that are timed on a problem, each after a correctness check.

B batch, L tokens, H heads, D head dim, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vsa_kernels import block_mean_pool, block_sparse_attn, block_sparse_kernels, select_topk
from vsa_kernels.coarse_fine import coarse_fine_attn
from vsa_kernels.operators import OPERATORS

from vsa.evaluation.comparison.timing import fast_dense

from . import checks
from .captured import Rankings, describe
from .checks import Layer
from .denoise import denoise
from .distill import distill
from .dynamic_hilbert import dynamic_hilbert
from .elementwise import Elementwise
from .fine_grained import check_groups, fine_grained, mask_shapes
from .neighborhood import check_strides, neighborhood, window_shapes
from .peers import add_peers, check_peers
from .problems import SELECTION_SHAPES, Problem, Shape, pair_counts, problem
from .selection import check_selection, selection
from .step import TEXT_TOKENS, TrainingStep, attention_of, model_size
from .tail import check_tail, tail
from .timing import BACKWARD, BOTH, FORWARD, Measured, Op, Setup, Skipped, against, breakdown, measure, say

# most bytes of scores in memory at a time, as in the operator
_SCORE_BYTES = 64 << 20
# of the case of the same name: no peer whose speed at these sizes is known to be far below the others'
_PEERS = ("dense-cudnn", "dense-fa4", "fastvideo", "cudnn", "fa4-128")


def fine(shape: Shape, setup: Setup) -> Measured:
    """The fine stage: `block_sparse_attn` with a given index."""
    p = problem(shape, setup.lists, setup.dtype, setup.device, setup.rankings)
    case, ops, skipped = p.case, list[Op](), Skipped()
    add_peers(ops, skipped, p, setup.peers)
    q, k, v = leaves = tuple(x.detach().requires_grad_() for x in (case.q, case.k, case.v))
    attend = partial(block_sparse_attn, q, k, v, case.index, **case.blocks)
    for backend in setup.backends:
        checks.check_measured(case, backend)
        ops.append(_ours(backend, p, backend, lambda backend=backend: attend(backend=backend)[0], leaves))
    rows = measure([replace(op, passes=(FORWARD, BACKWARD, BOTH)) for op in ops], setup)
    return Measured(rows, skipped, list_notes(p, setup.rankings))


def list_notes(p: Problem, rankings: Rankings | None) -> tuple[str, ...]:
    """Statistics of captured or synthesised lists, beside those of the captured lists of the same sparsity."""
    if rankings is None:
        return ()
    shape, lists = p.shape, p.case.index.kv_indices[0, ..., : p.shape.topk]
    captured = rankings.lists(shape.tile_thw, shape.heads, shape.topk, of=shape.tiles)
    name = f"{shape.name}, tiles of {shape.block}"
    return f"{name}, {p.lists}: {describe(lists)}", f"{name}, captured from {rankings.source}: {describe(captured)}"


def peers(shape: Shape, setup: Setup) -> Measured:
    """The fine stage in the shape's tiles and in tiles of twice as many tokens, half as many per list: equal kept
    tokens; beside the peers that are right, see `check_peers`."""
    right, wrong = check_peers(_PEERS, setup.dtype, setup.device)
    t, h, w = shape.tile_thw
    double = replace(shape, tile_thw=(t, h, 2 * w), topk=max(1, shape.topk // 2))
    rows, skipped, notes = list[dict[str, Any]](), Skipped(wrong), tuple[str, ...]()
    for tiles in (shape, double):
        # dense attention has no tiles: once
        names = [name for name in right if tiles is shape or not name.startswith("dense")]
        result = fine(tiles, replace(setup, peers=names))
        rows += [{**row, **tiles.row()} for row in result.rows]
        skipped |= result.skipped
        notes += result.notes
    dense = {row["pass"]: row for row in rows if row["op"] == "dense-cudnn"}
    for row in rows:
        against(row, dense.get(row["pass"]))
    return Measured(rows, skipped, notes)


def vsa(shape: Shape, setup: Setup) -> Measured:
    """The whole operator: `coarse_fine_attn` as self-attention, also with the coarse gate alone."""
    p = problem(shape, setup.lists, setup.dtype, setup.device)
    case, ops, skipped = p.case, list[Op](), Skipped()
    add_peers(ops, skipped, p, setup.peers, whole=True)
    leaves = tuple(x.detach().requires_grad_() for x in (case.q, case.k, case.v, p.gate_coarse, p.gate_fine))

    def attend(backend: str, gates: tuple[Tensor | None, ...]) -> Tensor:
        return coarse_fine_attn(*leaves[:3], *gates, **case.blocks, topk=shape.topk, backend=backend).out

    for backend in setup.backends:
        _check_operator_of(p, backend)
        ops.append(_ours(backend, p, backend, partial(attend, backend, leaves[3:]), leaves))
        coarse = partial(attend, backend, (leaves[3], None))
        ops.append(_ours(f"{backend}, no fine gate", p, backend, coarse, leaves[:4]))
    return Measured(measure(ops, setup), skipped)


def coarse(shape: Shape, setup: Setup) -> Measured:
    """The parts of the operator's forward before the fine stage, and the transposed index: each one and their sum."""
    p = problem(shape, setup.lists, setup.dtype, setup.device)
    rows = []
    for backend in setup.backends:
        _check_operator_of(p, backend)
        with torch.no_grad():
            pieces = _triton_pieces(p) if backend == "triton" else _eager_pieces(p)
        ops = [
            Op(name=f"{backend}: {name}", call=call, passes=(kind,), against=(), ahead=True)
            for (name, kind), call in pieces.items()
        ]
        own = measure(ops, setup)
        summed = [row for row in own if row["pass"] == FORWARD or row["op"].endswith("transposed index")]
        total = {key: round(sum(row[key] for row in summed), 4) for key in summed[0] if key.endswith("_ms")}
        name = f"{backend}: sum without the coarse attention's backward"
        rows += [*own, {**summed[0], "op": name, **total, "peak_extra_mib": None}]
    return Measured(rows, {})


def layer(shape: Shape, setup: Setup) -> Measured:
    """A DiT layer on one video: its self-attention with projections and the whole block, dense against sparse, and the
    block without the cost of self-attention."""
    ops: list[Op] = []
    heads, head_dim = shape.heads, shape.head_dim

    def build(name: str) -> tuple[Layer, dict[str, Any]]:
        torch.manual_seed(0)
        method = attention_of(shape, name)(dim=heads * head_dim, num_heads=heads, head_dim=head_dim)
        dit_layer = Layer.build(
            method, shape.grid_thw, shape.batch, shape.topk, setup.dtype, setup.device,
            text_tokens=TEXT_TOKENS, ffn_dim=model_size(shape)["ffn_dim"],
        )  # fmt: skip
        # no TFLOP/s, because most matrix products are projections
        return dit_layer, {"inputs": (dit_layer.x, *dit_layer.block.parameters()), "dout": dit_layer.dout}

    for name in ("dense", *setup.backends):
        dit_layer, read = build(name)
        for part, call in (("attention", dit_layer.attention), ("block", dit_layer.whole)):
            ops.append(Op(name=f"{part}, {name}", call=call, against=(f"{part}, dense",), **read))
    ops.sort(key=lambda op: op.name.split(",")[0])
    for mode in setup.modes:
        dit_layer, read = build("free")
        name = f"block without self-attention, {mode}"
        checks.check_measured_block(dit_layer.run_in(mode), name)
        ops.append(Op(name=name, call=dit_layer.whole, against=(), **read))
    return Measured(measure(ops, setup), {})


def step(shape: Shape, setup: Setup) -> Measured:
    """A training step (forward, backward, AdamW) of the shape's model: dense, sparse, and without attention cost."""
    rows: list[dict[str, Any]] = []
    skipped = Skipped()
    for mode, level, strategy in product(setup.modes, setup.levels, setup.strategies):
        compiled, dense = mode == "compiled", dict[str, Any]()
        kind = "compiled training step" if compiled else "training step"
        kind += f", recomputing {level}" if setup.levels != ("full",) else ""
        kind += f", {strategy}" if setup.strategies != ("plain",) else ""
        for name in ("dense", *setup.backends, "free"):
            try:
                # one network at a time
                run = torch.enable_grad()(TrainingStep(shape, name, compiled, level, setup.device, strategy).__call__)
                (row,) = measure([Op(name=name, call=run, passes=(kind,))], setup)
            except torch.OutOfMemoryError as error:
                skipped[f"{name}, {kind}"] = str(error).partition(". ")[0]
                continue
            dense = dense or row
            against(row, dense)
            if setup.device.type == "cuda":
                row["gpu_ms"] = breakdown(run)
                torch.cuda.empty_cache()
            rows.append(row | {"activation_checkpointing": level, "strategy": strategy})
            del run
    return Measured(rows, skipped)


class Case(NamedTuple):
    """A case of the command line: its run, the checks before it, and its shapes on a GPU (None: the default ones), or
    from the command line and the device, without block lists of the problem."""

    run: Callable[[Shape, Setup], Measured]
    check: Callable[[str, Setup], list[str]]
    gpu_shapes: list[str] | None = None
    shapes: Callable[[argparse.Namespace, torch.device], Sequence[Shape]] | None = None


def _checked(check: Callable[[str, torch.dtype, torch.device], str]) -> Callable[[str, Setup], list[str]]:
    return lambda backend, s: [check(backend, s.dtype, s.device)]


def _check_network(backend: str, setup: Setup) -> list[str]:
    return [checks.check_operator(backend, setup.dtype, setup.device), checks.check_layer(backend, setup.device)]


def _check_layer(backend: str, setup: Setup) -> list[str]:
    lines = _check_network(backend, setup)
    if backend == setup.backends[-1]:
        # once, since a block without self-attention has no backend
        lines += [checks.check_block(mode, setup.dtype, setup.device) for mode in setup.modes]
    return lines


def operator_cases() -> dict[str, Case]:
    """A case of each operator of the records that has sizes in models."""
    cases = (Elementwise(operator) for operator in OPERATORS.values() if operator.sizes)
    return {case.operator.name: Case(case.run, case.check, shapes=case.shapes) for case in cases}


def _check_peers(backend: str, setup: Setup) -> list[str]:
    lines = [checks.check(backend, setup.dtype, setup.device)]
    return lines + list(check_peers(_PEERS, setup.dtype, setup.device)[0].values()) * (backend == setup.backends[-1])


CASES = {
    "fine": Case(fine, _checked(checks.check)),
    "coarse": Case(coarse, _checked(checks.check_operator)),
    "peers": Case(peers, _check_peers, ["paper-16k-d128", "32k-d128", "76k-d128", "128k-d128", "220k-d128"]),
    "vsa": Case(vsa, _checked(checks.check_operator)),
    "tail": Case(tail, _checked(check_tail), ["paper-16k-d64", "32k-d128", "wan14b-720p"]),
    "layer": Case(layer, _check_layer),
    "step": Case(step, _check_network),
    "selection": Case(
        selection,
        lambda backend, s: check_selection(replace(s, backends=[backend])),
        [s.name for s in SELECTION_SHAPES],
    ),
    "neighborhood": Case(neighborhood, _checked(check_strides), shapes=window_shapes),
    "fine_grained": Case(fine_grained, _checked(check_groups), shapes=mask_shapes),
    "dynamic_hilbert": Case(dynamic_hilbert, _checked(checks.check), ["wan14b-21x45x80"]),
    "distill": Case(distill, _check_network, ["wan1.3b-distill"]),
    "denoise": Case(denoise, _check_network, ["wan1.3b-distill"]),
    **operator_cases(),
}
NETWORK_CASES = ("layer", "step", "distill", "denoise")
"""Cases of whole layers and networks."""
OWN_LISTS = (*NETWORK_CASES, "dynamic_hilbert")
"""Cases that do not use the block lists of the problem, beside those with shapes of their own."""


def measure_shape(case: str, shape: Shape, setup: Setup) -> Measured:
    """Rows of one shape, with the columns of the shape."""
    say(f"{case} {shape.name}")
    if shape.group > 1 and case in NETWORK_CASES:
        return Measured([], {case: "needs query blocks of one tile"})
    if shape.group > 1 and case not in ("fine", "selection"):
        raise ValueError(f"shape {shape.name} has query blocks of several tiles: only fine and selection support it")
    with fast_dense(setup.device) if case in NETWORK_CASES else nullcontext():
        result = CASES[case].run(shape, setup)
    common = {**shape.row(), "dtype": str(setup.dtype).removeprefix("torch.")}
    if case not in OWN_LISTS and CASES[case].shapes is None:
        common["lists"] = setup.lists
    return Measured([{**common, **row} for row in result.rows], result.skipped, result.notes)


def _check_operator_of(p: Problem, backend: str) -> None:
    case = p.case
    with torch.no_grad():
        output = coarse_fine_attn(
            case.q, case.k, case.v, p.gate_coarse, p.gate_fine, **case.blocks, topk=p.shape.topk, backend=backend
        )
    checks.check_measured_operator(p, output, f"the operator on backend {backend}")


def _ours(name: str, p: Problem, backend: str, call: Callable[[], Tensor], leaves: tuple[Tensor, ...]) -> Op:
    pairs, executed = pair_counts(p.case, backend)
    case = p.case
    # a split backward recomputes the logits twice, for dq and for dk, dv, unless these keep ds for dq
    split = backend == "triton" and (
        block_sparse_kernels(case.q, case.k, case.v, case.index, **case.blocks, backend=backend).dq != "hopper_bwd128"
    )
    return Op(
        name=name, call=call, inputs=leaves, dout=case.dout, head_dim=p.shape.head_dim,
        pairs=pairs, executed=executed, products=7 if split else 5,
    )  # fmt: skip


Pieces = dict[tuple[str, str], Callable[[], Any]]
"""Calls by name and pass."""


def _triton_pieces(p: Problem) -> Pieces:
    from vsa_kernels.block_sparse import triton_bwd, triton_fwd, triton_index
    from vsa_kernels.pooling import triton_pool
    from vsa_kernels.selection import triton_topk
    from vsa_kernels.selection.triton_scores import scores

    case, topk = p.case, min(p.shape.topk, p.case.kv_blocks.num)
    q, k, v, blocks = case.q, case.k, case.v, case.q_blocks
    scale, half = q.shape[-1] ** -0.5, q.dtype.itemsize == 2
    capacity = case.index.kv_indices.shape[-1]

    def pool() -> tuple[Tensor, ...]:
        return triton_pool.forward((q, k, v), blocks.offsets, blocks.max_size, blocks.min_size)

    q_mean, k_mean, v_mean = pool()
    heads = q.shape[0] * q.shape[2]
    step = min(heads, max(1, _SCORE_BYTES // (4 * blocks.num**2)))
    parts = [(first, min(step, heads - first)) for first in range(0, heads, step)]

    def score(first: int, count: int) -> Tensor:
        return scores(q_mean, k_mean, scale, first, count, precision="tf32" if half else "ieee")

    def score_all() -> None:
        # results are not kept, so that the parts reuse memory
        for part in parts:
            score(*part)

    ranked = score(0, step)
    attend = partial(triton_fwd.dense, q_mean, k_mean, v_mean, scale, half=half)
    out, lse = attend()
    dout = torch.randn_like(out)
    delta = (dout * out).sum(-1).transpose(1, 2).contiguous()
    lists, counts = case.index.kv_indices, case.index.kv_num_blocks
    return {
        ("pooling of q, k, v", FORWARD): pool,
        ("coarse attention", FORWARD): attend,
        ("scores", FORWARD): score_all,
        ("top-k", FORWARD): lambda: [
            triton_topk.select(ranked[None, :count], topk, None, None, None, capacity) for _, count in parts
        ],
        ("transposed index", BACKWARD): lambda: triton_index.transpose(lists, counts, blocks.num),
        ("coarse attention", BACKWARD): partial(
            triton_bwd.dense, dout, delta, lse, q_mean, k_mean, v_mean, scale, half=half
        ),
    }


def _eager_pieces(p: Problem) -> Pieces:
    case, scale = p.case, p.shape.head_dim**-0.5

    def pool() -> list[Tensor]:
        return [
            block_mean_pool(x, case.q_blocks, backend="reference").transpose(1, 2) for x in (case.q, case.k, case.v)
        ]

    q_mean, k_mean, v_mean = pool()

    def score() -> Tensor:
        return (q_mean * scale) @ k_mean.transpose(-1, -2)

    ranked = score()
    return {
        ("pooling of q, k, v", FORWARD): pool,
        ("coarse attention", FORWARD): lambda: ranked.softmax(-1) @ v_mean,
        ("scores", FORWARD): score,
        ("top-k", FORWARD): lambda: select_topk(ranked, p.shape.topk, backend="reference"),
    }
