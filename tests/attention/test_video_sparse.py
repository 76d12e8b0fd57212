from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from vsa_kernels import Blocks
from vsa_kernels.coarse_fine import coarse_attn, coarse_fine_stages

from tests.attention.oracle import cube_ids, video_sparse_oracle
from vsa.attention import video_sparse
from vsa.attention.base import AttentionMethod
from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment, TileLayout
from vsa.attention.sparsity import ConstantSparsity
from vsa.attention.video_sparse import VideoSparseAttention

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

HEADS, HEAD_DIM = 2, 8
DIM = HEADS * HEAD_DIM


def make_method(tile=(2, 3, 2), seed=0, **options) -> VideoSparseAttention:
    """A layer whose gates depend on the input, so that no term of the output vanishes."""
    torch.manual_seed(seed)
    method = VideoSparseAttention(dim=DIM, num_heads=HEADS, head_dim=HEAD_DIM, tile_thw=tile, **options)
    for module in method.extra_modules().values():
        torch.nn.init.normal_(module.weight, std=0.3)
        if module.bias is not None:
            torch.nn.init.normal_(module.bias)
    return method


def make_inputs(length: int, *, batch=2, dtype=torch.float32, device="cpu", seed=1) -> list[torch.Tensor]:
    """q, k, v `[B, L, H, D]` and x `[B, L, C]` in raster order, leaves that require grad."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, length, HEADS, HEAD_DIM)] * 3 + [(batch, length, DIM)]
    return [torch.randn(s, generator=generator, dtype=dtype).to(device).requires_grad_() for s in shapes]


def run_layer(method: AttentionMethod, layout: TileLayout, inputs, topk: int, **ctx) -> torch.Tensor:
    """Raster in, raster out, through the layout as the model does it."""
    q, k, v, x = (layout.permute(t) for t in inputs)
    context = AttnContext(layout=layout, topk=KeptTiles.of(topk), **ctx)
    return layout.unpermute(method.attend_combine(q, k, v, method.project(x), context))


def oracle_layer(method: VideoSparseAttention, layout: TileLayout, inputs, topk: int) -> torch.Tensor:
    """The definition, with tiles numbered without the layout (but for Hilbert runs)."""
    q, k, v, x = (t.double() for t in inputs)
    ids, samples, videos, offset = [], [], [], 0
    assert layout.tile_thw is not None
    for segment in layout.segments:
        n = segment.num_tokens
        if segment.is_video and layout.partition == "cube":
            ids += [offset + i for i in cube_ids(segment.grid_thw, layout.tile_thw)]
        elif not segment.is_video:
            # a tile never crosses a segment
            ids += [offset + i // math.prod(layout.tile_thw) for i in range(n)]
        else:
            block = torch.arange(layout.num_blocks).repeat_interleave(layout.blocks.sizes.cpu())
            ids += (offset + block[layout.inverse.cpu()])[len(ids) : len(ids) + n].tolist()
        offset += 1000
        samples += [segment.sample] * n
        videos += [segment.is_video] * n
    gates = []
    for name in ("to_gate_compress", "to_gate_fine"):
        module = method.extra_modules().get(name)
        if module is None:
            gates.append(torch.ones_like(q))
        else:
            bias = None if module.bias is None else module.bias.double()
            gates.append(F.linear(x, module.weight.double(), bias).view_as(q))
    return video_sparse_oracle(
        q,
        k,
        v,
        *gates,
        tile_ids=torch.tensor(ids, device=q.device),
        sample=torch.tensor(samples, device=q.device),
        is_video=torch.tensor(videos, device=q.device),
        topk=topk,
        coarse_text=method.coarse_text,
    )


def gradients(out: torch.Tensor, method: AttentionMethod, inputs) -> dict[str, torch.Tensor]:
    """Gradients of a fixed random projection of the output to inputs and parameters."""
    cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    leaves = dict(zip("qkvx", inputs, strict=True)) | dict(method.named_parameters())
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent.to(out))
    return dict(zip(leaves, grads, strict=True))


def assert_same(method, inputs, out, expected, *, atol: float):
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out.double(), expected.double(), atol=atol, rtol=atol)
    actual = gradients(out, method, inputs)
    for name, grad in gradients(expected, method, inputs).items():
        torch.testing.assert_close(actual[name].double(), grad.double(), atol=10 * atol, rtol=10 * atol, msg=name)


SINGLE = [Segment((3, 7, 5))]
TEXT = [Segment((1, 1, 17), "text"), Segment((3, 7, 5))]
TEXT_LAST = [Segment((3, 7, 5)), Segment((1, 1, 5), "cond")]
PACKED = [Segment((3, 7, 5)), Segment((2, 3, 9), "video", 1)]
MIXED = [
    Segment((2, 5, 4), "video", 4),
    Segment((1, 1, 13), "text", 4),
    Segment((1, 7, 5), "image", 4),
    Segment((1, 1, 2), "cond", 2),
    Segment((2, 4, 3), "video", 2),
    Segment((1, 1, 3), "text", 2),
]
PREFIX = [Segment((1, 1, 17), "text"), Segment((1, 1, 5), "cond"), Segment((1, 1, 14), "cond"), Segment((3, 7, 5))]
ROWS = {"single": SINGLE, "text": TEXT, "text_last": TEXT_LAST, "packed": PACKED, "mixed": MIXED, "prefix": PREFIX}
H3 = {"coarse_text": True, "fine_gate": False, "gate_bias": False}


@pytest.mark.parametrize("backend", [None, "reference"])
@pytest.mark.parametrize(
    ("row", "options", "topk"),
    [
        ("single", {}, 5),
        ("single", {"fine_gate": False}, 1),
        ("single", {"partition": "hilbert_run"}, 4),
        ("single", {"block_order": "raster", "tile": (3, 7, 1)}, 2),
        ("text", {}, 4),
        ("text_last", {"partition": "hilbert_run"}, 3),
        ("packed", {}, 3),
        ("packed", {"fine_gate": False}, 11),
        ("mixed", {}, 2),
        ("mixed", {}, 100),
        ("prefix", H3, 3),
        ("prefix", H3, 100),
        ("text_last", {"coarse_text": True}, 3),
        ("single", {"coarse_text": True}, 3),
    ],
    ids=str,
)
def test_equals_the_dense_mask_definition(row, options, topk, backend, device):
    method = make_method(**options, backend=backend).double().to(device)
    layout = method.layout(ROWS[row], device)
    inputs = make_inputs(layout.num_tokens, dtype=torch.float64, device=device)
    out = run_layer(method, layout, inputs, topk)
    assert_same(method, inputs, out, oracle_layer(method, layout, inputs, topk), atol=1e-11)
    # controls: one tile more or less, or another head's gate, is far outside the tolerance
    other = oracle_layer(method, layout, inputs, topk + 1 if topk < 100 else 1)
    assert (out - other).abs().max() > 1e-3
    other_gate = run_layer(method, layout, [*inputs[:3], inputs[3].roll(1, dims=1)], topk)
    assert (out - other_gate).abs().max() > 1e-3


def test_text_takes_part_in_the_coarse_stage():
    method = make_method(**H3)
    layout = method.layout(PREFIX, "cpu")
    inputs = make_inputs(layout.num_tokens)
    out = run_layer(method, layout, inputs, 3)
    assert_same(method, inputs, out, oracle_layer(method, layout, inputs, 3), atol=1e-6)
    assert method.pairs(layout, 3) - make_method().pairs(layout, 3) == (2 + 1 + 2) * layout.num_blocks
    # control: without it, other queries than those of the text have another output too
    method.coarse_text = False
    without = oracle_layer(method, layout, inputs, 3)
    assert (out - without)[:, 36:].abs().max() > 1e-2
    with pytest.raises(ValueError, match="coarse_text takes rows of one sample, got 2"):
        make_method(**H3).layout(MIXED, "cpu")
    with pytest.raises(ValueError, match="gate_bias=False needs fine_gate=False"):
        make_method(gate_bias=False)


@pytest.mark.parametrize("row", ["text", "text_last"])
def test_text_and_video_in_fp32(row):
    method = make_method()
    layout = method.layout(ROWS[row], "cpu")
    inputs = make_inputs(layout.num_tokens)
    out = run_layer(method, layout, inputs, 4)
    assert_same(method, inputs, out, oracle_layer(method, layout, inputs, 4), atol=1e-6)
    # control: text that may be skipped is a different layer
    blind = [s if s.is_video else Segment(s.grid_thw, s.kind, 1) for s in ROWS[row]]
    without = oracle_layer(method, method.layout(blind, "cpu"), inputs, 4)
    assert (out - without).abs().max() > 1e-2


@pytest.mark.parametrize("topk", [1, 3, 9, 100])
def test_two_samples_packed_equal_each_apart(topk):
    method = make_method()
    segments = [Segment((1, 1, 7), "text", 0), Segment((3, 7, 5), "video", 0), Segment((2, 3, 9), "video", 1)]
    layout = method.layout(segments, "cpu")
    inputs = make_inputs(layout.num_tokens)
    apart = []
    for first, segs in ((0, segments[:2]), (7 + 105, segments[2:])):
        part = method.layout(segs, "cpu")
        apart.append(run_layer(method, part, [t[:, first : first + part.num_tokens] for t in inputs], topk))
    packed = run_layer(method, layout, inputs, topk)
    assert_same(method, inputs, packed, torch.cat(apart, dim=1), atol=1e-6)
    # control: one sample of both clips is not the same thing
    one_sample = method.layout([Segment(s.grid_thw, s.kind, 0) for s in segments], "cpu")
    assert (packed - run_layer(method, one_sample, inputs, topk)).abs().max() > 1e-2


@pytest.mark.parametrize("row", list(ROWS))
def test_all_tiles_and_identity_gates_are_dense_attention(row):
    method = VideoSparseAttention(dim=DIM, num_heads=HEADS, head_dim=HEAD_DIM, tile_thw=(2, 3, 2))
    layout = method.layout(ROWS[row], "cpu")
    inputs = make_inputs(layout.num_tokens)
    sample = torch.tensor([s.sample for s in layout.segments for _ in range(s.num_tokens)])
    q, k, v = (t.transpose(1, 2) for t in inputs[:3])
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=sample[:, None] == sample).transpose(1, 2)
    out = run_layer(method, layout, inputs, layout.num_video_tiles)
    torch.testing.assert_close(out, dense, atol=1e-5, rtol=0)
    weights = torch.randn(dense.shape, generator=torch.Generator().manual_seed(2))
    for mine, theirs in zip(
        torch.autograd.grad(out, inputs[:3], weights),
        torch.autograd.grad(dense, inputs[:3], weights),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
    sparse = run_layer(method, layout, inputs, layout.num_video_tiles - 1)
    assert (sparse - dense).abs().max() > 1e-3


def test_sparse_path_with_all_tiles_is_dense_too():
    """Rows whose own sample is fully kept, in a row where another sample is not."""
    method = VideoSparseAttention(dim=DIM, num_heads=HEADS, head_dim=HEAD_DIM, tile_thw=(2, 3, 2))
    layout = method.layout(PACKED, "cpu")
    assert layout.video_tiles == (18, 5)
    inputs = make_inputs(layout.num_tokens)
    q, k, v = (t[:, 105:].transpose(1, 2) for t in inputs[:3])
    dense = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
    out = run_layer(method, layout, inputs, 5)[:, 105:]
    torch.testing.assert_close(out, dense, atol=1e-5, rtol=0)


def test_gradcheck_through_the_whole_layer():
    method = VideoSparseAttention(dim=4, num_heads=2, head_dim=2, tile_thw=(1, 2, 2)).double()
    torch.manual_seed(3)
    for module in method.extra_modules().values():
        torch.nn.init.normal_(module.weight, std=0.3)
    layout = method.layout([Segment((2, 2, 3))], "cpu")
    assert layout.blocks.min_size < layout.blocks.max_size
    inputs = [torch.randn(1, 12, 2, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(1, 12, 4, dtype=torch.float64, requires_grad=True))
    names = [name for name, _ in method.named_parameters()]

    def layer(*tensors):
        parameters = dict(zip(names, tensors[4:], strict=True))
        q, k, v, x = tensors[:4]
        gate = {
            f"gate_{short}": F.linear(x, parameters[f"to_gate_{short}.weight"], parameters[f"to_gate_{short}.bias"])
            for short in ("compress", "fine")
        }
        extra = {name: layout.permute(g).unflatten(-1, (2, 2)) for name, g in gate.items()}
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(2))
        return method.attend_combine(*(layout.permute(t) for t in (q, k, v)), extra, ctx)

    tensors = [*inputs, *(p.detach().clone().requires_grad_() for p in method.parameters())]
    assert torch.autograd.gradcheck(layer, tensors, atol=1e-7)
    direct = run_layer(method, layout, inputs, 2)
    with torch.no_grad():
        assert torch.equal(direct, layout.unpermute(layer(*tensors)))


def test_identity_gates_at_the_start():
    """With G_c = 0 the coarse stage sends nothing to q, k, v but its gate does get a gradient."""
    method = VideoSparseAttention(dim=DIM, num_heads=HEADS, head_dim=HEAD_DIM, tile_thw=(2, 3, 2))
    layout = method.layout(SINGLE, "cpu")
    inputs = make_inputs(layout.num_tokens)
    q, k, v, x = (layout.permute(t) for t in inputs)
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(3))
    parts = method.attend(q, k, v, ctx)
    out = method.combine(parts, method.project(x), ctx)
    assert torch.equal(out, parts["fine"])
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    both = torch.autograd.grad((out * weights).sum(), inputs[:3], retain_graph=True)
    fine = torch.autograd.grad((parts["fine"] * weights).sum(), inputs[:3], retain_graph=True)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(both, fine, strict=True))
    (out * weights).sum().backward()
    gate_grad = layout.tile_to_tokens(parts["coarse"]) * weights
    torch.testing.assert_close(method.to_gate_compress.bias.grad, gate_grad.sum((0, 1)).flatten())
    assert method.to_gate_compress.weight.grad.abs().max() > 0


def test_gate_options():
    shape = {"dim": DIM, "num_heads": HEADS, "head_dim": HEAD_DIM}
    coarse_only = VideoSparseAttention(**shape, fine_gate=False)
    assert list(coarse_only.extra_modules()) == ["to_gate_compress"]
    both = VideoSparseAttention(**shape)
    assert list(both.extra_modules()) == ["to_gate_compress", "to_gate_fine"]
    model = VideoSparseAttention(**shape, gate_init="model")
    before = model.to_gate_fine.weight.clone()
    for method in (both, model):
        torch.nn.init.constant_(method.to_gate_fine.bias, 3)
        torch.nn.init.constant_(method.to_gate_compress.bias, 3)
        method.reset_extra_parameters()
        assert (method.to_gate_fine.bias == 1).all()
        assert (method.to_gate_compress.bias == 0).all()
    assert torch.equal(model.to_gate_fine.weight, before)
    assert before.abs().max() > 0
    assert not both.to_gate_fine.weight.any()
    assert not both.to_gate_compress.weight.any()
    # made on the meta device, then given memory: reset is all it takes
    with torch.device("meta"):
        late = VideoSparseAttention(**shape)
    late.to_empty(device="cpu").reset_extra_parameters()
    assert all(torch.equal(a, b) for a, b in zip(late.parameters(), both.parameters(), strict=True))


@settings(max_examples=12, deadline=None)
@given(
    q_sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    kv_sizes=st.lists(st.integers(1, 9), min_size=2, max_size=6),
    topk=st.integers(1, 7),
    group=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_different_query_and_kv_lengths(q_sizes, kv_sizes, topk, group, seed):
    generator = torch.Generator().manual_seed(seed)

    def leaf(length: int, heads: int) -> torch.Tensor:
        return torch.randn(2, length, heads, 4, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v = leaf(sum(q_sizes), 2), leaf(sum(kv_sizes), 2 // group), leaf(sum(kv_sizes), 2 // group)
    out = coarse_fine_stages(
        q, k, v, q_blocks=Blocks.from_sizes(q_sizes), kv_blocks=Blocks.from_sizes(kv_sizes), topk=topk
    )

    def spread(sizes: list[int]) -> torch.Tensor:
        ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        return F.one_hot(ids).double().T

    rows, cols = spread(q_sizes), spread(kv_sizes)
    qh, kh, vh = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    means = [m / m.sum(1, keepdim=True) for m in (rows, cols)]
    scores = (means[0] @ qh) @ (means[1] @ kh).transpose(-1, -2) / 2
    coarse = scores.softmax(-1) @ (means[1] @ vh)
    selection = scores.argsort(-1, descending=True).argsort(-1) < topk
    mask = (rows.T @ selection.double() @ cols) > 0
    fine = (qh @ kh.transpose(-1, -2) / 2).masked_fill(~mask, -math.inf).softmax(-1) @ vh
    for mine, theirs in ((out.fine, fine), (out.coarse, coarse)):
        torch.testing.assert_close(mine.transpose(1, 2), theirs, atol=1e-11, rtol=1e-11)
    weights = [torch.randn(t.shape, generator=generator, dtype=torch.float64) for t in (fine, coarse)]
    total = (out.fine.transpose(1, 2) * weights[0]).sum() + (out.coarse.transpose(1, 2) * weights[1]).sum()
    expected = (fine * weights[0]).sum() + (coarse * weights[1]).sum()
    for mine, theirs in zip(
        torch.autograd.grad(total, (q, k, v)), torch.autograd.grad(expected, (q, k, v)), strict=True
    ):
        torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-10)


def test_selected_tiles_hold_the_highest_scores_at_near_ties():
    """bf16 inputs tie often: the chosen scores are the top ones, equal scores go to the lowest tile, all repeatable."""
    layout = TileLayout.build([Segment((4, 6, 8))], tile_thw=(2, 2, 2))
    generator = torch.Generator().manual_seed(0)
    tile = torch.randint(0, 3, (1, layout.num_blocks, HEADS, HEAD_DIM), generator=generator)
    q, k, v = (layout.tile_to_tokens(tile.to(torch.bfloat16).roll(n, dims=1)) for n in range(3))
    selections = []
    for _ in range(2):
        out = coarse_fine_stages(q, k, v, q_blocks=layout.blocks, kv_blocks=layout.blocks, topk=5)
        selections.append(out.index.to_dense(layout.num_blocks))
    assert torch.equal(selections[0], selections[1])
    selection, scores = selections[0], out.scores
    assert (selection.sum(-1) == 5).all()
    best_scores = scores.masked_fill(~selection, -math.inf).sort(-1, descending=True).values[..., :5]
    assert torch.equal(best_scores, scores.sort(-1, descending=True).values[..., :5])
    threshold = best_scores[..., -1:]
    ties = scores == threshold
    assert (ties.sum(-1) > 1).any()
    for row_ties, row_selection in zip(ties.flatten(0, 2), selection.flatten(0, 2), strict=True):
        flags = row_selection[row_ties].int()
        assert (flags.diff() <= 0).all()


def test_scores_that_underflow_still_rank():
    """Logits so large that every probability but one is zero: the second tile is still the second best."""
    blocks = Blocks.from_sizes([1, 1, 1, 1])
    q = torch.ones(1, 4, 1, 1)
    k = torch.tensor([0.0, 1000.0, 500.0, 250.0]).view(1, 4, 1, 1)
    out = coarse_fine_stages(q, k, k, q_blocks=blocks, kv_blocks=blocks, topk=3)
    assert (out.scores.softmax(-1) == 0).sum(-1).min() == 3
    assert out.index.kv_indices[0, 0, :, :3].tolist() == [[1, 2, 3]] * 4


def test_coarse_means_divide_by_what_a_tile_holds():
    """A short tile has one vote like any other and a mean over its own tokens."""
    blocks = Blocks.from_sizes([4, 1])
    q = torch.zeros(1, 5, 1, 2)
    v = torch.tensor([[2.0] * 4 + [6.0]] * 2).T.reshape(1, 5, 1, 2)
    coarse, _ = coarse_attn(q, q, v, q_blocks=blocks, kv_blocks=blocks)
    assert torch.equal(coarse, torch.full((1, 2, 1, 2), 4.0))


@pytest.mark.parametrize("row", ["single", "mixed"])
def test_half_precision_coarse_stage_is_fp32(row):
    method = make_method().to(torch.bfloat16)
    layout = method.layout(ROWS[row], "cpu")
    inputs = make_inputs(layout.num_tokens, dtype=torch.bfloat16)
    records = []
    out = run_layer(method, layout, inputs, 3, recorder=lambda i, tensors: records.append(tensors))
    assert out.dtype == torch.bfloat16
    assert records[0]["scores"].dtype == torch.float32
    exact = oracle_layer(method, layout, inputs, 3)
    # a near tie may select another tile: the typical error is what bf16 costs
    assert (out.double() - exact).abs().median() < 0.02


@pytest.mark.parametrize("row", ["single", "mixed"])
@pytest.mark.parametrize("topk", [2, 50])
def test_recorder(row, topk):
    method = make_method(layer_idx=3)
    layout = method.layout(ROWS[row], "cpu")
    inputs = make_inputs(layout.num_tokens)
    records = []
    out = run_layer(method, layout, inputs, topk, recorder=lambda i, tensors: records.append((i, tensors)))
    assert torch.equal(out, run_layer(method, layout, inputs, topk))
    [(layer_idx, tensors)] = records
    assert layer_idx == 3
    assert not any(t.requires_grad for t in tensors.values())
    counts = tensors["kv_num_blocks"]
    assert counts.shape[2] == layout.video_blocks.num
    own = [min(topk, n) for n in layout.video_tiles for _ in range(n)]
    text = [0] * len(own)
    if row == "mixed":
        text = [2] * layout.video_tiles[0] + [2] * layout.video_tiles[1]
    assert counts[0, 0].tolist() == [a + b for a, b in zip(own, text, strict=True)]


def test_recorder_of_one_sample_with_text_counts_video_rows():
    method = make_method()
    layout = method.layout(TEXT, "cpu")
    records = []
    run_layer(method, layout, make_inputs(layout.num_tokens), 99, recorder=lambda i, t: records.append(t))
    assert records[0]["kv_num_blocks"].tolist() == [[[layout.num_blocks] * layout.num_video_tiles]]


@pytest.mark.parametrize("row", list(ROWS))
def test_pairs_count_what_is_executed(row):
    """Against the dense mask of a layout whose tiles are all full."""
    tile = {"single": (3, 7, 1), "text": (1, 7, 1), "text_last": (1, 7, 5)}
    method = make_method(tile=tile.get(row, (1, 1, 1)))
    layout = method.layout(ROWS[row], "cpu")
    records = []
    inputs = make_inputs(layout.num_tokens, batch=1)
    for topk in (1, 2, layout.num_video_tiles):
        records.clear()
        run_layer(method, layout, inputs, topk, recorder=lambda i, tensors: records.append(tensors))
        sizes, counts = layout.blocks.sizes, records[0]["kv_num_blocks"][0, 0]
        indices = records[0]["kv_indices"][0, 0]
        fine = 0
        for n, size in enumerate(layout.video_blocks.sizes.tolist()):
            fine += size * int(sizes[indices[n, : counts[n]].long()].sum())
        for start, stop, sample in layout.text_spans:
            first, last = layout.sample_spans[sample]
            fine += (stop - start) * (last - first)
        assert method.pairs(layout, topk) == pytest.approx(fine + records[0]["scores"][0, 0].numel())


def test_split_path_equals_attend_combine():
    for row, topk in (("single", 4), ("mixed", 2)):
        method = make_method()
        layout = method.layout(ROWS[row], "cpu")
        q, k, v, x = (layout.permute(t) for t in make_inputs(layout.num_tokens))
        ctx = AttnContext(layout=layout, topk=KeptTiles.of(topk))
        split = method.combine(method.attend(q, k, v, ctx), method.project(x), ctx)
        assert torch.equal(method.attend_combine(q, k, v, method.project(x), ctx), split)


@pytest.mark.parametrize("options", [{}, {"fine_gate": False, "partition": "hilbert_run"}], ids=str)
def test_fused_op_equals_split_path(options, triton_device, monkeypatch):
    """Every row is one call of the operator; a recorder or all tiles take the parts."""
    calls = []
    op = video_sparse.coarse_fine_attn
    monkeypatch.setattr(video_sparse, "coarse_fine_attn", lambda *args, **rest: calls.append(1) or op(*args, **rest))
    method = make_method(tile=(3, 4, 3), backend="triton", **options).to(triton_device)
    for row, topk, recorder, fused in (
        ("single", 2, None, True),
        ("single", 2, lambda *_: None, False),
        ("single", 50, None, False),
        ("text", 2, None, True),
    ):
        layout = method.layout(ROWS[row], triton_device)
        inputs = make_inputs(layout.num_tokens, batch=1, device=triton_device)
        calls.clear()
        out = run_layer(method, layout, inputs, topk, recorder=recorder)
        assert len(calls) == fused
        if fused:
            # a recorder sees the parts, so it takes the split path
            split = run_layer(method, layout, inputs, topk, recorder=lambda *_: None)
            assert_same(method, inputs, out, split, atol=2e-5)
            # control: one tile less is far outside the tolerance
            less = run_layer(method, layout, inputs, topk - 1, recorder=lambda *_: None)
            assert (out - less).abs().max() > 1e-2


def test_split_over_heads_and_tokens():
    """What sequence parallelism does: attend per group of heads, project and combine with all of them."""
    method = make_method()
    layout = method.layout(MIXED, "cpu")
    q, k, v, x = (layout.permute(t) for t in make_inputs(layout.num_tokens))
    ctx = AttnContext(layout=layout, topk=KeptTiles.of(2))
    halves = [method.attend(q[:, :, h], k[:, :, h], v[:, :, h], ctx) for h in (slice(0, 1), slice(1, 2))]
    parts = {name: torch.cat([half[name] for half in halves], dim=2) for name in halves[0]}
    out = method.combine(parts, method.project(x), ctx)
    expected = method.attend_combine(q, k, v, method.project(x), ctx)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)


def test_a_sample_alone_or_in_a_batch():
    method = make_method()
    layout = method.layout(SINGLE, "cpu")
    inputs = make_inputs(layout.num_tokens, batch=3)
    together = run_layer(method, layout, inputs, 4)
    alone = torch.cat([run_layer(method, layout, [t[i : i + 1] for t in inputs], 4) for i in range(3)])
    torch.testing.assert_close(together, alone, atol=1e-6, rtol=1e-6)


def test_changing_topk_does_not_recompile():
    method = make_method(tile=(2, 2, 2))
    layout = method.layout([Segment((4, 8, 8))], "cpu")
    q, k, v, x = make_inputs(layout.num_tokens, batch=1)
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    @torch.compile(fullgraph=True, backend=backend)
    def layer(q, k, v, x, ctx):
        return method.attend_combine(q, k, v, method.project(x), ctx)

    base = AttnContext(layout=layout, topk=KeptTiles((9, *range(31, 1, -1))))
    for index in range(len(base.topk.layers)):
        ctx = base.layer(index)
        with torch.no_grad():
            out = layer(q, k, v, x, ctx)
            assert torch.equal(out, method.attend_combine(q, k, v, method.project(x), ctx))
    assert len(graphs) <= 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: make_method(gate_init="ones"), "gate_init=ones: expected one of identity, model, got 'ones'"),
        (lambda: run_layer(make_method(), make_method().layout(SINGLE), make_inputs(105), 0), "at least 1, got 0"),
        (lambda: run_layer(make_method(), make_method().layout(TEXT), make_inputs(122), 0), "at least 1, got 0"),
        (
            lambda: make_method().attend(
                *make_inputs(4)[:3], AttnContext(layout=make_method().layout(SINGLE), topk=KeptTiles.of(1))
            ),
            "q must have the 105 tokens of the layout, got 4",
        ),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedule_and_layout_agree():
    """A sparsity becomes a density over the tiles that are there."""
    layout = TileLayout.build([Segment((4, 8, 8))], tile_thw=(2, 2, 2))
    topk = ConstantSparsity(sparsity=0.875).topk(0, layout.num_video_tiles)
    dense = make_method(tile=(2, 2, 2)).pairs(layout, layout.num_video_tiles) - 32 * 32
    assert topk / layout.num_video_tiles == 0.125
    assert (make_method(tile=(2, 2, 2)).pairs(layout, topk) - 32 * 32) / dense == 0.125
