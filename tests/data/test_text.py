from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vsa.data.text import HashedNgramEncoder

ENCODER = HashedNgramEncoder()


@given(caption=st.text(max_size=80))
@settings(max_examples=60, deadline=None)
def test_every_caption_gives_unit_tokens(caption: str) -> None:
    tokens = ENCODER.encode(caption)
    assert 1 <= tokens.shape[0] <= 16
    assert tokens.shape[1] == 64
    assert tokens.dtype == torch.float32
    torch.testing.assert_close(tokens.square().mean(1), torch.ones(len(tokens)))
    assert torch.equal(tokens, HashedNgramEncoder().encode(caption))


def test_one_token_a_word_and_longer_captions_are_cut() -> None:
    assert ENCODER.encode("a red circle").shape == (3, 64)
    assert ENCODER.encode(" ".join(["word"] * 40)).shape == (16, 64)
    assert HashedNgramEncoder(dim=700, max_tokens=2).encode("one two three").shape == (2, 700)


def test_captions_without_words_are_the_null_embedding() -> None:
    null = ENCODER.encode("")
    assert null.shape == (1, 64)
    assert torch.equal(ENCODER.encode(" ... !"), null)
    assert not torch.equal(ENCODER.encode("null"), null)


def test_case_and_punctuation_do_not_matter_but_words_and_order_do() -> None:
    base = ENCODER.encode("a red circle")
    assert torch.equal(ENCODER.encode("A red, CIRCLE!"), base)
    assert not torch.equal(ENCODER.encode("a red square"), base)
    assert not torch.equal(ENCODER.encode("a circle red"), base)


def test_similar_words_correlate_more_than_different_ones() -> None:
    # wide: the chance correlation of two words falls with the square root of the width
    encoder = HashedNgramEncoder(dim=2048)

    def cosine(a: str, b: str) -> float:
        x, y = encoder.encode(a)[0], encoder.encode(b)[0]
        return float(x @ y / 2048)

    similar = [cosine("moving", "moved"), cosine("circle", "circles"), cosine("green", "greenish")]
    different = [cosine("red", "square"), cosine("left", "quickly"), cosine("up", "triangle")]
    assert min(similar) > max(different)
    assert max(similar) < 0.9


def test_table_is_the_same_on_every_machine() -> None:
    # stored data sets depend on these: changing them means changing the version inside the hash on purpose
    assert ENCODER.hash == "8e6260fe3f305804"
    assert HashedNgramEncoder(dim=65).hash != ENCODER.hash


def test_refuses_empty_sizes() -> None:
    with pytest.raises(ValueError, match="0"):
        HashedNgramEncoder(dim=0)
