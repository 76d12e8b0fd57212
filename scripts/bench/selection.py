"""Selection by share (top-p) beside top-k, a sort and dense attention, and SpargeAttn's whole prediction.

Estimates for an H200 (24 heads, D=128, query blocks of 128 tokens, key blocks of 64); docs/benchmarks/methods.md has
the measurements:

- Memory: scores are read and lists written once, 8 bytes per entry: 101 MB, 24 us at 64K tokens; 403 MB, 96 us at 128K.
- Selection is bound by instructions and latency, not by memory: 0.11 ms at 64K, 0.43 ms at 128K.
- Prediction: two reads of k and one of q take 0.34 ms at 64K, the scores in fp32 0.04 ms: 0.49 ms, 0.57% of dense
  attention; 1.16 ms, 0.33%, at 128K. The prediction of the paper takes 0.6% and 0.5% (SpargeAttn, Table 3).

B batch, H heads, Nq / Nkv query / kv blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from vsa_kernels import BlockIndex, Blocks, block_mean_and_similarity, select_share, select_topk

from vsa.attention.selection import sparge_top_p
from vsa.attention.sparge.mask import block_statistics, first_stage

from .peers import dense_ops
from .problems import Shape, problem
from .timing import FORWARD, Measured, Op, Setup, Skipped, attempt, measure, must_notice

_SHARE, _CROSSING = 0.9, "drop"
# tolerance of sums in a check, far below the weight of an entry near the share
_SLACK = 1e-5


def selection(shape: Shape, setup: Setup) -> Measured:
    """Selection by share of given scores beside top-k and a sort; SpargeAttn's prediction beside dense attention."""
    p = problem(shape, setup.lists, setup.dtype, setup.device)
    ops, skipped = list[Op](), Skipped()
    for name, make in dense_ops(p.case).items():
        attempt(ops, skipped, name, lambda make=make: replace(make(), passes=(FORWARD,)))
    q, k, q_blocks, kv_blocks = p.case.q, p.case.k, p.case.q_blocks, p.case.kv_blocks
    g = torch.Generator(device=setup.device).manual_seed(1)
    size = (shape.batch, shape.heads, q_blocks.num, kv_blocks.num)
    scores = 2 * torch.randn(size, generator=g, device=setup.device)
    # columns that are listed for any score, as for the dissimilar blocks of SpargeAttn
    judged = torch.rand((*size[:2], 1, size[3]), generator=g, device=setup.device) < 0.1
    topk = min(shape.topk, kv_blocks.num)
    for name in _backends(setup):
        refuse_wrong(scores, select_share(scores, _SHARE, crossing=_CROSSING, backend=name), f"backend {name}")
        calls = {
            "share": lambda name=name: select_share(scores, _SHARE, crossing=_CROSSING, backend=name),
            "share, masks of heads": lambda name=name: select_share(
                scores, _SHARE, crossing=_CROSSING, candidates=~judged, always=judged, backend=name
            ),
            "top-k": lambda name=name: select_topk(scores, topk, backend=name),
            "means and similarity": lambda name=name: block_mean_and_similarity(k, kv_blocks, backend=name),
        }
        ops += [Op(name=f"{name}: {what}", call=call, passes=(FORWARD,), ahead=True) for what, call in calls.items()]
    prediction = partial(predict, q, k, q_blocks, kv_blocks)
    ops.append(Op(name="prediction", call=prediction, passes=(FORWARD,), ahead=True))
    if setup.device.type == "cuda":
        replay = captured(prediction)
        ops.append(Op(name="prediction, CUDA graph", call=replay, passes=(FORWARD,), ahead=True))
    ops.append(Op(name="stable sort", call=lambda: scores.sort(dim=-1, stable=True), passes=(FORWARD,), ahead=True))
    return Measured(measure(ops, setup), skipped)


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A call captured as a CUDA graph, after a first call that compiles its kernels."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def predict(q: Tensor, k: Tensor, q_blocks: Blocks, kv_blocks: Blocks) -> BlockIndex:
    """The first stage of `SpargeAttention`, with a similarity threshold of 0, at which shares select random blocks."""
    return first_stage(block_statistics(q, k, q_blocks, kv_blocks), sparge_top_p(_SHARE), 0.0)


def check_selection(setup: Setup) -> list[str]:
    """Check the selection of each backend on a small problem, and that a wrong share is noticed; one line per backend.

    Raises:
        ValueError: a selection is wrong, or the check does not notice a wrong share.
    """
    g = torch.Generator().manual_seed(0)
    scores = 2 * torch.randn(2, 3, 5, 61, generator=g).to(setup.device)
    for name in _backends(setup):
        refuse_wrong(scores, select_share(scores, _SHARE, crossing=_CROSSING, backend=name), f"backend {name}")
        damaged = select_share(scores, _SHARE - 0.1, crossing=_CROSSING, backend=name)
        check = partial(refuse_wrong, scores, damaged, f"backend {name}")
        must_notice(check, f"backend {name}", "a wrong share")
    return [f"selection by share on {name}: right by fp64 sums; a wrong share is noticed" for name in _backends(setup)]


def refuse_wrong(scores: Tensor, index: BlockIndex, what: str) -> None:
    """Compare some rows of an index with fp64 sums of the softmax.

    Raises:
        ValueError: a row is not the largest set of the best blocks with a sum of at most the share.
    """
    B, H, Nq, _ = scores.shape
    for b, h, n in {(0, 0, 0), (0, H // 2, Nq // 2), (B - 1, H - 1, Nq - 1)}:
        row = scores[b, h, n].double()
        weights = row.softmax(0)
        blocks = index.kv_indices[b, h, n, : int(index.kv_num_blocks[b, h, n])].long()
        inside = torch.zeros_like(row, dtype=torch.bool)
        inside[blocks] = True
        # the best block that is not listed; scores have no NaN
        following = row.masked_fill(inside, -torch.inf).argmax()
        ordered = bool((blocks.diff() > 0).all()) and (bool(inside.all()) or row[blocks].min() >= row[following])
        mass = float(weights[blocks].sum())
        small = mass <= _SHARE + _SLACK or len(blocks) == 1
        large = mass + float(weights[following]) > _SHARE - _SLACK or bool(inside.all())
        if not (ordered and small and large):
            raise ValueError(f"{what}: the blocks of query block {n} are not the share, no speed is printed")


def _backends(setup: Setup) -> list[str]:
    # selection has no gather backend
    return list(dict.fromkeys("triton" if name == "triton" else "reference" for name in setup.backends))
