from __future__ import annotations

import copy
from collections import Counter
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny_models import GRID, LATENT, LEVELS, SIZES, SPARSE, assert_equal_runs, make_inputs, make_model
from vsa.attention.context import AttnContext
from vsa.attention.full import FullAttention
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import TileLayout
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.models.embeddings import ResidualNorm
from vsa.models.recompute import _keep_attention
from vsa.models.video_dit import VideoDiT

# the layouts here are ragged on purpose
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")


class TiledFull(FullAttention):
    """Dense attention in a tile-major order that is far from raster: every tile at an edge is short."""

    def layout(self, segments, device=None):
        return TileLayout.build(segments, tile_thw=(3, 3, 4), device=device)


# --- token order ---


@pytest.mark.parametrize("per_token", [False, True])
def test_the_layouts_order_does_not_show(per_token, device):
    raster, tiled = make_model(device=device), make_model(TiledFull, device=device)
    x, timestep, text = make_inputs(device)
    if per_token:
        timestep = torch.rand(2, 96, generator=torch.Generator().manual_seed(2)).to(device) * 1000
    assert not tiled.layout_for(LATENT).is_identity
    assert_equal_runs(tiled, raster, (x, timestep, text), tolerance=2e-6)


def test_rope_left_in_raster_order_would_show(monkeypatch):
    raster, tiled = make_model(), make_model(TiledFull)
    inputs = make_inputs()
    expected = raster(*inputs)
    tables = raster._rope(AttnContext(layout=raster.layout_for(LATENT), topk=KeptTiles((1,))))
    monkeypatch.setattr(tiled, "_rope", lambda ctx: tables)
    assert (tiled(*inputs) - expected).abs().max() > 1e-4


def test_samples_of_a_batch_do_not_mix(device):
    model = make_model(SPARSE, device=device)
    x, timestep, text = make_inputs(device)
    both = model(x, timestep, text, topk=3)
    for i in range(2):
        alone = model(x[i : i + 1], timestep[i : i + 1], text[i : i + 1], topk=3)
        torch.testing.assert_close(alone[0], both[i], atol=2e-6, rtol=0)


# --- sparse attention inside the model ---


def test_all_tiles_and_identity_gates_equal_the_dense_model(device):
    dense = make_model(device=device)
    sparse = VideoDiT(attention=partial(VideoSparseAttention, tile_thw=(2, 2, 2)), **SIZES).to(device)
    missing, unexpected = sparse.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected
    assert all(".to_gate_" in name for name in missing)
    inputs = make_inputs(device)
    assert_equal_runs(sparse, dense, inputs, tolerance=1e-5)
    # the control: fewer tiles are not dense attention
    assert (sparse(*inputs, topk=2) - dense(*inputs)).abs().max() > 1e-4


def test_state_dict_names_each_gate_once_under_its_block():
    gates = {n for n in make_model(SPARSE).state_dict()} - {n for n in make_model().state_dict()}
    assert gates == {
        f"blocks.{i}.{gate}.{kind}"
        for i in range(3)
        for gate in ("to_gate_compress", "to_gate_fine")
        for kind in ("weight", "bias")
    }


def test_topk_none_is_all_tiles_and_lists_are_per_layer():
    model = make_model(SPARSE)
    inputs = make_inputs()
    num_tiles = model.layout_for(LATENT).num_video_tiles
    assert num_tiles == 2 * 2 * 3
    assert torch.equal(model(*inputs), model(*inputs, topk=num_tiles))
    assert torch.equal(model(*inputs, topk=4), model(*inputs, topk=[4, 4, 4]))
    assert not torch.equal(model(*inputs, topk=[4, 2, 4]), model(*inputs, topk=4))
    records = {}
    model(*inputs, topk=[1, 5, 3], recorder=lambda layer, tensors: records.update({layer: tensors}))
    assert [int(records[i]["kv_num_blocks"].max()) for i in range(3)] == [1, 5, 3]


def test_every_parameter_gets_a_gradient(device):
    model = make_model(SPARSE, device=device)
    model(*make_inputs(device), topk=3).square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name


@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.parametrize("attention", [FullAttention, SPARSE], ids=["full", "sparse"])
def test_activation_checkpointing_changes_nothing(attention, level, device):
    plain, recomputed = make_model(attention, device=device), make_model(attention, device=device)
    assert recomputed.activation_checkpointing == "none"
    recomputed.activation_checkpointing = level
    assert recomputed.activation_checkpointing == level
    kwargs = {"topk": 3}
    assert_equal_runs(plain, recomputed, make_inputs(device), tolerance=0, kwargs_a=kwargs, kwargs_b=kwargs)


def test_each_level_of_activation_checkpointing_keeps_less():
    def saved_bytes(level: str) -> int:
        model, tensors = make_model(SPARSE), {}
        model.activation_checkpointing = level

        def pack(tensor):
            # what a block computes again is packed by its checkpoint; outputs of attention are kept outside of it
            tensors[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(*make_inputs(), topk=3)
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors.values())

    none, attention, attention_mlp, full = map(saved_bytes, LEVELS)
    assert none > attention > attention_mlp >= full
    assert full < 0.4 * none


ATTENTION = (
    "vsa_kernels.block_sparse_fwd.default",
    "vsa_kernels.select_topk.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
)


class Calls(TorchDispatchMode):
    """How often operators are called."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_operators_of_ours_that_do_not_attend_are_computed_again():
    ours = torch.ops.vsa_kernels
    by_element = (ours.norm_rope_fwd, ours.bias_gelu_fwd, ours.residual_norm_fwd, torch.ops.aten.mm)
    again = [_keep_attention(None, op.default) for op in by_element]
    attention_policies = [_keep_attention(None, op.default) for op in (ours.coarse_fine_fwd, ours.block_sparse_fwd)]
    assert again == 4 * [CheckpointPolicy.PREFER_RECOMPUTE]
    assert attention_policies == 2 * [CheckpointPolicy.MUST_SAVE]


def test_attention_is_not_computed_again_below_full():
    counts = {}
    for level in LEVELS:
        model = make_model(SPARSE)
        model.activation_checkpointing = level
        out = model(*make_inputs(), topk=3)
        with Calls() as calls:
            out.square().mean().backward()
        attention = [n for name, n in calls.counts.items() if name in ATTENTION]
        # forward products and those of gradients
        products = sum(n for name, n in calls.counts.items() if name.startswith(("aten.mm.", "aten.addmm.")))
        counts[level] = (attention, products)
    assert [counts[level][0] for level in LEVELS] == [[], [], [], [3, 3, 3]]
    none, attention, attention_mlp, full = (counts[level][1] for level in LEVELS)
    assert none < attention < attention_mlp <= full


def test_a_deep_copy_runs_its_own_weights():
    model = make_model(SPARSE)
    inputs = make_inputs()
    before = model(*inputs, topk=3)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    assert torch.equal(twin(*inputs, topk=3), before)
    for parameter in twin.blocks[0].to_gate_compress.parameters():
        parameter.data.add_(1.0)
    assert not torch.equal(twin(*inputs, topk=3), before)


# --- conditions ---


@pytest.mark.parametrize("garbage", [1e4, float("nan")])
def test_masked_text_has_no_influence(garbage, device):
    model = make_model(device=device)
    x, timestep, text = make_inputs(device)
    mask = torch.ones(2, 7, dtype=torch.bool, device=device)
    mask[0, 4:] = False
    mask[1, 2] = False
    text.requires_grad_()
    expected = model(x, timestep, text, mask)
    changed_text = text.detach().clone()
    changed_text[~mask] = garbage
    assert torch.equal(model(x, timestep, changed_text, mask), expected)
    # the same text without the masked tokens at all
    torch.testing.assert_close(model(x[:1], timestep[:1], text[:1, :4])[0], expected[0], atol=2e-6, rtol=0)
    expected.square().mean().backward()
    assert text.grad is not None
    assert (text.grad[~mask] == 0).all()
    assert (text.grad[mask].abs().sum(-1) > 0).all()
    # the control: unmasked, the tokens do matter
    assert (model(x, timestep, text) - expected).abs().max() > 1e-4


def test_per_token_timesteps_of_one_value_are_one_timestep():
    model = make_model(SPARSE)
    x, timestep, text = make_inputs()
    spread = timestep[:, None].expand(-1, 96).contiguous()
    torch.testing.assert_close(model(x, spread, text, topk=3), model(x, timestep, text, topk=3), atol=2e-6, rtol=0)
    spread[0, 5] += 300
    assert (model(x, spread, text, topk=3) - model(x, timestep, text, topk=3)).abs().max() > 1e-4


@pytest.mark.parametrize("level", ["none", "attention", "attention_mlp"])
@pytest.mark.parametrize("method", [TiledFull, FullAttention])
def test_a_first_frame_of_its_own_time_equals_a_time_for_every_token(method, level):
    model = make_model(method).double()
    model.activation_checkpointing = level
    x, timestep, text = make_inputs()
    x, text = x.double().requires_grad_(), text.double().requires_grad_()
    two = torch.stack([torch.tensor([0.0, 0.0]), timestep], 1)
    # the first of four frames
    each = timestep[:, None].repeat(1, 96)
    each[:, : 96 // GRID[0]] = 0

    def run(times):
        out = model(x, times, text)
        leaves = [x, text, *model.parameters()]
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    actual, expected = run(two), run(each)
    for a, b in zip(actual, expected, strict=True):
        assert (a - b).abs().max() <= 1e-12 * b.abs().max().clamp(min=1)
    # the control: the times of the two swapped
    assert (model(x, two.flip(1), text) - expected[0]).abs().max() > 1e-3


def test_condition_latents_are_the_last_channels():
    model = make_model()
    x, timestep, text = make_inputs()
    assert torch.equal(model(x[:, :4], timestep, text, cond_latents=x[:, 4:]), model(x, timestep, text))


def test_half_precision_model_stays_near_its_fp64_twin():
    model = make_model(SPARSE)
    exact = copy.deepcopy(model).double()
    x, timestep, text = make_inputs()
    expected = exact(x.double(), timestep, text.double())
    half = copy.deepcopy(model).bfloat16()(x, timestep, text)
    assert half.dtype == torch.bfloat16
    assert expected.dtype == torch.float64
    assert (half.double() - expected).abs().max() < 0.05 * expected.abs().max()
    assert (model(x, timestep, text).double() - expected).abs().max() < 1e-5 * expected.abs().max()


# --- parameters ---


def test_roles_cover_every_parameter():
    model = make_model(SPARSE, in_channels=6, image_dim=9, added_kv_proj_dim=24)
    roles = model.parameter_roles()
    assert roles.keys() == dict(model.named_parameters()).keys()
    expected = {
        "patch_embedding.weight": "embedding",
        "condition_embedder.text_embedder.linear_1.weight": "embedding",
        "condition_embedder.image_embedder.ff.net.0.proj.weight": "embedding",
        "condition_embedder.time_proj.bias": "vector",
        "scale_shift_table": "vector",
        "proj_out.weight": "head",
        "proj_out.bias": "vector",
        "blocks.2.attn1.to_out.0.weight": "matrix",
        "blocks.2.attn2.add_k_proj.weight": "matrix",
        "blocks.2.attn1.norm_q.weight": "vector",
        "blocks.2.scale_shift_table": "vector",
        "blocks.2.to_gate_compress.weight": "gate",
        "blocks.2.to_gate_fine.bias": "gate",
    }
    assert {name: roles[name] for name in expected} == expected
    matrices = {n for n, role in roles.items() if role == "matrix"}
    assert all(dict(model.named_parameters())[n].dim() == 2 and n.startswith("blocks.") for n in matrices)


@pytest.mark.parametrize("init", ["gpt_neox", "wan"])
def test_a_meta_model_is_initialised_like_a_real_one(init):
    build = partial(VideoDiT, attention=SPARSE, init=init, **SIZES)
    torch.manual_seed(3)
    real = build()
    with torch.device("meta"):
        empty = build()
    empty.to_empty(device="cpu")
    for parameter in empty.parameters():
        parameter.data.fill_(float("nan"))
    torch.manual_seed(3)
    empty.reset_parameters()
    # `real` drew torch's own initial values first, so only what is not random is equal
    for (name, a), b in zip(real.named_parameters(), empty.parameters(), strict=True):
        assert b.isfinite().all(), name
        assert (a.std(correction=0) == 0) == (b.std(correction=0) == 0), name
        if a.std(correction=0) == 0:
            assert torch.equal(a, b), name
    assert empty(*make_inputs(), topk=2).abs().max() == 0


@pytest.mark.parametrize("init", ["gpt_neox", "wan"])
def test_initial_values_follow_the_documented_scheme(init):
    torch.manual_seed(0)
    sizes = SIZES | dict(num_attention_heads=8, attention_head_dim=16, ffn_dim=512, text_dim=64, in_channels=16)
    model = VideoDiT(attention=FullAttention, init=init, **sizes)
    dim, layers = 128, 3

    def xavier(shape):
        return (2 / (shape[0] + shape[1:].numel())) ** 0.5

    def expected_std(name, shape):
        if name == "proj_out.weight":
            return 0.0
        if "text_embedder" in name or "time_embedder" in name:
            return 0.02
        if name.endswith("scale_shift_table"):
            return dim**-0.5
        if init == "wan":
            return xavier(shape)
        return 2 / (layers * dim**0.5) if name.endswith(("to_out.0.weight", "net.2.weight")) else (0.4 / dim) ** 0.5

    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            exact = expected_std(name, parameter.shape)
            # five standard errors of a standard deviation
            assert abs(parameter.std().item() - exact) <= 5 * exact / (2 * parameter.numel()) ** 0.5, name


# --- work ---


@pytest.mark.parametrize("training", [False, True])
def test_flops_equal_torchs_counter(training):
    model = make_model()
    x, timestep, text = make_inputs(batch=1)
    x.requires_grad_(training)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        out = model(x, timestep, text)
        if training:
            out.sum().backward()
    work = model.flops(LATENT, text_len=7, training=False)
    if training:
        # eager attention runs two matmuls forward and four backward; 3.5 counts flash's recomputed scores too
        tokens, dim, layers = 96, 24, 3
        attention = 4 * dim * tokens * (tokens + 7) * layers
        linear = work.executed - attention
        assert model.flops(LATENT, text_len=7).executed == 3 * linear + 3.5 * attention
        # the text and the sinusoid need no gradient
        first_layers = 2 * 24 * (7 * 10 + 16)
        assert counter.get_total_flops() == 3 * (linear + attention) - first_layers
    else:
        assert counter.get_total_flops() == work.executed


def test_sparse_work_is_dense_work_minus_skipped_pairs():
    model = make_model(SPARSE)
    tokens, tiles, dim, layers = 96, 12, 24, 3
    dense = model.flops(LATENT, text_len=7)
    sparse = model.flops(LATENT, 3, text_len=7)
    skipped_pairs = tokens * (tokens - 3 * tokens / tiles)
    assert dense.executed - sparse.executed == pytest.approx(3.5 * 4 * dim * skipped_pairs * layers)
    assert dense.dense_equivalent == sparse.dense_equivalent == make_model().flops(LATENT, 3).dense_equivalent
    mixed = model.flops(LATENT, [3, 12, 12], text_len=7)
    assert dense.executed - mixed.executed == pytest.approx(3.5 * 4 * dim * skipped_pairs)


# --- errors ---


@pytest.mark.parametrize(
    ("affine", "given", "message"),
    [
        (False, ["scale"], "expected scale and shift, got scale"),
        (False, [], "expected scale and shift, got neither"),
        (True, ["scale", "shift"], "expected neither scale nor shift, got scale and shift"),
    ],
)
def test_a_norm_of_blocks_takes_modulation_or_has_parameters(affine, given, message):
    rows = torch.zeros(2, 1, 6)
    with pytest.raises(ValueError, match=message):
        ResidualNorm(6, elementwise_affine=affine)(torch.zeros(2, 3, 6), **dict.fromkeys(given, rows))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_head_dim": 9}, "attention_head_dim must be even and at least 6 .* got 9"),
        ({"attention_head_dim": 4}, "attention_head_dim must be even and at least 6 .* got 4"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: expected an integer from 1 to 4096, got 0"),
        ({"num_layers": 0}, "num_layers=0: expected an integer from 1 to 4096, got 0"),
        ({"freq_dim": 15}, "freq_dim must be even and positive, got 15"),
        ({"patch_size": (2, 2)}, r"patch_size=\[2,2\]: expected a list of 3 values, each an integer from 1 to 64"),
        ({"init": "kaiming"}, "init=kaiming: expected one of gpt_neox, wan, got 'kaiming'"),
        ({"image_dim": 8}, "image_dim and added_kv_proj_dim come together, got 8 and None"),
        ({"image_dim": 8, "added_kv_proj_dim": 20}, "added_kv_proj_dim must be the model width 24, got 20"),
    ],
)
def test_bad_sizes_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        VideoDiT(attention=FullAttention, **(SIZES | changes))


def test_bad_inputs_are_named():
    model = make_model(rope_max_seq_len=8)
    x, timestep, text = make_inputs()
    ones = torch.ones(2, 7)
    cases = [
        ((x[..., :11], timestep, text), {}, r"multiples of the patch \(1, 2, 2\), got \(6, 4, 8, 11\)"),
        ((x[:, :5], timestep, text), {}, "takes 6 latent channels .* got 5"),
        ((x, timestep, text), {"cond_latents": x[:, :1]}, "takes 6 latent channels .* got 7"),
        ((x, timestep, text[..., :9]), {}, r"text must be \[B, S, E\] = \[2, S, 10\], got \[2, 7, 9\]"),
        ((x, timestep, text, ones), {}, r"text_mask must be bool \[2, 7\], got torch.float32 \[2, 7\]"),
        ((x, timestep[:1], text), {}, r"timestep must be \[2\], \[2, 2\] or \[2, 96\], got \[1\]"),
        ((x, timestep, text), {"image_embeds": text}, r"image_embeds .*: None, got \[2, 7, 10\]"),
        ((x, timestep, text), {"topk": 0}, r"topk must be at least 1, .* got 0"),
        ((x, timestep, text), {"topk": [1, 2]}, r"one per layer \(3\), got \[1, 2\]"),
        ((torch.randn(2, 6, 9, 8, 12), timestep, text), {}, r"\(9, 4, 6\) exceeds rope_max_seq_len 8"),
    ]
    for args, kwargs, message in cases:
        with pytest.raises(ValueError, match=message):
            model(*args, **kwargs)
    with pytest.raises(ValueError, match=r"multiples of the patch \(1, 2, 2\), got \(4, 8, 12\)"):
        model.layout_for(LATENT[1:])


def test_another_attention_with_the_same_weights():
    model = make_model(SPARSE).eval()
    inputs, before = make_inputs(), model.state_dict(keep_vars=True)
    own, state = model(*inputs, topk=3), torch.get_rng_state()
    dense = model.with_attention(FullAttention)
    sparse = model.with_attention(partial(VideoSparseAttention, tile_thw=(2, 2, 2), fine_gate=False))
    assert torch.equal(torch.get_rng_state(), state)
    # the other parameters are the same objects, gates are those of the new method alone
    for other, gates in ((dense, 0), (sparse, 2)):
        names = {name for name, _ in other.named_parameters()}
        assert {name for name in before if "gate" not in name} == {name for name in names if "gate" not in name}
        assert all(p is before[name] for name, p in other.named_parameters() if "gate" not in name)
        assert len([name for name in names if "gate" in name]) == 3 * gates
        assert not any(module.training for module in other.modules())
    # dense attention, in a model that was built with it
    alone = make_model(FullAttention).eval()
    alone.load_state_dict({name: p for name, p in before.items() if "gate" not in name})
    assert torch.equal(dense(*inputs), alone(*inputs))
    # at their start gates change nothing: with all tiles it is dense attention, with fewer it is not
    torch.testing.assert_close(sparse(*inputs), dense(*inputs))
    assert not torch.allclose(sparse(*inputs, topk=3), dense(*inputs), atol=1e-3)
    # nothing happened to the model itself
    assert torch.equal(model(*inputs, topk=3), own)
    assert not torch.allclose(own, dense(*inputs), atol=1e-3)
    assert model.state_dict(keep_vars=True).keys() == before.keys()
