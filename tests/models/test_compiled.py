from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from vsa_kernels import residual_norm

from tests.tiny_models import LEVELS, SPARSE, assert_equal_runs, make_inputs, make_model
from vsa.attention.video_sparse import VideoSparseAttention

# the layouts here are ragged on purpose
pytestmark = pytest.mark.filterwarnings("ignore:tiles .* full")


def count_compiled_graphs():
    """A backend that runs graphs as they are and counts them: one graph per compilation."""
    graphs = []

    def backend(graph, _example_inputs):
        graphs.append(graph)
        return graph.forward

    return graphs, backend


@pytest.mark.parametrize(("training", "start"), [(True, "all"), pytest.param(False, 2, marks=pytest.mark.slow)])
def test_topk_changes_do_not_recompile(training, start):
    torch._dynamo.reset()
    sizes = dict(num_attention_heads=1, attention_head_dim=6, ffn_dim=8, num_layers=2, in_channels=2, out_channels=2)
    model = make_model(partial(VideoSparseAttention, tile_thw=(1, 1, 1)), **sizes)
    reference = copy.deepcopy(model)
    graphs, backend = count_compiled_graphs()
    for block in model.blocks:
        block.compile(fullgraph=True, backend=backend)
    latent = (2, 2, 14, 16)
    inputs = make_inputs(batch=1, latent=latent)
    num_tiles = model.layout_for(latent).num_video_tiles
    assert num_tiles == 112
    with torch.set_grad_enabled(training):
        # an annealing run starts at all tiles, where the fine stage is dense; top-k 1 is a constant to dynamo
        for topk in (num_tiles if start == "all" else start, 3):
            model(*inputs, topk=topk)
        # one graph, then one whose top-k is a symbol; not one per layer
        assert len(graphs) == 2
        for topk in range(4, 4 + 100, 6):
            out = model(*inputs, topk=topk)
        assert len(graphs) == 2
        torch.testing.assert_close(out, reference(*inputs, topk=topk))
        # a top-k per layer is no exception
        model(*inputs, topk=[7, 5])
        assert len(graphs) == 2
        # the control: the counter does see a recompilation
        for block in model.blocks:
            block.norm1.eps = 1e-5
        model(*inputs, topk=4)
        assert len(graphs) > 2
    torch._dynamo.reset()


@pytest.mark.slow
def test_a_second_bucket_shape_takes_one_more_graph():
    torch._dynamo.reset()
    model = make_model(partial(VideoSparseAttention, tile_thw=(1, 1, 1)), num_attention_heads=1, ffn_dim=8)
    reference = copy.deepcopy(model)
    graphs, backend = count_compiled_graphs()
    model.compile_blocks(backend=backend)
    # 48, 96 and 30 tiles
    first, second, third = ((6, 2, 8, 12), (6, 4, 12, 8), (6, 2, 6, 10))
    for topk in (5, 3):
        model(*make_inputs(latent=first), topk=topk)
    assert len(graphs) == 2
    model(*make_inputs(latent=second), topk=3)
    # one for all layers, though the first one reads the embedding and the others a block
    assert len(graphs) == 3
    for latent, topk in ((second, 7), (first, 4), (third, 6)):
        inputs = make_inputs(latent=latent)
        torch.testing.assert_close(model(*inputs, topk=topk), reference(*inputs, topk=topk))
    assert len(graphs) == 3
    torch._dynamo.reset()


@pytest.mark.parametrize("level", LEVELS)
def test_compile_blocks_shares_one_graph_and_equals_eager(level):
    torch._dynamo.reset()
    plain, compiled = make_model(SPARSE), make_model(SPARSE)
    graphs, backend = count_compiled_graphs()
    compiled.compile_blocks(backend=backend)
    compiled.activation_checkpointing = level
    kwargs = {"topk": 3}
    assert_equal_runs(plain, compiled, make_inputs(), tolerance=1e-6, kwargs_a=kwargs, kwargs_b=kwargs)
    assert len(graphs) == 1
    # a copy made after compiling runs its own weights too
    twin = copy.deepcopy(compiled)
    for parameter in compiled.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(twin(*make_inputs(), topk=3), plain(*make_inputs(), topk=3))
    # a recorder is Python: those blocks run eagerly instead of breaking the graph
    layers = []
    twin(*make_inputs(), topk=3, recorder=lambda layer, _tensors: layers.append(layer))
    assert layers == [0, 1, 2]
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_networks_of_several_widths_share_the_compiled_body(backend):
    """A distillation has a teacher of its own width; from the second one on, widths may be symbols."""
    torch._dynamo.reset()
    for heads, batch in ((5, 2), (3, 1), (2, 3)):
        plain, compiled = (make_model(SPARSE, num_attention_heads=heads, num_layers=1) for _ in range(2))
        compiled.compile_blocks(backend=backend)
        kwargs = {"topk": 3}
        assert_equal_runs(plain, compiled, make_inputs(batch=batch), tolerance=1e-6, kwargs_a=kwargs, kwargs_b=kwargs)
    torch._dynamo.reset()


@pytest.mark.slow
def test_inductor_blocks_equal_eager(device):
    torch._dynamo.reset()
    plain, compiled = (make_model(SPARSE, device=device, num_layers=1) for _ in range(2))
    compiled.compile_blocks()
    for topk in (2, 3, 5):
        kwargs = {"topk": topk}
        assert_equal_runs(plain, compiled, make_inputs(device), tolerance=1e-5, kwargs_a=kwargs, kwargs_b=kwargs)
    torch._dynamo.reset()


@pytest.mark.parametrize("norms", ["reference", None])
def test_compiled_gradients_of_one_sample_are_those_of_eager_blocks(norms, device, monkeypatch):
    """The pattern of pytorch's issue 193061: shift and scale of torch's norms are slices of one parameter."""
    if device.type == "cpu":
        pytest.skip("torch generates the kernels in question for GPUs")
    monkeypatch.setattr("vsa.models.embeddings.residual_norm", partial(residual_norm, backend=norms))
    torch._dynamo.reset()
    wide = {"num_attention_heads": 8, "attention_head_dim": 64, "ffn_dim": 1024, "num_layers": 2}
    plain, compiled = (make_model(SPARSE, device=device, **wide) for _ in range(2))
    compiled.compile_blocks()
    inputs, grads = make_inputs(device, batch=1, latent=(6, 16, 32, 32)), []
    # memory that nobody writes is not by chance the gradient of a call before
    filler = torch.full((1 << 28,), torch.nan, device=device)
    del filler
    for model in (plain, compiled):
        model(*inputs, topk=4).square().mean().backward()
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, expected in grads[0].items():
        error = (grads[1][name] - expected).norm() / expected.norm()
        assert error < 1e-3, f"{name} is off by {error}"
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_blocks_do_without_reductions_in_mixed_order(monkeypatch):
    """A CPU cannot show wrong gradients of this option, the test before needs a GPU."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    settings = []

    def run(*_):
        settings.append(config.triton.mix_order_reduction)
        raise RuntimeError("no code is generated")

    monkeypatch.setattr(config.triton, "mix_order_reduction", True)
    monkeypatch.setattr(config, "fx_graph_cache", False)
    monkeypatch.setattr(GraphLowering, "run", run)
    torch._dynamo.reset()
    model = make_model(SPARSE, num_layers=1)
    model.compile_blocks()
    with pytest.raises(RuntimeError, match="no code is generated"):
        model(*make_inputs(), topk=4)
    assert settings == [False]
    torch._dynamo.reset()
