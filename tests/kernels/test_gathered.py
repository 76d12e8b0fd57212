"""Gathered attention against masked attention in fp64, and grouping in the kernel against the same in torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from vsa_kernels import BlockIndex, TileGroups, gathered_attn, group_tiles, longest_first
from vsa_kernels.gathered.op import gathered_fwd, group_tiles_op
from vsa_kernels.gathered.triton_group import pack_bits
from vsa_kernels.testing import Case, assert_within_budget, define, index_of, make_case, run, summed_terms

from tests.kernels.interpreted import further

_POISON = 1 << 30


@pytest.fixture(params=["reference", "triton"])
def backend(request) -> str:
    return request.param


@pytest.fixture
def device(backend, request) -> torch.device:
    return torch.device("cpu") if backend == "reference" else request.getfixturevalue("triton_device")


class Gathered(NamedTuple):
    """A case whose index spells out what groups of scattered tiles attend to."""

    case: Case
    groups: TileGroups

    def attend(self, backend: str, **how: Any) -> tuple[Tensor, Tensor]:
        case = self.case
        return gathered_attn(case.q, case.k, case.v, self.groups, **case.blocks, backend=backend, **how)


def gathered(
    q_sizes: list[int], kv_sizes: list[int], size: int, device: torch.device, *,
    tilewise: bool = False, density: float = 0.5, seed: int = 0, **shape: Any,
) -> Gathered:  # fmt: skip
    """Random groups; what they attend to is written tile by tile."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    case = make_case(q_sizes, kv_sizes, density=density, dtype=dtype, seed=seed, **shape)
    g = torch.Generator().manual_seed(seed + 1)
    batch, _, heads, _ = case.q.shape
    num_q, num_kv = len(q_sizes), len(kv_sizes)
    rows = (batch, heads, -(-num_q // size))
    members = torch.full((*rows, size), -1, dtype=torch.int32)
    lists, bits = (torch.full((*rows, num_kv), _POISON, dtype=torch.int32) for _ in range(2))
    counts = torch.zeros(rows, dtype=torch.int32)
    mask = torch.zeros(batch, heads, num_q, num_kv, dtype=torch.bool)
    for b in range(batch):
        for h in range(heads):
            permutation = torch.randperm(num_q, generator=g)
            for n, tiles in enumerate(permutation.split(size)):
                choices = (torch.rand(len(tiles), num_kv, generator=g) < density).int()
                columns = [j for j in range(num_kv) if choices[:, j].any()]
                members[b, h, n, : len(tiles)] = tiles.int()
                lists[b, h, n, : len(columns)] = torch.tensor(columns, dtype=torch.int32)
                counts[b, h, n] = len(columns)
                for at, j in enumerate(columns):
                    bits[b, h, n, at] = sum(int(choices[r, j]) << r for r in range(len(tiles)))
                    for r, tile in enumerate(tiles):
                        mask[b, h, tile, j] = bool(choices[r, j]) if tilewise else True
    groups = TileGroups(
        members=members, kv_indices=lists, kv_num_blocks=counts, kv_members=bits if tilewise else None,
        order=torch.randperm(counts.numel(), generator=g).int(),
    )  # fmt: skip
    case = replace(case, index=index_of(mask, None, max(q_sizes), max(kv_sizes), g))
    return Gathered(*(_on(device, part) for part in (case, groups)))


def _on(device: torch.device, x: Any) -> Any:
    fields = {
        name: value.to(device) if isinstance(value, Tensor) else _on(device, value)
        for name, value in vars(x).items()
        if isinstance(value, Tensor) or hasattr(value, "__dataclass_fields__")
    }
    return replace(x, **fields)


def check(problem: Gathered, got: tuple[Tensor, Tensor]) -> None:
    exact, plain, terms = define(problem.case), run(problem.case, "reference"), summed_terms(problem.case)
    for name, x in zip(("out", "lse"), got, strict=True):
        assert_within_budget(x, plain[name], exact[name], name, terms[name])


SIZES = [
    # whole tiles, some groups with fewer members than places
    ([16] * 5, [16] * 4, 4),
    # the last tiles are short
    ([16] * 4 + [9], [32, 32, 32, 5], 2),
    # single keys, and more of them than one step takes
    ([16] * 3, [1] * 70, 2),
    # short tiles in the middle, and a size that is no power of two
    ([8, 3, 8, 8], [6, 2, 6, 6, 1], 3),
    # a tile of several steps
    ([32, 20], [100, 30], 1),
]


# each of them in one way where kernels are interpreted
ONE_WAY = [further(*sizes, i % 2 == 0) for i, sizes in enumerate(SIZES)]


@pytest.mark.parametrize(
    ("q_sizes", "kv_sizes", "size", "tilewise"), [*((*s, i % 2 == 1) for i, s in enumerate(SIZES)), *ONE_WAY]
)
def test_gathered_attention(q_sizes, kv_sizes, size, tilewise, backend, device):
    problem = gathered(q_sizes, kv_sizes, size, device, tilewise=tilewise, heads=2, kv_heads=1, head_dim=16)
    actual = problem.attend(backend)
    check(problem, actual)
    # the order changes no result
    plain = problem._replace(groups=replace(problem.groups, order=None))
    assert all(torch.equal(a, b) for a, b in zip(actual, plain.attend(backend), strict=True))


@pytest.mark.parametrize(("head_dim", "batch"), [(20, 2), further(128, 1)])
def test_gathered_heads_of_any_size(head_dim, batch, backend, device):
    problem = gathered([16, 16, 7], [16, 16, 11], 2, device, head_dim=head_dim, batch=batch, density=0.8)
    check(problem, problem.attend(backend))


@pytest.mark.gpu
@pytest.mark.parametrize("tilewise", [False, True], ids=["union", "tile"])
@pytest.mark.parametrize("tokens", [(128, 32), (64, 64), (32, 128), (16, 16), (16, 1)], ids=str)
def test_gathered_attention_at_real_sizes(tokens, tilewise):
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    q_tokens, kv_tokens = tokens
    sizes = [[n] * (1000 // n) + [1000 % n] if 1000 % n else [n] * (1000 // n) for n in (q_tokens, kv_tokens)]
    shape: dict[str, Any] = {"batch": 2, "heads": 4, "kv_heads": 2, "head_dim": 128, "density": 0.3}
    problem = gathered(*sizes, 128 // q_tokens, torch.device("cuda"), tilewise=tilewise, **shape)
    from vsa_kernels.gathered import hopper_fwd

    with mock.patch.object(hopper_fwd, "launch", wraps=hopper_fwd.launch) as launch:
        check(problem, problem.attend("triton"))
    # the Hopper kernel copies whole rows of 16 tokens or more
    on_hopper = torch.cuda.get_device_capability() == (9, 0)
    assert launch.call_count == int(on_hopper and kv_tokens >= 16)


@pytest.mark.parametrize("damage", ["entry", "bit", further("member"), further("scale")])
def test_gathered_damage_is_noticed(damage, backend, device):
    problem = gathered([16] * 4, [16] * 4, 2, device, tilewise=True, density=0.7, head_dim=16, seed=2)
    groups, how = problem.groups, {}
    if damage == "entry":
        groups = replace(groups, kv_num_blocks=groups.kv_num_blocks - 1)
    elif damage == "member":
        groups = replace(groups, members=groups.members.flip(-1))
    elif damage == "bit":
        groups = replace(groups, kv_members=groups.kv_members ^ 1)
    else:
        how = {"scale": 0.3}
    with pytest.raises(AssertionError):
        check(problem, problem._replace(groups=groups).attend(backend, **how))


def test_gathered_rows_without_tiles(backend, device):
    problem = gathered([16, 10], [16, 5], 2, device, density=0.0)
    out, lse = problem.attend(backend)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


@pytest.mark.parametrize("tilewise", [False, further(True)], ids=["union", "tile"])
def test_triton_nan_stays_in_what_lists_its_tile(tilewise, triton_device):
    # tiles of 7 in packed tiles of keys: the places behind a short one hold nothing of its neighbour
    problem = gathered([16] * 4, [7, 7, 4, 7, 2], 1, triton_device, tilewise=tilewise, head_dim=16, seed=1)
    clean = problem.attend("triton")
    case = problem.case
    k, v = case.k.clone(), case.v.clone()
    k[:, 14:18], v[:, 14:18] = torch.nan, torch.nan
    actual = problem._replace(case=replace(case, k=k, v=v)).attend("triton")
    lists = case.index.to_dense(5)[0, 0, :, 2].repeat_interleave(16)
    assert lists.any()
    assert not lists.all()
    assert torch.equal(actual[0][0][~lists], clean[0][0][~lists])
    assert actual[0][0][lists].isnan().all()


def test_gathered_views_are_read_right(backend, device):
    problem = gathered([16] * 2, [16] * 2, 2, device, tilewise=True, heads=2, kv_heads=2)
    expected = problem.attend(backend)
    case, groups = problem.case, problem.groups
    views = {
        "q": case.q.transpose(1, 2).contiguous().transpose(1, 2),
        "k": torch.cat([case.k, case.k], -1)[..., : case.k.shape[-1]],
        "v": case.v.transpose(1, 3).contiguous().transpose(1, 3),
    }
    wide = {name: torch.stack([x, x], -1)[..., 0] for name, x in vars(groups).items()}
    actual = Gathered(replace(case, **views), TileGroups(**wide)).attend(backend)
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize(
    ("num_q", "num_kv", "size"),
    [(5, 33, 2), (7, 9, 8), *(further(*n) for n in ((1, 1, 4), (17, 70, 4), (24, 9, 8), (7, 64, 1)))],
)
def test_triton_groups_as_torch_does(num_q, num_kv, size, triton_device):
    g = torch.Generator().manual_seed(num_q)
    mask = torch.rand(2, 1, num_q, num_kv, generator=g) < 0.4
    # many equal distances
    mask[1] = mask[1, :, :1] ^ (torch.rand(1, num_q, num_kv, generator=g) < 1 / num_kv)
    expected = group_tiles(mask, size, backend="reference")
    actual = group_tiles(mask.to(triton_device), size, backend="triton")
    assert torch.equal(actual.cpu(), expected)


def test_bits_are_packed_in_order():
    mask = torch.rand(3, 2, 70) < 0.5
    words = pack_bits(mask)
    assert words.shape == (3, 2, 3)
    for word in range(3):
        for bit in range(32):
            at = 32 * word + bit
            expected = mask[..., at] if at < 70 else torch.zeros(3, 2, dtype=torch.bool)
            assert torch.equal((words[..., word] >> bit & 1).bool(), expected)


def test_longest_groups_start_first():
    counts = torch.tensor([[[3, 80, 41], [79, 0, 42]]], dtype=torch.int32)
    # eighths of 81: 0, 7, 4, 7, 0, 4; equal ones stay in order
    assert longest_first(counts).tolist() == [1, 3, 2, 5, 0, 4]
    assert longest_first(torch.zeros(1, 2, 2, dtype=torch.int32)).tolist() == [0, 1, 2, 3]


def test_gathered_ops_are_registered_right():
    problem = gathered([3, 3, 2], [4, 1, 4], 2, torch.device("cpu"), tilewise=True, heads=2)
    case, groups = problem.case, problem.groups
    sides = (x for b in case.blocks.values() for x in (b.offsets, b.max_size, b.min_size))
    args = (case.q, case.k, case.v, *vars(groups).values(), *sides, 0.3, "reference")
    # what a compiled graph makes of them is test_fine_grained.py's
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(gathered_fwd, args, test_utils=checks)
    torch.library.opcheck(group_tiles_op, (torch.rand(2, 1, 5, 7) < 0.5, 2, "reference"), test_utils=checks)
    with FlopCounterMode(display=False) as counter:
        problem.attend("reference")
    # 8 queries and two heads of 16 on all 9 keys: the lists have room for all tiles
    assert counter.get_total_flops() == 4 * 2 * 8 * 16 * 9


def bad_groups(change):
    problem = gathered([3, 3], [4, 4], 2, torch.device("cpu"))
    return problem._replace(groups=replace(problem.groups, **change(problem.groups)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: {"members": g.members[0]}, r"members must be \[B, H, G, R\] for q .*, got \[1, 1, 2\]"),
        (
            lambda g: {"kv_indices": g.kv_indices[:, :, :0]},
            r"kv_indices must be .* \[1, 1, 1, 2\], got \[1, 1, 0, 2\]",
        ),
        (lambda g: {"kv_num_blocks": g.kv_num_blocks.long()}, "kv_num_blocks must be int32, got torch.int64"),
        (lambda g: {"kv_members": g.members[..., :1]}, r"kv_members must be \[1, 1, 1, 2\] of groups of at most 31"),
        (lambda g: {"order": torch.zeros(2, dtype=torch.int32)}, r"order must be \[1\], one entry a group, got \[2\]"),
    ],
)
def test_bad_groups_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        bad_groups(change).attend("reference")


def test_gathered_attention_refuses_what_it_cannot_do():
    problem = gathered([3, 3], [4, 4], 2, torch.device("cpu"))
    wants = problem._replace(case=replace(problem.case, q=problem.case.q.clone().requires_grad_()))
    with pytest.raises(ValueError, match="gathered_attn has no gradient: use block_sparse_attn"):
        wants.attend("reference")
    with torch.no_grad():
        wants.attend("reference")
    with pytest.raises(ValueError, match="backend must be reference, triton or None"):
        problem.attend("gather")
    with pytest.raises(ValueError, match=r"mask must be a bool \[B, H, Nq, Nkv\], got torch.float32"):
        group_tiles(torch.rand(1, 1, 2, 2), 2)
    with pytest.raises(ValueError, match="size must be at least 1, got 0"):
        group_tiles(torch.rand(1, 1, 2, 2) < 1, 0)


def test_groups_say_what_tiles_see():
    problem = gathered([16] * 5, [16] * 6, 2, torch.device("cpu"), heads=2)
    index = problem.groups.tile_index(5, 6)
    assert isinstance(index, BlockIndex)
    assert torch.equal(index.to_dense(6), problem.case.index.to_dense(6))
