"""Rows about operators on the CPU: compared with dense fp64 attention, and with themselves in other layouts."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from vsa_kernels import BlockIndex, Blocks, block_sparse_attn, select_topk
from vsa_kernels.coarse_fine import coarse_fine_attn
from vsa_kernels.testing import (
    Case,
    assert_within_budget,
    define,
    expand_mask,
    index_of,
    make_case,
    run,
    summed_terms,
)

from scripts.soak import tiny
from scripts.soak.rows import Attempts, Row

DTYPES = (torch.float32, torch.bfloat16, torch.float64)
BACKENDS = ("reference", "gather")


def _repeat(seed: int, number: int) -> int:
    return 1_000_003 * seed + number


def problem(
    seed: int,
    dtype: torch.dtype,
    *,
    most: int = 24,
    dims: Sequence[int] = (8, 16, 24, 64, 80, 128, 256),
    empty: bool = True,
) -> Case:
    """A random case of blocks with at most `most` tokens; with `empty`, lists may be empty."""
    rng = random.Random(seed)
    batch, kv_heads, group, head_dim = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 2, 3)), rng.choice(dims)
    q_sizes, kv_sizes = ([rng.randint(1, most) for _ in range(rng.randint(1, 5))] for _ in range(2))
    heads: dict[str, Any] = {"heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    case = make_case(q_sizes, kv_sizes, batch=batch, **heads, density=rng.random(), dtype=dtype, seed=seed)
    if empty:
        return case
    listed = case.index.to_dense(len(kv_sizes))
    listed[..., 0] |= ~listed.any(-1)
    return with_lists(case, listed)


def with_lists(case: Case, listed: Tensor) -> Case:
    """A case with the lists of a bool block mask `[B, H, Nq, Nkv]`."""
    return replace(case, index=index_of(listed, None, 0, 0, torch.Generator()))


def difference(case: Case, got: dict[str, Tensor]) -> str | None:
    """The first result of `run` with an error above that of the plain formula in its dtype, or None."""
    dtype = case.q.dtype
    exact, plain, terms = define(case), define(case, dtype), summed_terms(case)
    # the plain formula in fp64 has no error relative to the definition
    share = 100 * torch.finfo(dtype).eps / torch.finfo(torch.float32).eps if dtype == torch.float64 else 1.0
    try:
        for name, x in got.items():
            assert_within_budget(x, plain[name], exact[name], name, share * terms[name])
    except AssertionError as error:
        return str(error)
    return None


def fuzz(folder: Path, tries: int, seed: int) -> Attempts:
    """Random problems on every CPU backend against fp64."""
    for number in range(tries):
        dtype, backend = DTYPES[number % 3], BACKENDS[number // 3 % 2]
        case = problem(_repeat(seed, number), dtype)
        yield f"problem {number}, {dtype}, {backend}", difference(case, run(case, backend))


def operator(folder: Path, tries: int, seed: int) -> Attempts:
    """The coarse-fine operator with both gates against its formula in fp64."""
    for number in range(tries):
        p = problem(_repeat(seed, number), torch.float64)
        topk = 1 + number % p.kv_blocks.num
        q, k, v = (x.clone().requires_grad_() for x in (p.q, p.k, p.v))
        gates = [torch.rand_like(q).requires_grad_() for _ in range(2)]
        out = coarse_fine_attn(q, k, v, *gates, **p.blocks, topk=topk, backend=BACKENDS[number % 2]).out
        grads = torch.autograd.grad(out, (q, k, v, *gates), p.dout)
        expected_out = _operator(p, q, k, v, gates[0], gates[1], topk)
        expected_grads = torch.autograd.grad(expected_out, (q, k, v, *gates), p.dout)
        gap = max(
            (a - b).abs().max().item() for a, b in zip((out, *grads), (expected_out, *expected_grads), strict=True)
        )
        yield f"problem {number}, top {topk}", None if gap < 1e-10 else f"differs by {gap:.1e}"


def _operator(p: Case, q: Tensor, k: Tensor, v: Tensor, coarse_gate: Tensor, fine_gate: Tensor, topk: int) -> Tensor:
    """The formula: block means by a loop, top-k by a sort, and torch's attention with the resulting mask."""
    group = q.shape[2] // k.shape[2]
    q_sizes, kv_sizes = p.q_blocks.sizes.long(), p.kv_blocks.sizes.long()
    means = [
        torch.stack([part.mean(1) for part in x.split(sizes.tolist(), dim=1)], dim=1)
        for x, sizes in ((q, q_sizes), (k, kv_sizes), (v, kv_sizes))
    ]
    qm, km, vm = means[0], *(x.repeat_interleave(group, dim=2) for x in means[1:])
    scores = torch.einsum("bnhd,bmhd->bhnm", qm, km) * q.shape[-1] ** -0.5
    mask = torch.zeros_like(scores, dtype=torch.bool)
    mask.scatter_(-1, scores.sort(stable=True, dim=-1, descending=True).indices[..., :topk], True)
    q_block, kv_block = (torch.arange(len(sizes)).repeat_interleave(sizes) for sizes in (q_sizes, kv_sizes))
    fine = _dense(q, k, v, mask[:, :, q_block][..., kv_block])
    coarse = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), vm)[:, q_block]
    return coarse_gate * coarse + fine_gate * fine


def _dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


def topk(folder: Path, tries: int, seed: int) -> Attempts:
    """Selection of scores with ties, NaN and Inf against a sort in Python."""
    for number in range(tries):
        rng, generator = random.Random(_repeat(seed, number)), torch.Generator().manual_seed(_repeat(seed, number))
        rows, columns = rng.randint(1, 6), rng.randint(1, 70)
        scores = torch.randn(1, 2, rows, columns, generator=generator)
        if number % 3 == 1:
            # rounded scores have many ties
            scores = scores.round()
        if number % 3 == 2:
            scores[torch.rand(scores.shape, generator=generator) < 0.2] = rng.choice((torch.nan, torch.inf, -torch.inf))
        count = rng.randint(1, columns + 1)
        index = select_topk(scores, count)
        failure = None
        for head in range(2):
            for row in range(rows):
                # NaN ranks below -inf, and ties go to the lowest index
                keys = [(-1, 0.0) if x != x else (0, x) for x in scores[0, head, row].tolist()]
                order = sorted(range(columns), key=lambda i, keys=keys: (-keys[i][0], -keys[i][1], i))
                length = int(index.kv_num_blocks[0, head, row])
                if index.kv_indices[0, head, row, :length].tolist() != sorted(order[:count]):
                    failure = f"row {row} of head {head}"
        yield f"problem {number}, top {count} of {columns}", failure


def everything(folder: Path, tries: int, seed: int) -> Attempts:
    """Attention to all blocks in fp64 equals SDPA of torch."""
    for number in range(tries):
        p = problem(_repeat(seed, number), torch.float64)
        whole = with_lists(p, torch.ones_like(p.index.to_dense(p.kv_blocks.num)))
        actual = run(replace(whole, dlse=torch.zeros_like(p.dlse)), BACKENDS[number % 2])
        leaves = tuple(x.clone().requires_grad_() for x in (p.q, p.k, p.v))
        out = _dense(*leaves)
        expected = (out, *torch.autograd.grad(out, leaves, p.dout))
        names = ("out", "dq", "dk", "dv")
        gap = max((actual[name] - x).abs().max().item() for name, x in zip(names, expected, strict=True))
        yield f"problem {number}", None if gap < 1e-11 else f"differs by {gap:.1e}"


def gradcheck(folder: Path, tries: int, seed: int) -> Attempts:
    """fp64 gradients through out and lse against finite differences."""
    for number in range(tries):
        p = problem(_repeat(seed, number), torch.float64, most=3, dims=(2, 3), empty=False)
        sparse = partial(block_sparse_attn, index=p.index, **p.blocks, backend=BACKENDS[number % 2])
        inputs = tuple(x.clone().requires_grad_() for x in (p.q, p.k, p.v))
        right = torch.autograd.gradcheck(sparse, inputs, fast_mode=True, raise_exception=False)
        yield f"problem {number}", None if right else "gradients and differences disagree"


def indices(folder: Path, tries: int, seed: int) -> Attempts:
    """Queries with empty lists, and lists with block indices out of range."""
    for number in range(tries):
        p = problem(_repeat(seed, number), torch.float32)
        num = p.kv_blocks.num
        if number % 3:
            results = run(with_lists(p, torch.zeros_like(p.index.to_dense(num))), BACKENDS[number % 2])
            wrong = [name for name in ("out", "dq", "dk", "dv") if results[name].any()]
            wrong += [] if bool((results["lse"] == -torch.inf).all()) else ["lse"]
            yield f"problem {number}, empty", f"{wrong} not 0" if wrong else None
            continue
        bad = (-1, num, 2**30)[number // 3 % 3]
        broken = BlockIndex(
            kv_indices=torch.full((1, 1, p.q_blocks.num, 1), bad, dtype=torch.int32),
            kv_num_blocks=torch.ones(1, 1, p.q_blocks.num, dtype=torch.int32),
        )
        try:
            block_sparse_attn(p.q, p.k, p.v, broken, **p.blocks, check_values=True)
            failure = "taken"
        except ValueError as error:
            failure = None if str(bad) in str(error) else f"it says {error}"
        yield f"problem {number}, block {bad}", failure


def extremes(folder: Path, tries: int, seed: int) -> Attempts:
    """NaN or Inf in one key affects only the queries that attend to it; logits of 1e4 and more give finite results."""
    for number in range(tries):
        p = problem(_repeat(seed, number), torch.float32, empty=False)
        backend = BACKENDS[number % 2]
        if number % 3 == 2:
            results = run(replace(p, q=p.q * 1e3, k=p.k * 1e3), backend)
            failure = None if all(bool(x.isfinite().all()) for x in results.values()) else "not finite"
            yield f"problem {number}, large logits", failure
            continue
        q, k = p.q, p.k.clone()
        token, head, value = number % k.shape[1], number % k.shape[2], (torch.nan, torch.inf)[number % 2]
        k[0, token, head, 0] = value
        out, _ = block_sparse_attn(q, k, p.v, p.index, **p.blocks, backend=backend)
        group = q.shape[2] // k.shape[2]
        sees = expand_mask(p)[..., token]
        sees[1:] = False
        sees[:, [h for h in range(q.shape[2]) if h // group != head]] = False
        reached = ~out.isfinite().all(-1).transpose(1, 2)
        # a query with the logit -inf for an infinite key may stay finite
        wrong = (reached & ~sees).any() or (value != value and not torch.equal(reached, sees))
        yield f"problem {number}, {value} in key {token}", "other queries are hit" if wrong else None


def repeats(folder: Path, tries: int, seed: int) -> Attempts:
    """Repeated calls are bitwise equal."""
    first: dict[int, dict[str, Tensor]] = {}
    for number in range(tries):
        kind = number % 5
        actual = run(problem(_repeat(seed, kind), torch.float32, most=60), BACKENDS[kind % 2])
        expected = first.setdefault(kind, actual)
        same = all(torch.equal(actual[name], expected[name]) for name in actual)
        yield f"problem {kind}, repeat {number // 5}", None if same else "other bits"


def _far(x: Tensor) -> Tensor:
    # the stride of a dimension of size 1 has no effect, and must not overflow either
    strides = [2**31 + 8 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


def _strided(x: Tensor, pad: int) -> Tensor:
    wide = torch.full((*x.shape[:-1], x.shape[-1] + 2 * pad), torch.nan, dtype=x.dtype)
    wide[..., pad:-pad] = x
    return wide[..., pad:-pad]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch last": lambda x: x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2),
    "head dim strided": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "padded": lambda x: _strided(x, 8),
    "misaligned": lambda x: _strided(x, 1),
    "every second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "strides past 2**31": _far,
}


def layouts(folder: Path, tries: int, seed: int) -> Attempts:
    """Results for tensors in unusual layouts, with zero strides or without batch equal those of contiguous tensors."""
    names = [*LAYOUTS, "expanded", "no batch", "one token"]
    for number in range(tries):
        name, backend = names[number % len(names)], BACKENDS[number // len(names) % 2]
        p = problem(_repeat(seed, number), torch.float32)
        first = BlockIndex(kv_indices=p.index.kv_indices[:1], kv_num_blocks=p.index.kv_num_blocks[:1])
        if name == "expanded":
            # one clip expanded over the batch, and a gradient with zero strides
            q, k, v, dlse = (x[:1].expand(2, *x.shape[1:]) for x in (p.q, p.k, p.v, p.dlse))
            p = replace(p, q=q, k=k, v=v, dlse=dlse, dout=torch.ones(()).expand(q.shape), index=first)
        elif name == "no batch":
            q, k, v, dout, dlse = (x[:0] for x in (p.q, p.k, p.v, p.dout, p.dlse))
            p = replace(p, q=q, k=k, v=v, dout=dout, dlse=dlse, index=first)
        elif name == "one token":
            q, k, v, dout = (x[:, :1] for x in (p.q, p.k, p.v, p.dout))
            one = Blocks.from_sizes([1])
            ones = torch.zeros(1, 1, 1, 1, dtype=torch.int32)
            index = BlockIndex(kv_indices=ones, kv_num_blocks=ones[..., 0] + 1)
            p = Case(q=q, k=k, v=v, dout=dout, dlse=p.dlse[..., :1], index=index, q_blocks=one, kv_blocks=one)
        laid = LAYOUTS.get(name, lambda x: x)
        actual, expected = (
            run(replace(p, q=to(p.q), k=to(p.k), v=to(p.v), dout=to(p.dout)), backend)
            for to in (laid, Tensor.contiguous)
        )
        wrong = [part for part in actual if not torch.equal(actual[part], expected[part])]
        group = p.q.shape[2] // p.k.shape[2]
        if name == "one token" and not torch.equal(actual["out"], p.v.repeat_interleave(group, dim=2)):
            wrong.append("not its own value")
        yield f"problem {number}, {name}, {backend}", f"{wrong} differ" if wrong else None


def interpreted(tries: int, seed: int) -> Attempts:
    """Run small problems on the Triton kernels; TRITON_INTERPRET=1 must be set at the start of the process."""
    for number in range(tries):
        case = problem(_repeat(seed, number), torch.float32, most=12, dims=(16, 24, 32))
        yield f"problem {number}, triton", difference(case, run(case, "triton"))


def triton(folder: Path, tries: int, seed: int) -> Attempts:
    """Random problems on the Triton kernels in the interpreter, in a separate process, against fp64."""
    path = os.pathsep.join((str(tiny.ROOT), str(tiny.ROOT / "kernels"), os.environ.get("PYTHONPATH", "")))
    call = f"[*interpreted({tries}, {seed})]"
    code = f"import json; from scripts.soak.kernels import interpreted; print(json.dumps({call}))"
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    process = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    yield from json.loads(process.stdout.splitlines()[-1])


ROWS = (
    Row(name="block-sparse attention against fp64", tries=540, short_tries=24, run=fuzz),
    Row(name="the operator with its gates against fp64", tries=60, short_tries=6, run=operator),
    Row(name="top-k against a sort", tries=90, short_tries=15, run=topk),
    Row(name="Triton kernels in the interpreter against fp64", tries=60, short_tries=0, run=triton),
    Row(name="all blocks are torch's own attention", tries=50, short_tries=6, run=everything),
    Row(name="gradients against differences", tries=50, short_tries=4, run=gradcheck),
    Row(name="empty lists and blocks that are not there", tries=300, short_tries=18, run=indices),
    Row(name="NaN, Inf and large logits in attention", tries=180, short_tries=12, run=extremes),
    Row(name="repeated calls bit for bit", tries=100, short_tries=10, run=repeats),
    Row(name="odd layouts bit for bit", tries=120, short_tries=20, run=layouts),
)
