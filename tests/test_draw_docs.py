"""The pictures of the attention methods show the weights that the methods compute."""

import pytest
import torch

from scripts.draw_docs import GRID, METHODS, attention_weights, parse_args
from vsa.evaluation.comparison.synthetic import draw_captures


@pytest.fixture(scope="module")
def qk():
    tokens = GRID[0] * GRID[1] * GRID[2]
    fields = draw_captures(GRID, heads=1, head_dim=tokens, seed=0).items[0]
    return fields.q, fields.k


def dense(q, k):
    logits = q[0, :, 0].double() @ k[0, :, 0].double().T / q.shape[-1] ** 0.5
    return logits.softmax(-1)


def test_dense_weights_are_the_softmax(qk):
    weights = attention_weights("full", *qk)
    torch.testing.assert_close(weights.double(), dense(*qk), rtol=0, atol=1e-5)
    # control
    assert (attention_weights(METHODS["neighborhood"], *qk) - weights).abs().max() > 1e-2


def test_a_window_is_the_softmax_of_its_tokens(qk):
    weights = attention_weights(METHODS["neighborhood"], *qk)
    place = torch.stack(torch.meshgrid(*(torch.arange(n) for n in GRID), indexing="ij"), -1).flatten(0, 2)
    size, window = torch.tensor(GRID), torch.tensor([3, 5, 5])
    # shifted inside at the edges
    first = (place - window // 2).clamp_min(0).minimum(size - window)
    inside = ((place >= first[:, None]) & (place < (first + window)[:, None])).all(-1)
    expected = dense(*qk) * inside
    torch.testing.assert_close(weights.double(), expected / expected.sum(-1, keepdim=True), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_that_is_drawn_gives_weights(name, qk):
    weights = attention_weights(METHODS[name], *qk)
    torch.testing.assert_close(weights.sum(-1), torch.ones(len(weights)), rtol=0, atol=1e-4)
    assert weights.min() > -1e-6
    assert (name == "full") == bool((weights > 0).all() and torch.allclose(weights.double(), dense(*qk), atol=1e-5))


def test_arguments():
    args = parse_args(["selection", "RUN", "CLIP.mp4", "OUT.gif", "--heads", "1:2", "0:1"])
    assert args.heads == [(1, 2), (0, 1)]
    with pytest.raises(SystemExit):
        parse_args(["methods"])
