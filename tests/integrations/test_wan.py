"""Wan: video tokens in self-attention, text in cross-attention; and what `apply` does in every family."""

from __future__ import annotations

import copy

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import nn

from tests.integrations import checks, tiny
from tests.integrations.oracle import masked_attention
from vsa.attention.full import FullAttention
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.integrations.diffusers import applied_attention, apply, remove
from vsa.models.video_dit import VideoDiT

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")

KINDS = {
    "t2v": dict(),
    "i2v": dict(in_channels=6, image_dim=20, added_kv_proj_dim=32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_all_tiles_equal_the_model(kind):
    checks.check_all_tiles_equal_the_model(tiny.wan(**KINDS[kind]))


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_equals_the_model_under_a_tile_mask(kind):
    checks.check_sparse_equals_masked_model(tiny.wan(**KINDS[kind]))


def test_a_window_is_the_model_under_a_mask():
    checks.check_a_window(tiny.wan())


@pytest.mark.parametrize("kind", KINDS)
def test_remove_is_exact(kind):
    checks.check_remove_is_exact(tiny.wan(**KINDS[kind]))


def test_gates_train():
    checks.check_gates_train(tiny.wan())


@torch.no_grad()
def test_timesteps_per_token():
    # Wan2.2 TI2V
    case = tiny.wan()
    case.inputs["timestep"] = torch.rand(2, 105, generator=torch.Generator().manual_seed(3)) * 1000
    with masked_attention(tiny.GRID, tiny.TILE, 3):
        expected = case.run()
    apply(case.model, topk=3, tile_thw=tiny.TILE, dense_steps=0)
    assert tiny.difference(case.run(), expected) < 1e-5


@pytest.mark.parametrize("topk", [3, tiny.TILES])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_the_model(topk, checkpointing):
    checks.check_gradients_equal_the_masked_model(tiny.wan(), topk, checkpointing=checkpointing)


@torch.no_grad()
def test_gated_transformer_equals_our_model():
    """Our own model with gates, its weights loaded under the same names."""
    case = tiny.wan()
    config = case.model.config
    names = ("num_attention_heads", "attention_head_dim", "in_channels", "out_channels", "text_dim", "freq_dim")
    options = {name: config[name] for name in (*names, "ffn_dim", "num_layers")}

    def attention(**layer):
        return VideoSparseAttention(**layer, tile_thw=tiny.TILE)

    ours = tiny.stirred(VideoDiT(attention=attention, **options))
    apply(case.model, topk=3, tile_thw=tiny.TILE, gates="coarse_and_fine")
    case.model.load_state_dict(ours.state_dict())
    inputs = [case.inputs[name] for name in ("hidden_states", "timestep", "encoder_hidden_states")]
    assert tiny.difference(case.run(), ours(*inputs, topk=3)) < 1e-5
    # control: one gate's bias
    ours.blocks[1].to_gate_compress.bias[3] += 0.5
    assert tiny.difference(case.run(), ours(*inputs, topk=3)) > 1e-4


@torch.no_grad()
def test_a_missing_gate_is_zero_not_one():
    case = tiny.wan()
    apply(case.model, topk=3, tile_thw=tiny.TILE)
    without = case.run()
    remove(case.model)
    apply(case.model, topk=3, tile_thw=tiny.TILE, gates="coarse")
    assert tiny.difference(case.run(), without) < 1e-6
    for block in case.model.blocks:
        block.to_gate_compress.bias.fill_(1)
    assert tiny.difference(case.run(), without) > 1e-2


@torch.no_grad()
def test_saved_after_remove_is_the_model(tmp_path):
    case = tiny.wan()
    expected = case.run()
    apply(case.model, topk=2, tile_thw=tiny.TILE, gates="coarse")
    case.run()
    remove(case.model)
    case.model.save_pretrained(tmp_path)
    again, info = WanTransformer3DModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["unexpected_keys"]
    assert torch.equal(tiny.Case(again, case.inputs).run(), expected)


@torch.no_grad()
def test_a_copy_stands_on_its_own():
    case = tiny.wan()
    dense = case.run()
    apply(case.model, topk=3, tile_thw=tiny.TILE, gates="coarse")
    sparse = case.run()
    twin = tiny.Case(copy.deepcopy(case.model), case.inputs)
    for block in case.model.blocks:
        block.to_gate_compress.bias.fill_(1)
    assert torch.equal(twin.run(), sparse)
    remove(case.model)
    assert torch.equal(twin.run(), sparse)
    remove(twin.model)
    assert torch.equal(twin.run(), dense)
    assert not twin.model._forward_pre_hooks


@torch.no_grad()
def test_other_grids_follow():
    case = tiny.wan()
    apply(case.model, sparsity=0.5, tile_thw=tiny.TILE)
    case.run()
    latents = tiny.randn(2, 4, 1, 8, 12, seed=4)
    actual = case.run(hidden_states=latents)
    attention = applied_attention(case.model)
    assert (attention.describe()["grid_thw"], attention.describe()["num_tiles"], attention.describe()["topk"]) == (
        [1, 4, 6],
        4,
        2,
    )
    remove(case.model)
    with masked_attention((1, 4, 6), tiny.TILE, 2):
        expected = case.run(hidden_states=latents)
    assert tiny.difference(actual, expected) < 1e-5


@torch.no_grad()
def test_budgets_by_layer():
    case = tiny.wan()
    outs = {}
    for name, options in {
        "first_dense": dict(topk=3, dense_layers=(0,)),
        "by_layer": dict(topk=(tiny.TILES, 3)),
        "by_sparsity": dict(sparsity="0.75", dense_layers=(0,)),
        "last_dense": dict(topk=3, dense_layers=(1,)),
    }.items():
        apply(case.model, tile_thw=tiny.TILE, **options)
        outs[name] = case.run()
        remove(case.model)
    assert torch.equal(outs["first_dense"], outs["by_layer"])
    assert torch.equal(outs["first_dense"], outs["by_sparsity"])
    assert tiny.difference(outs["last_dense"], outs["first_dense"]) > 1e-3


@torch.no_grad()
def test_dense_steps_count_by_the_timestep():
    case = tiny.wan()
    apply(case.model, topk=3, tile_thw=tiny.TILE, dense_steps=2)
    attention = applied_attention(case.model)

    def is_dense(timestep: float | torch.Tensor) -> bool:
        case.run(timestep=torch.as_tensor(timestep).float().expand(2, *torch.as_tensor(timestep).shape))
        return attention.describe()["topk"] == tiny.TILES

    # each timestep twice, as classifier-free guidance does; then a second clip, and one that stops early
    assert [is_dense(t) for t in (1000, 1000, 800, 800, 500, 500, 10, 10)] == [True] * 4 + [False] * 4
    assert [is_dense(t) for t in (1000, 800, 500)] == [True, True, False]
    assert [is_dense(t) for t in (900, 700, 600)] == [True, True, False]
    # tokens of a given frame are clean from the start
    clean = torch.arange(105) < 35
    assert [is_dense(torch.where(clean, 0, t)) for t in (1000, 800, 500)] == [True, True, False]
    # and what is called dense is dense
    actual = case.run(timestep=torch.full((2,), 999.0))
    remove(case.model)
    assert tiny.difference(actual, case.run(timestep=torch.full((2,), 999.0))) < 1e-5


@torch.no_grad()
def test_a_factory_gives_each_layer_its_method():
    case = tiny.wan()
    dense = case.run()

    def factory(*, dim, num_heads, head_dim, layer_idx):
        layer = dict(dim=dim, num_heads=num_heads, head_dim=head_dim, layer_idx=layer_idx)
        return FullAttention(**layer) if layer_idx == 0 else VideoSparseAttention(**layer, tile_thw=tiny.TILE)

    apply(case.model, factory, topk=3)
    mixed = case.run()
    assert "blocks.1.to_gate_fine.weight" in case.model.state_dict()
    remove(case.model)
    apply(case.model, topk=3, tile_thw=tiny.TILE, dense_layers=(0,))
    assert tiny.difference(case.run(), mixed) < 1e-5
    assert tiny.difference(mixed, dense) > 1e-3


@torch.no_grad()
def test_bfloat16():
    case = tiny.wan()
    model = case.model.to(torch.bfloat16)
    inputs = {n: t.to(torch.bfloat16) if n != "timestep" else t for n, t in case.inputs.items()}
    expected = model(**inputs, return_dict=False)[0]
    apply(model, sparsity=0, tile_thw=tiny.TILE, gates="coarse")
    actual = model(**inputs, return_dict=False)[0]
    assert actual.dtype == torch.bfloat16
    assert tiny.difference(actual.float(), expected.float()) < 3e-2


WINDOW = {"window_thw": (3, 3, 3)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), "exactly one of topk and sparsity"),
        (dict(topk=2, sparsity=0.5), "exactly one of topk and sparsity"),
        (dict(sparsity=1), "sparsity=1.0: expected a number of at least 0 and below 1"),
        (dict(topk=0), "topk=0: expected an integer of at least 1, or null, got 0"),
        (dict(topk=(3, 2, 1)), "topk must have one entry for each of the 2 layers, got 3"),
        (dict(topk=(3,)), "topk must have one entry for each of the 2 layers, got 1"),
        (dict(topk=2, dense_layers=(2,)), r"dense_layers must be in 0\.\.1, got 2"),
        (dict(topk=2, dense_steps=-1), "dense_steps=-1: expected an integer of at least 0, got -1"),
        (
            dict(method="spargel", topk=2),
            "attention=spargel: unknown method, expected one of compressed_kv, .*, video_sparse",
        ),
        (dict(method="full", topk=2), "full attention keeps all tiles, got sparsity=None and topk=2"),
        (dict(method="full", tile_thw=(4, 4, 4)), r"tile_thw=\(4, 4, 4\) applies to video_sparse only, got full"),
        (
            dict(method="staged", topk=2),
            r"staged with these settings has parameters to train \(to_gate_compress\): load_sparse\(folder\) loads",
        ),
        (dict(method="staged", settings={"stages": "f"}), "StagedAttention needs exactly one of topk and sparsity"),
        (dict(method="compressed_kv", backend="gather"), "backend=gather does not apply to CompressedKV, which has no"),
        (
            dict(method="pooled_tail", topk=2, settings={"score": "subblock_softmax", "score_thw": (3, 2, 2)}),
            r"score_thw=\[3, ?2, ?2\]",
        ),
        (
            dict(method="neighborhood", settings={"window": 3}),
            r"settings of neighborhood: unknown \['window'\], expected some of window_thw, ",
        ),
        (dict(method="neighborhood", settings=WINDOW, topk=2), "NeighborhoodAttention selects no tiles, got topk=2"),
        (
            dict(method="neighborhood", settings={"window_thw": (3, 3)}),
            r"window_thw=\[3,3\]: expected a list of 3 values",
        ),
        (
            dict(method="neighborhood", settings=WINDOW, gates="coarse"),
            "gates=coarse applies to video_sparse only",
        ),
        (dict(topk=2, settings=WINDOW), r"settings=.* apply to named methods except video_sparse, got video_sparse"),
        (dict(topk=2, gates="fine"), "gates must be none, coarse or coarse_and_fine, got 'fine'"),
        (dict(topk=2, backend="cuda"), "backend must be one of .*, got 'cuda'"),
        (dict(topk=2, partition="ball"), "partition must be one of cube, .*, got 'ball'"),
        (dict(topk=2, tile_thw=(4, 4)), r"tile_thw must be three positive sizes, got \(4, 4\)"),
    ],
)
def test_bad_options_are_refused_and_nothing_changes(options, message):
    case = tiny.wan()
    before = dict(case.model.attn_processors)
    with pytest.raises(ValueError, match=message):
        apply(case.model, **options)
    assert all(processor is before[name] for name, processor in case.model.attn_processors.items())
    assert applied_attention(case.model) is None
    assert not case.model._forward_pre_hooks


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(topk=13), r"grid \(3, 5, 7\): topk=13 is above the number of tiles, 12"),
        (dict(sparsity=0.95), r"grid .*: sparsity=0\.95 leaves less than one of 12 tiles, at most 0\.9167"),
    ],
)
def test_a_budget_the_grid_cannot_give_is_refused(options, message):
    case = tiny.wan()
    apply(case.model, tile_thw=tiny.TILE, **options)
    with pytest.raises(ValueError, match=message):
        case.run()


def test_head_dim_a_named_backend_cannot_run_is_refused():
    model = tiny.wan(num_attention_heads=1, attention_head_dim=288).model
    with pytest.raises(ValueError, match="head dim of at most 256, got 288"):
        apply(model, topk=2, backend="triton")


def test_misuse_is_refused():
    case = tiny.wan()
    with pytest.raises(ValueError, match="has no attention method to remove"):
        remove(case.model)
    apply(case.model, topk=2)
    with pytest.raises(ValueError, match=r"already has an attention method, call remove\(\) first"):
        apply(case.model, topk=2)
    with pytest.raises(ValueError, match=r"describe\(\) needs a forward pass first"):
        applied_attention(case.model).describe()
    with pytest.raises(ValueError, match="outside of the transformer's forward"):
        case.model.blocks[0].attn1(torch.zeros(1, 105, 32))
    message = "WanTransformer3DModel, LTXVideo.*, CogVideoX.*, HunyuanVideoTransformer3DModel, .*, got Linear$"
    with pytest.raises(ValueError, match=message):
        apply(nn.Linear(2, 2), topk=2)
    remove(case.model)
    case.model.fuse_qkv_projections()
    with pytest.raises(ValueError, match="layer 0 has fused projections"):
        apply(case.model, topk=2)
    case.model.unfuse_qkv_projections()

    class Other:
        pass

    case.model.blocks[1].attn1.set_processor(Other())
    with pytest.raises(ValueError, match="layer 1: expected the processor WanAttnProcessor, got Other"):
        apply(case.model, topk=2)


@pytest.mark.parametrize("family", ["wan", "ltx", "cogvideox", "hunyuan"])
def test_what_is_done_to_a_model_after_apply_counts_or_is_refused(family):
    case = getattr(tiny, family)()
    model, dtype = case.model, case.model.dtype
    apply(model, topk=2)
    expected = case.run()
    ours = model.attn_processors
    if family != "hunyuan":
        # where it is no fusion
        model.fuse_qkv_projections()
        with pytest.raises(ValueError, match=r"layer 0 .*unfuse_qkv_projections\(\)"):
            case.run()
        model.unfuse_qkv_projections()
        assert tiny.difference(case.run(), expected) == 0
    # one processor is another one's: the model would go on without the method
    layer = applied_attention(model).layers[0]
    layer.attn.set_processor(layer.original)
    with pytest.raises(ValueError, match=r"layer 0 got the processor .* in place of its attention method"):
        case.run()
    model.set_attn_processor(ours)
    assert tiny.difference(case.run(), expected) == 0
    # other weights, as those of an adapter, and another dtype
    with torch.no_grad():
        layer.attn.to_q.weight.mul_(1.5)
    changed = case.run()
    assert tiny.difference(changed, expected) > 1e-5
    model.to(torch.float64).to(dtype)
    assert tiny.difference(case.run(), changed) < 1e-5
    if family == "wan":
        peft = pytest.importorskip("peft")
        model.add_adapter(peft.LoraConfig(r=2, target_modules=["to_q"], init_lora_weights=False))
        assert tiny.difference(case.run(), changed) > 1e-5
    remove(model)
