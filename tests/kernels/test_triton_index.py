"""The transposed index against the columns of the dense mask."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.interpreted import further, fuzz, poisoned_outputs  # noqa: F401 (the fixture)

POISON = 1 << 30

ANY_MASK = (
    st.integers(1, 2), st.integers(1, 2), st.integers(1, 70), st.integers(1, 70), st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.integers(0, 3), st.booleans(), st.integers(0, 99),
)  # fmt: skip


def transpose(lists, counts, num_kv, device, **masked):
    # triton is imported by those tests only that run
    from vsa_kernels.block_sparse import triton_index

    masked = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in masked.items()}
    return triton_index.transpose(lists.to(device), counts.to(device), num_kv, **masked)


def lists_of(mask, spare=0, shuffled=False):
    """Lists and counts of a bool mask `[B, H, Nq, Nkv]`, what is not listed is far out of range."""
    counts = mask.sum(-1, dtype=torch.int32)
    lists = torch.full((*mask.shape[:3], int(counts.max()) + spare), POISON, dtype=torch.int32)
    for row in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape[:3])).view(-1, 3).tolist():
        columns = mask[tuple(row)].nonzero().squeeze(-1).int()
        if shuffled:
            columns = columns[torch.randperm(len(columns))]
        lists[tuple(row)][: len(columns)] = columns
    return lists, counts


def assert_transposed(index, mask):
    B, H, _, Nkv = mask.shape
    offsets, rows = index.row_offsets.cpu(), index.rows.cpu()
    assert offsets.dtype == rows.dtype == torch.int32
    assert offsets.shape == (B, H, Nkv + 1)
    starts = torch.zeros(B, H, Nkv + 1, dtype=torch.int32)
    starts[..., 1:] = mask.sum(2).cumsum(-1)
    assert torch.equal(offsets, starts)
    for b in range(B):
        for h in range(H):
            # the columns one after the other, each ascending
            expected = mask[b, h].T.nonzero()[:, 1].int()
            assert torch.equal(rows[b, h, : len(expected)], expected)


@fuzz(5, 15)
@given(*ANY_MASK)
def test_any_mask(triton_device, batch, heads, num_q, num_kv, density, spare, shuffled, seed):
    torch.manual_seed(seed)
    mask = torch.rand(batch, heads, num_q, num_kv) < density
    lists, counts = lists_of(mask, spare + 1, shuffled)
    index = transpose(lists, counts, num_kv, triton_device)
    assert index.rows.shape == (batch, heads, num_q * lists.shape[-1])
    assert_transposed(index, mask)


@fuzz(5, 15)
@given(*ANY_MASK)
def test_places_of_entries(triton_device, batch, heads, num_q, num_kv, density, spare, shuffled, seed):
    torch.manual_seed(seed)
    mask = torch.rand(batch, heads, num_q, num_kv) < density
    lists, counts = lists_of(mask, spare + 1, shuffled)
    index = transpose(lists, counts, num_kv, triton_device, places=True)
    assert_transposed(index, mask)
    offsets, rows, places = (x.cpu() for x in index)
    for b, h, n in torch.cartesian_prod(*(torch.arange(s) for s in (batch, heads, num_kv))).view(-1, 3).tolist():
        at = slice(*offsets[b, h, n : n + 2].tolist())
        assert (lists[b, h, rows[b, h, at].long(), places[b, h, at].long()] == n).all()


test_further_masks = pytest.mark.slow(fuzz(15, 15)(given(*ANY_MASK)(test_any_mask.hypothesis.inner_test)))


@fuzz(5, 15)
@given(*ANY_MASK)
def test_the_masked_part_with_its_ids(triton_device, batch, heads, num_q, num_kv, density, spare, shuffled, seed):
    torch.manual_seed(seed)
    mask = torch.rand(batch, heads, num_q, num_kv) < density
    lists, counts = lists_of(mask, spare + 1, shuffled)
    first = (torch.rand(counts.shape) * (counts + 1)).int()
    ids = torch.full_like(lists, POISON)
    expected = torch.full((batch, heads, num_kv, num_q), -1, dtype=torch.int32)
    for row in torch.cartesian_prod(*(torch.arange(n) for n in mask.shape[:3])).view(-1, 3).tolist():
        b, h, n = row
        full, count = int(first[b, h, n]), int(counts[b, h, n])
        ids[b, h, n, full:count] = torch.randint(0, 1 << 20, (count - full,), dtype=torch.int32)
        mask[b, h, n, lists[b, h, n, :full].long()] = False
        expected[b, h, lists[b, h, n, full:count].long(), n] = ids[b, h, n, full:count]
    index = transpose(lists, counts, num_kv, triton_device, first=first, mask_ids=ids)
    assert_transposed(index, mask)
    assert index.ids.shape == index.rows.shape
    for b in range(batch):
        for h in range(heads):
            # column after column, each in the order of its rows
            expected_ids = expected[b, h][mask[b, h].T]
            assert torch.equal(index.ids[b, h, : len(expected_ids)].cpu(), expected_ids)


@pytest.mark.parametrize(("num_q", "num_kv"), [(32, 32), (33, 300), (257, 31), further(130, 260)])
def test_rows_of_different_length(triton_device, num_q, num_kv):
    # empty rows, full rows, empty columns, columns that every row lists, equal rows
    mask = torch.rand(1, 2, num_q, num_kv) < torch.rand(1, 2, num_q, 1) * 0.3
    mask[:, :, ::5] = False
    mask[:, 0, 3] = True
    mask[..., 2] = False
    mask[..., 7] = True
    mask[:, 1, 9] = mask[:, 1, 8]
    assert_transposed(transpose(*lists_of(mask), num_kv, triton_device), mask)


def test_words_hold_their_last_row(triton_device):
    # only rows 31 and 63: the sign bit of a word
    mask = torch.zeros(1, 1, 64, 5, dtype=torch.bool)
    mask[0, 0, 31, [0, 3]] = True
    mask[0, 0, 63, [3, 4]] = True
    assert_transposed(transpose(*lists_of(mask), 5, triton_device), mask)


def test_expanded_and_strided_lists(triton_device):
    mask = torch.rand(1, 1, 40, 20) < 0.4
    lists, counts = lists_of(mask)
    wide = torch.full((1, 40, 1, 64), POISON, dtype=torch.int32)
    view = wide.transpose(1, 2)[..., : lists.shape[-1]]
    view.copy_(lists)
    assert_transposed(transpose(view, counts, 20, triton_device), mask)
    both = (lists.expand(2, 3, -1, -1), counts.expand(2, 3, -1))
    assert_transposed(transpose(*both, 20, triton_device), mask.expand(2, 3, -1, -1))


def test_a_lost_entry_is_seen():
    mask = torch.rand(1, 1, 6, 5) < 0.5
    mask[0, 0, 0, 0] = True

    class Index:
        row_offsets = torch.zeros(1, 1, 6, dtype=torch.int32)
        rows = mask[0, 0].T.nonzero()[:, 1].int().view(1, 1, -1)

    Index.row_offsets[..., 1:] = mask.sum(2).cumsum(-1)
    assert_transposed(Index, mask)
    Index.rows = Index.rows.roll(1)
    Index.rows[..., 0] = 77
    with pytest.raises(AssertionError):
        assert_transposed(Index, mask)


def assert_long_first(order, lengths):
    """Every block once; those of more than 1.5 times the mean length first, each class in the order of the blocks."""
    order, lengths = order.cpu().long(), lengths.flatten()
    long = 2 * len(lengths) * lengths > 3 * lengths.sum()
    assert torch.equal(order.sort().values, torch.arange(len(lengths)))
    assert torch.equal(order, torch.cat([long.nonzero(), (~long).nonzero()]).squeeze(-1))


@pytest.mark.parametrize(
    ("batch", "heads", "group", "num_kv", "shared", "fine", "sinks"),
    [
        # several programs, and as many blocks as one takes
        (2, 6, 2, 700, (), True, 4),
        (2, 4, 1, 256, (), False, 4),
        # one index for all batches, heads, or both
        (2, 4, 2, 50, (0,), False, 1),
        (3, 4, 1, 50, (1,), True, 1),
        (2, 3, 1, 20, (0, 1), False, 1),
        (1, 1, 1, 1, (), False, 0),
        # no entry at all
        (1, 2, 1, 9, (), True, None),
    ],
)
def test_long_lists_come_first(triton_device, batch, heads, group, num_kv, shared, fine, sinks):
    from vsa_kernels.block_sparse.triton_index import TransposedIndex, long_first

    g = torch.Generator().manual_seed(0)
    size = [1 if d in shared else n for d, n in enumerate((batch, heads))]
    parts, lengths = [], torch.zeros(batch, heads, num_kv, dtype=torch.long)
    for _ in range(1 + fine):
        counts = torch.randint(0, 1 if sinks is None else 30, (*size, num_kv), generator=g)
        if sinks:
            counts.scatter_(-1, torch.rand(*size, num_kv, generator=g).topk(sinks).indices, 100)
        offsets = torch.zeros(*size, num_kv + 1, dtype=torch.int32)
        offsets[..., 1:] = counts.cumsum(-1)
        parts.append(TransposedIndex(row_offsets=offsets.to(triton_device), rows=offsets, ids=None))
        lengths += counts
    order = long_first(parts[0], parts[1] if fine else None, batch, heads, group)
    lengths = lengths.unflatten(1, (-1, group)).sum(2)
    assert_long_first(order, lengths)
    if sinks:
        # control: the natural order, and one that names a block twice
        for wrong in (torch.arange(len(order)), torch.cat([order[:1].cpu(), order[:-1].cpu()])):
            with pytest.raises(AssertionError):
                assert_long_first(wrong, lengths)


@pytest.mark.parametrize(("num", "topk", "heads"), [(1200, 120, 40), (4096, 512, 2)])
def test_large_and_repeatable(triton_device, num, topk, heads):
    if triton_device.type == "cpu":
        pytest.skip("too large for the interpreter")
    scores = torch.rand(1, heads, num, num, device=triton_device)
    lists = scores.topk(topk, dim=-1).indices.int().sort(-1).values
    lists = torch.nn.functional.pad(lists, (0, 8), value=POISON)
    counts = torch.full(lists.shape[:3], topk, dtype=torch.int32, device=triton_device)
    mask = torch.zeros(1, heads, num, num, dtype=torch.bool, device=triton_device)
    mask.scatter_(-1, lists[..., :topk].long(), True)
    first = transpose(lists, counts, num, triton_device)
    assert_transposed(first, mask.cpu())
    lengths = heads * [num * topk]
    for _ in range(50):
        again = transpose(lists, counts, num, triton_device)
        assert torch.equal(again.row_offsets, first.row_offsets)
        for h, n in enumerate(lengths):
            assert torch.equal(again.rows[0, h, :n], first.rows[0, h, :n])
