from __future__ import annotations

from types import SimpleNamespace

import pytest

from vsa.data.batch_stream import RankSlice
from vsa.data.parallel_dims import ParallelDims, dims_of


@pytest.mark.parametrize(
    ("strategy", "ranks", "replicate", "shard"),
    [
        ("auto", 1, 1, 1),
        ("auto", 6, 1, 6),
        ({"reduce_each": True}, 6, 1, 6),
        ({"replicate": 3}, 6, 3, 2),
        ({"replicate": "all"}, 6, 6, 1),
    ],
)
def test_settings_divide_the_ranks(strategy, ranks, replicate, shard):
    dims = ParallelDims.of_settings(strategy, ranks)
    assert (dims.replicate, dims.shard, dims.ranks, dims.data_size) == (replicate, shard, ranks, ranks)
    assert [dims.data_rank(rank) for rank in range(ranks)] == list(range(ranks))


def test_copies_and_groups_that_do_not_divide_the_ranks_are_refused():
    with pytest.raises(ValueError, match=r"trainer\.strategy\.replicate=4 must divide the 6 ranks"):
        ParallelDims.of_settings({"replicate": 4}, 6)
    with pytest.raises(ValueError, match=r"task\.parallel\.sequence=4 must divide the number of ranks, which is 6"):
        ParallelDims.of_settings("auto", 6, 4)


@pytest.mark.parametrize("per_sample", [1, 2, 3, 6])
def test_ranks_that_share_samples_read_the_same_slots(per_sample):
    dims = ParallelDims.of_settings({"replicate": 2}, 6, per_sample)
    assert dims == ParallelDims(replicate=2, shard=3, sequence=per_sample)
    assert dims.micro_batch(24, 2) == 24 // (2 * 6 // per_sample)
    slots = [
        [list(RankSlice(accumulate=2, rank=dims.data_rank(rank), world=dims.data_size).slots(24, m)) for m in range(2)]
        for rank in range(dims.ranks)
    ]
    for rank, own in enumerate(slots):
        assert own == slots[rank - rank % per_sample]
    # one rank of each group reads every slot once
    assert sorted(slot for own in slots[::per_sample] for part in own for slot in part) == list(range(24))


def test_a_step_that_cannot_be_divided_is_refused():
    with pytest.raises(ValueError, match=r"data\.batch_size=9 must be a multiple of the 4 .*batches=2 times 2 ranks\)"):
        ParallelDims(shard=2).micro_batch(9, 2)


def test_a_strategy_without_dims_shards_over_all_ranks():
    trainer = SimpleNamespace(world_size=3, strategy=SimpleNamespace())
    assert dims_of(trainer) == ParallelDims(shard=3)
    trainer.strategy.dims = ParallelDims(replicate=3)
    assert dims_of(trainer) == ParallelDims(replicate=3)
