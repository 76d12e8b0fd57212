"""Rows about operators on the CPU: compared with dense fp64 attention, and with themselves in other layouts."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vsa_kernels import BlockIndex, block_sparse_attn, select_topk
from vsa_kernels.testing import (
    Case,
    assert_right,
    assert_within_budget,
    define,
    expand_mask,
    index_of,
    make_case,
    run,
    summed_terms,
)

from tests.kernels import test_coarse_fine as operator
from tests.kernels.test_selection import expected as sorted_columns
from tests.kernels.test_selection import lists

BACKENDS = ("reference", "gather")
DIMS = (8, 16, 24, 64, 80, 128, 256)


def problem(seed: int, dtype: torch.dtype, *, most: int = 24, dims: tuple[int, ...] = DIMS, empty: bool = True) -> Case:
    """A random case of blocks with at most `most` tokens; with `empty`, lists may be empty."""
    rng = random.Random(seed)
    kv_heads, q_sizes, kv_sizes = rng.choice((1, 2)), _sizes(rng, most), _sizes(rng, most)
    heads = {"heads": rng.choice((1, 2, 3)) * kv_heads, "kv_heads": kv_heads, "head_dim": rng.choice(dims)}
    density = rng.random()
    case = make_case(q_sizes, kv_sizes, batch=rng.choice((1, 2)), **heads, density=density, dtype=dtype, seed=seed)
    listed = case.index.to_dense(len(kv_sizes))
    if not empty:
        listed[..., 0] |= ~listed.any(-1)
    return with_lists(case, listed)


def _sizes(rng: random.Random, most: int) -> list[int]:
    return [rng.randint(1, most) for _ in range(rng.randint(1, 5))]


def with_lists(case: Case, listed: Tensor) -> Case:
    """A case with the lists of a bool block mask `[B, H, Nq, Nkv]`."""
    return replace(case, index=index_of(listed, None, 0, 0, torch.Generator()))


def test_the_plain_formula_on_numbers_worked_out_by_hand():
    # weights 1/4 and 3/4 of values 4 and 8; the second query sees the second key, the third none
    q = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64).view(1, 3, 1, 1)
    k, v = (torch.tensor(x, dtype=torch.float64).view(1, 2, 1, 1) for x in ([0.0, math.log(3)], [4.0, 8.0]))
    case = make_case([1, 1, 1], [1, 1], head_dim=1, dtype=torch.float64)
    listed = torch.tensor([[True, True], [False, True], [False, False]])[None, None]
    results = define(with_lists(replace(case, q=q, k=k, v=v, scale=1.0), listed))
    torch.testing.assert_close(results["out"].flatten(), torch.tensor([7.0, 8.0, 0.0], dtype=torch.float64))
    expected = torch.tensor([math.log(4), 5 * math.log(3), -math.inf], dtype=torch.float64)
    torch.testing.assert_close(results["lse"].flatten(), expected)


def assert_solved(case: Case, results: dict[str, Tensor]) -> None:
    """Results have the error of the plain formula in their dtype; in fp64, which has none of its own, 1e-14."""
    if case.q.dtype != torch.float64:
        assert_right(case, results)
        return
    exact, terms = define(case), summed_terms(case)
    share = 100 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    for name, x in results.items():
        assert_within_budget(x, exact[name], exact[name], name, share * terms[name])


@pytest.mark.soak("block-sparse attention against fp64", attempts=180, short=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_every_backend_solves_random_problems(attempt, dtype):
    case = problem(attempt, dtype)
    for backend in BACKENDS:
        assert_solved(case, run(case, backend))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_wrong_results_are_noticed(dtype):
    case = problem(7, dtype, empty=False)
    right, listed = run(case, "gather"), case.index.to_dense(case.kv_blocks.num)
    assert_solved(case, right)
    # one block of one row is forgotten
    listed[0, 0, 0, listed[0, 0, 0].nonzero()[0]] = False
    nan = right["dk"].clone()
    nan[0, 0, 0, 0] = torch.nan
    wrong = [run(with_lists(case, listed), "gather"), {**right, "dk": nan}]
    for results in (*wrong, *({**right, name: x * 1.2} for name, x in right.items())):
        with pytest.raises(AssertionError):
            assert_solved(case, results)


@pytest.mark.soak("the operator with its gates against fp64", attempts=60, short=3)
def test_the_operator_of_random_problems(attempt):
    rng = random.Random(attempt)
    q_sizes, kv_sizes, kv_heads = _sizes(rng, 24), _sizes(rng, 24), rng.choice((1, 2))
    heads, topk = {"heads": rng.choice((1, 2, 3)) * kv_heads, "kv_heads": kv_heads}, rng.randint(1, len(kv_sizes))
    settings = {**heads, "head_dim": rng.choice(DIMS), "topk": topk, "gated": attempt % 3 > 0, "dtype": torch.float64}
    case = operator.make_problem(q_sizes, kv_sizes, **settings)
    inputs = case.leaves()
    result = operator.run(case, BACKENDS[attempt % 2], inputs)
    kept = result.index.to_dense(len(kv_sizes))
    exact, scores = operator.define(case, kept)
    operator.assert_chosen(kept, scores, topk, 1e-12)
    for name, x in operator.gradients(case, result.out, inputs).items():
        torch.testing.assert_close(x, exact[name], atol=1e-10, rtol=1e-10, msg=name)


@pytest.mark.soak("top-k against a sort", attempts=90, short=4)
def test_selection_with_ties_nan_and_inf(attempt):
    rng, generator = random.Random(attempt), torch.Generator().manual_seed(attempt)
    scores = torch.randn(1, 2, rng.randint(1, 6), rng.randint(1, 70), generator=generator)
    if attempt % 3 == 1:
        # rounded scores have many ties
        scores = scores.round()
    if attempt % 3 == 2:
        scores[torch.rand(scores.shape, generator=generator) < 0.2] = rng.choice((torch.nan, torch.inf, -torch.inf))
    _, heads, rows, columns = scores.shape
    topk = rng.randint(1, columns + 1)
    index = select_topk(scores, topk)
    for head in range(heads):
        for row in range(rows):
            every = [True] * columns
            expected = sorted_columns(scores[0, head, row].tolist(), topk, every, [False] * columns)
            assert lists(index, (0, head, row)) == expected


@pytest.mark.soak("all blocks are torch's own attention", attempts=50, short=3)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_list_of_all_blocks_is_dense_attention(attempt, backend):
    case = problem(attempt, torch.float64)
    case = with_lists(case, torch.ones_like(case.index.to_dense(case.kv_blocks.num)))
    actual = run(replace(case, dlse=torch.zeros_like(case.dlse)), backend)
    leaves = tuple(x.clone().requires_grad_() for x in (case.q, case.k, case.v))
    out = scaled_dot_product_attention(*(x.transpose(1, 2) for x in leaves), enable_gqa=True).transpose(1, 2)
    expected = (out, *torch.autograd.grad(out, leaves, case.dout))
    for name, x in zip(("out", "dq", "dk", "dv"), expected, strict=True):
        torch.testing.assert_close(actual[name], x, atol=1e-11, rtol=0, msg=name)


@pytest.mark.soak("gradients against differences", attempts=50, short=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_through_out_and_lse(attempt, backend):
    case = problem(attempt, torch.float64, most=3, dims=(2, 3), empty=False)
    inputs = tuple(x.clone().requires_grad_() for x in (case.q, case.k, case.v))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return block_sparse_attn(q, k, v, case.index, **case.blocks, backend=backend)

    assert torch.autograd.gradcheck(attend, inputs, fast_mode=True)


@pytest.mark.soak("empty lists and blocks that are not there", attempts=150, short=3)
@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_without_blocks_and_blocks_that_are_not_there(attempt, backend):
    case = problem(attempt, torch.float32)
    num, rows = case.kv_blocks.num, case.q_blocks.num
    results = run(with_lists(case, torch.zeros_like(case.index.to_dense(num))), backend)
    assert not any(results[name].any() for name in ("out", "dq", "dk", "dv"))
    assert (results["lse"] == -torch.inf).all()
    bad = (-1, num, 2**30)[attempt % 3]
    lists_of_one = torch.full((1, 1, rows, 1), bad, dtype=torch.int32)
    broken = BlockIndex(kv_indices=lists_of_one, kv_num_blocks=torch.ones(1, 1, rows, dtype=torch.int32))
    with pytest.raises(ValueError, match=str(bad)):
        block_sparse_attn(case.q, case.k, case.v, broken, **case.blocks, check_values=True, backend=backend)


@pytest.mark.soak("NaN, Inf and large logits in attention", attempts=90, short=3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_key_that_is_no_number_reaches_only_its_queries(attempt, backend, value):
    case = problem(attempt, torch.float32, empty=False)
    large = run(replace(case, q=case.q * 1e3, k=case.k * 1e3), backend)
    assert all(x.isfinite().all() for x in large.values())
    rng, k = random.Random(attempt), case.k.clone()
    token, head = rng.randrange(k.shape[1]), rng.randrange(k.shape[2])
    k[0, token, head, 0] = value
    out, _ = block_sparse_attn(case.q, k, case.v, case.index, **case.blocks, backend=backend)
    group = case.q.shape[2] // k.shape[2]
    sees = expand_mask(case)[..., token]
    sees[1:] = False
    sees[:, [h for h in range(case.q.shape[2]) if h // group != head]] = False
    reached = ~out.isfinite().all(-1).transpose(1, 2)
    # a query with the logit -inf for an infinite key may stay finite
    assert not (reached & ~sees).any()
    assert value == torch.inf or torch.equal(reached, sees)


@pytest.mark.soak("repeated calls bit for bit", attempts=20, short=2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_repeated_calls_are_equal(attempt, backend):
    first, *others = (run(problem(attempt, torch.float32, most=60), backend) for _ in range(6))
    assert all(torch.equal(other[name], x) for other in others for name, x in first.items())


def _far(x: Tensor) -> Tensor:
    # the stride of a dimension of size 1 has no effect, and must not overflow either
    return x.as_strided(x.shape, [2**31 + 8 if n == 1 else step for n, step in zip(x.shape, x.stride(), strict=True)])


def _padded(x: Tensor, pad: int) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 2 * pad), torch.nan, dtype=x.dtype)
    wide[..., pad:-pad] = x
    return wide[..., pad:-pad]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "head dim strided": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "padded": lambda x: _padded(x, 8),
    "misaligned": lambda x: _padded(x, 1),
    "every second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "zero strides": lambda x: x[:, :, :1].expand_as(x),
    "no batch": lambda x: x[:0],
    "strides past 2**31": _far,
    "one token": _far,
}


@pytest.mark.soak("odd layouts bit for bit", attempts=12, short=1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_changes_no_bit(attempt, layout):
    case = problem(attempt, torch.float32)
    if layout == "one token":
        case = make_case([1], [1], heads=2, kv_heads=2, head_dim=24, density=1.0, seed=attempt)
    laid = replace(case, **{name: LAYOUTS[layout](getattr(case, name)) for name in ("q", "k", "v", "dout")})
    if layout == "no batch":
        empty = {name: getattr(case.index, name)[:0] for name in ("kv_indices", "kv_num_blocks")}
        laid = replace(laid, dlse=laid.dlse[:0], index=replace(laid.index, **empty))
    plain = replace(laid, **{name: getattr(laid, name).contiguous() for name in ("q", "k", "v", "dout")})
    actual, expected = run(laid, "gather"), run(plain, "gather")
    assert [name for name in actual if not torch.equal(actual[name], expected[name])] == []
    assert layout != "one token" or torch.equal(actual["out"], case.v)
    # torch's own products of strided tensors may round otherwise
    if laid.q.numel():
        assert_right(plain, run(laid, "reference"))


def test_every_layout_holds_the_same_values_elsewhere():
    x = torch.randn(2, 6, 3, 8)
    for name in LAYOUTS.keys() - {"zero strides", "no batch", "one token"}:
        y = LAYOUTS[name](x[:1] if name == "strides past 2**31" else x)
        assert torch.equal(y, x[: len(y)]), name
        assert not y.is_contiguous() or name == "strides past 2**31"
    assert LAYOUTS["strides past 2**31"](x[:1]).stride(0) > 2**31
