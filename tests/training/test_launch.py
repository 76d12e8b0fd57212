from __future__ import annotations

import shlex

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from vsa.training.hydra_guard import composed
from vsa.training.launch import launch, refuse_unreadable


@pytest.fixture(autouse=True)
def without_tracebacks(monkeypatch):
    # `launch` sets it
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("callbacks.samples.prompts=[\u4e00\u53ea\u732b, a caf\u00e9]", ["\u4e00\u53ea\u732b", "a caf\u00e9"]),
        ("init_from=\u6a21\u578b", "\u6a21\u578b"),
        ('run=a"b', "ab"),
        ("run=it's (new)", "it's (new)"),
        ("run=a=b", "a=b"),
    ],
)
def test_text_that_hydra_cannot_read_is_told_as_it_is_typed(word, value, capsys):
    with pytest.raises(SystemExit):
        launch([word])
    (line,) = capsys.readouterr().err.splitlines()
    start, _, typed = line.partition(": text with such characters is typed in quotes: ")
    assert start == f"error: {word}"
    # what is told is read
    (argument,) = shlex.split(typed)
    assert OverridesParser.create().parse_override(argument).value() == value


def test_the_number_of_a_list_item_is_told_behind_a_dot(capsys):
    with pytest.raises(SystemExit):
        launch(["optim.betas[0]=0.5"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: optim.betas[0]=0.5: numbers of list items follow a dot: optim.betas.0=0.5"
    # what is told is read
    assert composed("optim.betas.0=0.5").optim.betas[0] == 0.5


def test_a_word_without_a_key_is_told_with_one(capsys):
    with pytest.raises(SystemExit):
        launch(["quickstart"])
    assert capsys.readouterr().err == "error: quickstart: expected KEY=VALUE, such as experiment=quickstart\n"
    with pytest.raises(ValueError, match=r"^trainer\.max_steps: expected KEY=VALUE, such as trainer\.max_steps=VALUE$"):
        refuse_unreadable(["trainer.max_steps"])
