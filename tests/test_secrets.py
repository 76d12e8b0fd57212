"""Which names are those of secrets, and that their values stay out of texts and configs."""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from vsa.config import resolved
from vsa.secrets import MARKER, SHORTEST, is_secret_name, known_secrets, masked, without_secrets

CANARY = "c4n4ry-0f-a-k3y"
CONFIGS = Path(__file__).parents[1] / "configs"


@pytest.mark.parametrize(
    "name",
    [
        *("WANDB_API_KEY", "wandb_api_key", "apiKey", "logger.x.api_key", "HF_TOKEN", "hfToken", "GITHUB_TOKEN"),
        *("AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID", "password", "DB_PASS", "DB_PWD", "credentials", "secret"),
    ],
)
def test_names_of_secrets(name):
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name",
    [
        *("token_budget", "sample_token_budget", "tokenizer", "max_tokens", "q_tokens", "key", "keys", "PWD", "OLDPWD"),
        *("AWS_WEB_IDENTITY_TOKEN_FILE", "secret_path", "pass_through", "GPG_KEY", "keep", ""),
    ],
)
def test_other_names(name):
    assert not is_secret_name(name)


def test_no_setting_of_ours_is_taken_for_a_secret():
    def names(node: Any):
        if isinstance(node, dict):
            yield from map(str, node)
        for inner in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
            yield from names(inner)

    keys = {name for path in CONFIGS.rglob("*.yaml") for name in names(yaml.safe_load(path.read_text()))}
    assert len(keys) > 100
    assert not [name for name in keys if is_secret_name(name)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"+x.api_key={CANARY}: unknown setting", "+x.api_key=<secret>: unknown setting"),
        (f"a.api_key={CANARY}: expected text, got '{CANARY}'", "a.api_key=<secret>: expected text, got '<secret>'"),
        (f'{{"password": "two {CANARY}"}}', '{"password": <secret>}'),
        (f"in '{{x:{{api_key:{CANARY}}}}}'", "in '{x:{api_key:<secret>}}'"),
        ("https://me:pw@host/x?token=abc&n=1", "https://<secret>@host/x?token=<secret>&n=1"),
        ("token_budget=12345678 of the tokenizer: fast", "token_budget=12345678 of the tokenizer: fast"),
        ("s3://bucket/a@b and me@host", "s3://bucket/a@b and me@host"),
    ],
)
def test_texts(text, expected):
    assert without_secrets(text, ()) == expected
    # an error is masked where it is raised and again where it is shown
    assert without_secrets(expected, ()) == expected


def _slowly(text: str) -> str:
    """The text in which values are masked that follow a name of a secret, by a search from every place."""
    marked, i = [], 0
    while i < len(text):
        value = _value_after_name(text, i)
        if value is None:
            i += 1
            continue
        begin, end = value
        marked.append((begin, end))
        i = end
    values = [text[begin:end].strip("\"'") for begin, end in marked]
    for begin, end in reversed(marked):
        text = text[:begin] + MARKER + text[end:]
    for value in sorted({v for v in values if len(v) >= SHORTEST and v != MARKER}, key=lambda v: (-len(v), v)):
        text = text.replace(value, MARKER)
    return text


def _value_after_name(text: str, i: int) -> tuple[int, int] | None:
    """Begin and end of the value whose name begins at i."""

    def inside(k: int) -> bool:
        return 0 <= k < len(text) and (text[k].isalnum() or text[k] in "_.@/-")

    if inside(i - 1) or not inside(i):
        return None
    end = next(k for k in range(i, len(text) + 1) if not inside(k))
    if text[end - 1] in ".@/-" or not is_secret_name(text[i:end]):
        return None
    end += text[end : end + 1] in ("'", '"')
    rest = text[end:].lstrip()
    if rest[:1] not in ("=", ":") or not rest:
        return None
    rest = rest[1:].lstrip()
    begin = len(text) - len(rest)
    if rest[:1] in ("'", '"') and rest.find(rest[0], 2) > 0:
        return begin, begin + rest.find(rest[0], 2) + 1
    length = next((k for k, letter in enumerate(rest) if letter.isspace() or letter in ",;&\"'])}"), len(rest))
    length = len(rest[:length].rstrip(":."))
    return (begin, begin + length) if length else None


def test_random_texts_lose_what_a_slow_search_finds():
    pieces = ("token", "api_key", "b", "x.", "aB", "=", ":", " ", "'", '"', "/", ".", "-", ",", "]", "1", "__")
    draw, masked_texts = random.Random(0), 0
    for _ in range(20_000):
        text = "".join(draw.choices(pieces, k=draw.randint(1, 12)))
        expected = _slowly(text)
        masked_texts += expected != text
        assert without_secrets(text, ()) == expected, text
    # the control: a good part of the texts has something to lose
    assert masked_texts > 500


LONG = 40_000


@pytest.mark.parametrize(
    "piece", ["a", "a/", "aB", "a.b-", "x:", "token:", "://", "k='", " ", "A", "w://a", "token=''"]
)
def test_long_texts_take_no_time(piece):
    text = piece * (LONG // len(piece))
    began = time.process_time()
    for end in ("", "=", "a", " token=12345678"):
        without_secrets(text + end, ())
    # a search that goes back takes minutes
    assert time.process_time() - began < 2


def test_secrets_of_environment_and_command_line_are_found(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", CANARY)
    monkeypatch.setenv("MY_TOKEN_BUDGET", "an innocent value")
    monkeypatch.setenv("SHORT_TOKEN", "x" * (SHORTEST - 1))
    monkeypatch.setattr(sys, "argv", ["train.py", "+a.hf_token='typed-in-here'", "name=my-run-name"])
    assert {CANARY, "typed-in-here"} <= set(known_secrets())
    text = f"{CANARY} typed-in-here an innocent value {'x' * (SHORTEST - 1)} my-run-name"
    assert without_secrets(text) == f"{MARKER} {MARKER} an innocent value {'x' * (SHORTEST - 1)} my-run-name"


def test_a_caption_names_no_secrets(monkeypatch):
    monkeypatch.setenv("MY_API_KEY", CANARY)
    caption = f'a sign that says "secret: keep out" and {CANARY}'
    assert without_secrets(caption, named=False) == f'a sign that says "secret: keep out" and {MARKER}'
    # the control
    assert "keep" not in without_secrets(caption)


def test_of_two_overlapping_secrets_nothing_stays(monkeypatch):
    monkeypatch.setenv("A_TOKEN", "abcdefgh")
    monkeypatch.setenv("B_TOKEN", "abcdefgh-and-more")
    assert without_secrets("x abcdefgh-and-more") == f"x {MARKER}"


def test_a_config_is_masked_by_name_and_wherever_the_value_stands_again(monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "vsa.training")
    config = {
        "_target_": "vsa.training.modules.x",
        "api_key": CANARY,
        "login": {"password": 12345678, "password_file": "a", "token": None, "secret": True},
        "credentials": {"user": "me"},
        "prompts": [f"a {CANARY} circle", "password"],
        "pin": 12345678,
        "lr": 0.1,
    }
    assert masked(config) == {
        # what a class is called is no secret, whatever an environment holds
        "_target_": "vsa.training.modules.x",
        "api_key": MARKER,
        "login": {"password": MARKER, "password_file": "a", "token": None, "secret": True},
        "credentials": MARKER,
        "prompts": [f"a {MARKER} circle", "password"],
        "pin": MARKER,
        "lr": 0.1,
    }


def test_a_resume_does_not_take_a_secret_for_a_change():
    before, now, other = (
        resolved(OmegaConf.create({"callbacks": {"x": {"api_key": key, "every": every}}}))
        for key, every in ((CANARY, 1), ("another-value", 1), (CANARY, 2))
    )
    assert before == now == resolved(before)
    assert before != other
    assert CANARY not in str(before)
