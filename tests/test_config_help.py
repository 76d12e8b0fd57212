"""`vsa config`: every option of every group with type, default and meaning."""

from __future__ import annotations

import pytest

from vsa.cli.config import config
from vsa.config_help import CONFIGS, choices, options


def test_every_file_is_listed_with_what_it_is_for():
    assert {f"{group}/{file}" for group, files in choices().items() for file in files} == {
        f"{path.parent.name}/{path.stem}" for path in CONFIGS.glob("*/*.yaml")
    }
    assert [f"{group}/{file}" for group, files in choices().items() for file, about in files.items() if not about] == []


def test_options_have_type_default_and_meaning():
    by_key = {option.key: option for option in options("task/pretrain")}
    clip = by_key["task.grad_clip"]
    assert (clip.type, clip.default) == ("a number of at least 0", "1.0")
    assert clip.meaning == "largest global gradient norm; 0 disables clipping."
    # of a node inside, and with what a base class says of it
    assert by_key["task.objective.shift.kind"].type == "one of constant, table"
    assert by_key["task.latent_scale"].meaning.startswith("divide latents by the standard deviation")
    # what the program gives is no option
    assert "task.model" not in by_key


@pytest.mark.parametrize(
    "group", ["run", "attention", "sparsity/staircase", "data/toy", "callbacks", "trainer", "logger/wandb"]
)
def test_every_option_of_ours_says_what_it_means(group):
    entries = options(group)
    assert entries
    assert [option.key for option in entries if not option.meaning] == []


def test_an_option_that_no_file_mentions_is_listed_too():
    (stats,) = [option for option in options("data/folder") if option.key == "data.stats"]
    assert stats.default == "data"
    # what the default does, and what the other choice is for
    assert "held-out ones too (data)" in stats.meaning
    assert "nothing held out influences training (train)" in stats.meaning


@pytest.mark.parametrize(
    ("group", "message"),
    [
        ("sparsty", "did you mean sparsity"),
        ("task/destill", "did you mean task/distill"),
        ("x", "one of run, "),
    ],
)
def test_an_unknown_group_is_refused(group, message):
    with pytest.raises(ValueError, match=message):
        config(group)


def test_the_command_prints_a_table(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    config(None)
    assert "quickstart" in capsys.readouterr().out
    config("optim")
    out = capsys.readouterr().out
    assert "optim.lr" in out
    assert "a number above 0" in out
