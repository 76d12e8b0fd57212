"""The worked examples of CONTRIBUTING.md do what their text says."""

import re
from pathlib import Path

import torch

from vsa.attention.context import AttnContext
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Segment
from vsa.data.codecs import check_frames

TEXT = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text()


def example(name):
    """The class that a Python block defines."""
    (block,) = (b for b in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL) if f"class {name}" in b)
    scope = {}
    exec(block, scope)
    return scope[name]


def test_the_attention_method_equals_a_dense_mask():
    method = example("NeighbourAttention")(dim=24, num_heads=2, head_dim=12, reach=1, tile_thw=(2, 2, 2))
    layout = method.layout([Segment((3, 5, 4))])
    generator = torch.Generator().manual_seed(0)
    shape = (2, layout.num_tokens, 2, 12)
    q, k, v, grad = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    tile = torch.repeat_interleave(torch.arange(layout.blocks.num), layout.blocks.sizes.long())

    def dense(reach):
        mask = (tile[:, None] - tile).abs() <= reach
        heads_first = (x.transpose(1, 2) for x in inputs)
        out = torch.nn.functional.scaled_dot_product_attention(*heads_first, attn_mask=mask).transpose(1, 2)
        return out, *torch.autograd.grad(out, inputs, grad)

    ctx = AttnContext(layout=layout, topk=KeptTiles.of(1))
    out = method.attend_combine(q, k, v, method.project(q.flatten(2)), ctx)
    result = (out, *torch.autograd.grad(out, inputs, grad))
    torch.testing.assert_close(result, dense(1))
    assert all(not torch.allclose(a, b) for a, b in zip(result, dense(2), strict=True))
    assert method.pairs(layout, 1) == ((tile[:, None] - tile).abs() <= 1).sum()


def test_the_codec_keeps_its_protocol():
    codec = example("BlockColour")()
    video = torch.randint(0, 256, (3, 2, 3, 3), dtype=torch.uint8).repeat_interleave(8, 1).repeat_interleave(8, 2)
    latents = codec.encode(video)
    check_frames(codec, 3)
    assert latents.shape == codec.latent_shape(*video.shape[:3])
    assert torch.equal(codec.decode(latents), video)
