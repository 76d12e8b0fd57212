"""What the ops refuse before any launch: blocks that do not cover the tokens, empty dims, other devices and dtypes."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import vsa_kernels
from torch import Tensor
from vsa_kernels import (
    BlockIndex,
    Blocks,
    TileGroups,
    block_mean_pool,
    block_sparse_attn,
    gathered_attn,
    mean_scores,
    merge_attn,
    select_topk,
    set_workspace_limit,
    skipping_attn,
)
from vsa_kernels.coarse_fine import coarse_attn, coarse_fine_attn
from vsa_kernels.coarse_fine.op import coarse_fine_bwd, coarse_fine_fwd
from vsa_kernels.operators import OPERATORS
from vsa_kernels.testing import make_case

from vsa.attention.stats import tile_mass


def backends(device: torch.device) -> tuple[str, ...]:
    return ("reference", "gather", "triton") if device.type == "cuda" else ("reference", "gather")


def attend(q: Tensor, k: Tensor, q_blocks: Blocks, kv_blocks: Blocks, backend: str | None = None) -> Any:
    lists = torch.zeros(1, 1, q_blocks.num, 1, dtype=torch.int32, device=q.device)
    index = BlockIndex(kv_indices=lists, kv_num_blocks=torch.ones_like(lists[..., 0]))
    return block_sparse_attn(q, k, k, index, q_blocks=q_blocks, kv_blocks=kv_blocks, backend=backend)


def operate(q: Tensor, k: Tensor, q_blocks: Blocks, kv_blocks: Blocks, backend: str | None = None) -> Any:
    return coarse_fine_attn(q, k, k, q, q, q_blocks=q_blocks, kv_blocks=kv_blocks, topk=1, backend=backend)


def average(q: Tensor, k: Tensor, q_blocks: Blocks, kv_blocks: Blocks) -> Any:
    return coarse_attn(q, k, k, q_blocks=q_blocks, kv_blocks=kv_blocks)


def pool(q: Tensor, k: Tensor, q_blocks: Blocks, kv_blocks: Blocks) -> Any:
    return block_mean_pool(q, q_blocks), block_mean_pool(k, kv_blocks)


OPS = (attend, operate, average, pool)
# blocks of 70 tokens: one beyond them, one short of them, and the same with ragged blocks
UNCOVERED = [([16] * 4, "4 blocks of 16 tokens"), ([16] * 5, "5 blocks of 16 tokens")]
UNCOVERED += [([30, 34], "2 blocks of 30 to 34 tokens"), ([40, 41], "2 blocks of 40 to 41 tokens")]


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize(("sizes", "said"), UNCOVERED, ids=lambda x: str(x) if isinstance(x, list) else "")
def test_blocks_cover_the_tokens(op, sizes, said, device):
    """Rows that belong to no block were uninitialised memory, on Hopper another sample's."""
    x, y = torch.randn(2, 70, 2, 64, device=device), torch.randn(2, 64, 2, 64, device=device)
    wrong, right, other = (Blocks.from_sizes(n, device) for n in (sizes, [20, 15, 35], [64]))
    op(x, y, right, other)
    with pytest.raises(ValueError, match=f"blocks must cover the 70 tokens of [qkx], got {said}$"):
        op(x, y, wrong, other)
    with pytest.raises(ValueError, match=f"blocks must cover the 70 tokens of [qkx], got {said}$"):
        op(y, x, other, wrong)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize("dim", [1, 2, 3], ids=["tokens", "heads", "head_dim"])
def test_only_the_batch_may_be_empty(op, dim, device):
    shape = [2, 6, 2, 16]
    shape[dim] = 0
    blocks = Blocks.from_sizes([4, 2], device)
    x = torch.randn(shape, device=device)
    with pytest.raises(ValueError, match=r"must have at least one token, head and head dim, got \[2, "):
        op(x, x, blocks, blocks)


def test_selection_of_nothing_is_refused(device):
    for shape in ([1, 0, 3, 4], [1, 2, 0, 4], [1, 2, 3, 0]):
        with pytest.raises(ValueError, match=r"at least one head, query block and kv block, got \[1, "):
            select_topk(torch.zeros(shape, device=device), 1)


@pytest.mark.parametrize("sizes", [[3, 3], [4, 2]], ids=str)
def test_an_empty_batch_gives_empty_results(sizes, device):
    blocks = Blocks.from_sizes(sizes, device)
    for backend in backends(device):
        x, gate = (torch.randn(0, 6, 2, 16, device=device, requires_grad=True) for _ in range(2))
        index = BlockIndex.from_dense(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device))
        sides = {"q_blocks": blocks, "kv_blocks": blocks, "backend": backend}
        out, lse = block_sparse_attn(x, x, x, index, **sides)
        assert (out.shape, lse.shape) == (x.shape, (0, 2, 6))
        (grad,) = torch.autograd.grad(out.sum() + lse.sum(), x)
        assert grad.shape == x.shape
        result = coarse_fine_attn(x, x, x, gate, gate, topk=1, **sides)
        assert (result.out.shape, result.index.kv_indices.shape) == (x.shape, (0, 2, 2, 2))
        grads = torch.autograd.grad(result.out.sum(), (x, gate))
        assert all(grad.shape == x.shape for grad in grads)
        if backend != "gather":
            means = block_mean_pool(x, blocks, backend)
            assert means.shape == (0, 2, 2, 16)
            assert torch.autograd.grad(means.sum(), x)[0].shape == x.shape
            mask = torch.ones(2, 2, dtype=torch.bool, device=device)
            scores = torch.zeros(0, 2, 2, 2, device=device)
            selection = select_topk(scores, 1, candidates=mask, always=mask, backend=backend)
            assert selection.kv_num_blocks.shape == (0, 2, 2)


def test_an_empty_batch_launches_nothing(device):
    """The op of the whole operator returns what its fake promises."""
    blocks = Blocks.from_sizes([4, 2], device)
    sizes = (blocks.offsets, 4, 2)
    x = torch.randn(0, 6, 2, 16, device=device)
    arguments = (x, x, x, x, x, *sizes, *sizes, 1, 2, 0.3)
    out, *saved_tensors = coarse_fine_fwd(*arguments)
    assert out.shape == x.shape
    assert [tuple(s.shape) for s in saved_tensors[3:6]] == [(0, 2, 2), (0, 2, 2, 2), (0, 2, 2)]
    grads = coarse_fine_bwd(x, *saved_tensors, *arguments)
    assert [tuple(g.shape) for g in grads] == [(0, 6, 2, 16)] * 5


def skip(x: Tensor, blocks: Blocks, scale: float | None, **backend: Any) -> Any:
    index = BlockIndex.from_dense(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=x.device))
    thresholds = torch.zeros(2, device=x.device)
    return skipping_attn(
        x, x, x, index, q_blocks=blocks, kv_blocks=blocks, thresholds=thresholds, scale=scale, **backend
    )


def gathered(x: Tensor, blocks: Blocks, scale: float | None, **backend: Any) -> Any:
    lists = torch.tensor([0, 1], dtype=torch.int32, device=x.device).expand(2, 2, 1, 2)
    groups = TileGroups(members=lists, kv_indices=lists, kv_num_blocks=2 * torch.ones_like(lists[..., 0]))
    return gathered_attn(x, x, x, groups, q_blocks=blocks, kv_blocks=blocks, scale=scale, **backend)


SCALED: dict[str, Callable[..., Any]] = {
    "block_sparse": lambda x, blocks, scale, **backend: block_sparse_attn(
        *(x, x, x, BlockIndex.from_dense(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=x.device))),
        **dict(q_blocks=blocks, kv_blocks=blocks, scale=scale, **backend),
    ),
    "coarse_fine": lambda x, blocks, scale, **backend: coarse_fine_attn(
        x, x, x, x, x, q_blocks=blocks, kv_blocks=blocks, topk=1, scale=scale, **backend
    ),
    "coarse": lambda x, blocks, scale: coarse_attn(x, x, x, q_blocks=blocks, kv_blocks=blocks, scale=scale),
    "skipping": skip,
    "gathered": gathered,
    "mean_scores": lambda x, blocks, scale, **backend: mean_scores(x, x, scale=scale, **backend),
    "tile_mass": lambda x, blocks, scale: tile_mass(x, x, torch.arange(6), blocks, scale),
}


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, 1e300])
def test_a_scale_that_is_not_finite(name, scale, device):
    """`gather` made finite numbers of a NaN: it came out of the softmax as a row of zeros."""
    blocks, x = Blocks.from_sizes([4, 2], device), torch.randn(2, 6, 2, 16, device=device)
    named = backends(device) if name in ("block_sparse", "coarse_fine") else ("reference",)
    for backend in [{}] if name in ("coarse", "tile_mass") else [{"backend": backend} for backend in named]:
        for good in (None, 0.0, 2.0):
            SCALED[name](x, blocks, good, **backend)
        with pytest.raises(ValueError, match=f"scale must be finite, got {re.escape(str(scale))}"):
            SCALED[name](x, blocks, scale, **backend)


def offsets(change: Callable[[Tensor], Tensor]) -> Callable[[Blocks], Blocks]:
    return lambda blocks: replace(blocks, offsets=change(blocks.offsets))


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.__name__)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (offsets(Tensor.long), r"blocks.offsets must be int32 \[N \+ 1\], got torch.int64 \[3\]"),
        (offsets(lambda x: x[None]), r"blocks.offsets must be int32 \[N \+ 1\], got torch.int32 \[1, 3\]"),
        (offsets(lambda x: x.to("meta")), "blocks.offsets must be on .* like [qkx], got meta"),
    ],
    ids=["dtype", "shape", "device"],
)
def test_offsets(op, change, message, device):
    blocks = Blocks.from_sizes([4, 2], device)
    x = torch.randn(2, 6, 2, 16, device=device)
    op(x, x, blocks, blocks)
    with pytest.raises(ValueError, match=message):
        op(x, x, change(blocks), blocks)
    with pytest.raises(ValueError, match=message):
        op(x, x, blocks, change(blocks))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topk": torch.ones(3, dtype=torch.int64)}, r"topk must be an int or an int32 tensor \[3\], got torch.int64"),
        ({"topk": torch.ones(3, dtype=torch.int32, device="meta")}, "topk must be on .* like scores, got meta"),
        ({"candidates": torch.ones(3, 5, dtype=torch.bool, device="meta")}, "candidates must be on .* like scores"),
        ({"always": torch.ones(3, 5, dtype=torch.bool, device="meta")}, "always must be on .* like scores"),
    ],
    ids=["topk dtype", "topk", "candidates", "always"],
)
def test_selection_arguments(arguments, message, device):
    with pytest.raises(ValueError, match=message):
        select_topk(torch.zeros(1, 1, 3, 5, device=device), **{"topk": 1, **arguments})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kv_valid", "kv_valid must be int32, got torch.int64"),
        ("kv_num_full_blocks", "kv_num_full_blocks must be int32, got torch.int64"),
        ("mask_ids", "mask_ids must be int32, got torch.int64"),
        ("mask_bits", r"mask_bits must be bool \[M, 2, 2\], got torch.int64"),
    ],
)
def test_dtypes_of_index_tensors(name, message, device):
    x = torch.randn(1, 4, 1, 16, device=device)
    blocks = Blocks.from_sizes([2, 2], device)
    index = BlockIndex.from_dense(torch.ones(1, 1, 2, 2, dtype=torch.bool, device=device))
    fine = {
        "kv_num_full_blocks": index.kv_num_blocks,
        "mask_ids": torch.zeros_like(index.kv_indices),
        "mask_bits": torch.ones(1, 2, 2, dtype=torch.bool, device=device),
    }
    valid = torch.full((1, 2), 2, dtype=torch.int32, device=device)
    sides = {"q_blocks": blocks, "kv_blocks": blocks, "backend": "reference"}
    block_sparse_attn(x, x, x, replace(index, **fine), kv_valid=valid, **sides)
    if name == "kv_valid":
        valid = valid.long()
    else:
        fine[name] = fine[name].long()
    with pytest.raises(ValueError, match=message):
        block_sparse_attn(x, x, x, replace(index, **fine), kv_valid=valid, **sides)


def wrong_values(x: Any) -> list[Any]:
    """Values of other types than an argument's."""
    if isinstance(x, Tensor):
        return [x.detach().numpy(), x.tolist(), 2.5]
    if isinstance(x, bool):
        return [1, "yes"]
    if isinstance(x, int):
        return [2.5, True, str(x), [x]]
    if isinstance(x, float):
        return [str(x), [x], True]
    if isinstance(x, tuple):
        return [tuple(y.detach().numpy() if isinstance(y, Tensor) else y for y in x), x[0].detach().numpy(), "places"]
    return [3, {"offsets": [0, 1]}, [x]]


@pytest.mark.parametrize("name", OPERATORS)
def test_arguments_of_other_types_are_refused_in_one_line(name):
    case, operator = make_case([5, 3], [4, 7], batch=2, heads=2, head_dim=8, kv_valid=True), OPERATORS[name]
    function = getattr(vsa_kernels, name)
    *_, call = operator.cases(case)
    own = {**dict(zip(inspect.signature(function).parameters, call.inputs, strict=False)), **call.options}
    function(**own, backend="reference")
    assert len(own) > 1
    for argument, x in own.items():
        for wrong in wrong_values(x) if x is not None else ():
            with pytest.raises(ValueError, match=rf"^{argument} must be [^\n]+, got [^\n]+$"):
                function(**{**own, argument: wrong}, backend="reference")


def test_values_of_other_types_are_refused_in_one_line():
    """The control, and what is no argument of an operator."""
    lists = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
    index: dict[str, Any] = {"kv_indices": lists, "kv_num_blocks": lists[..., 0]}
    assert BlockIndex(**index)
    for name, x in index.items():
        with pytest.raises(ValueError, match=f"^{name} must be a Tensor, got ndarray$"):
            BlockIndex(**{**index, name: x.numpy()})
    assert Blocks.from_sizes([2, 1]).num == 2
    for sizes in ([2.5, 1], [0, 1], [-1, 2], [], [math.inf], [math.nan], ["x"], [None], 4, torch.ones(2, 2)):
        with pytest.raises(ValueError, match=r"^expected at least one block and positive block sizes in whole [^\n]+$"):
            Blocks.from_sizes(sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^outs must be Sequence\[Tensor\], got ndarray$"):
        merge_attn([torch.zeros(1, 2, 3, 4).numpy()], [torch.zeros(1, 3, 2)])  # type: ignore[list-item]
    with pytest.raises(ValueError, match=r"^limit must be int, got float$"):
        set_workspace_limit(1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^scale must be finite, got nan$"):
        mean_scores(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), scale=math.nan)


def test_numbers_of_other_libraries_are_numbers():
    x, scores = torch.randn(1, 2, 1, 4), torch.randn(1, 1, 2, 2)
    # the control: another scale is another result
    assert not torch.equal(mean_scores(x, x, scale=0.25), mean_scores(x, x, scale=0.5))
    halves: list[Any] = [np.float32(0.5), np.float64(0.5), torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)]
    ones: list[Any] = [np.int64(1), np.int32(1)]
    for scale in halves:
        assert torch.equal(mean_scores(x, x, scale=scale), mean_scores(x, x, scale=0.5))
    for topk in ones:
        assert torch.equal(select_topk(scores, topk).kv_indices, select_topk(scores, 1).kv_indices)
    for scale in (np.bool_(True), torch.tensor(True), torch.tensor([0.5]), np.array(0.5), 0.5j):
        with pytest.raises(ValueError, match=rf"^scale must be float \| None, got {type(scale).__name__}$"):
            mean_scores(x, x, scale=scale)  # type: ignore[arg-type]
    for topk in (np.bool_(True), np.float32(1)):
        with pytest.raises(ValueError, match=rf"^topk must be int \| Tensor, got {type(topk).__name__}$"):
            select_topk(scores, topk)  # type: ignore[arg-type]
