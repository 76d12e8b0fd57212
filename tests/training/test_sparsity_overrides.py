"""What a person types about tiles that are kept is refused where attention selects none; shared files may say it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hydra.types import RunMode

import vsa.training.train as run_module
from vsa.config import attention_config
from vsa.training.sparsity_overrides import NOTHING, SparsityOverrides, sets_tiles_kept, without_tiles_kept

UNSELECTIVE = {
    "full": (),
    "neighborhood": ("window_thw=[2,2,2]",),
    "spatial_temporal": (),
    "spatial_full": (),
    "strided_window": (),
    "compressed_kv": (),
    "staged": ("stages=c_l",),
}


def hydra(*overrides: str, mode: RunMode = RunMode.RUN, attention: str = "full") -> Any:
    return SimpleNamespace(
        mode=mode,
        overrides=SimpleNamespace(task=list(overrides)),
        runtime=SimpleNamespace(choices={"attention": attention}),
    )


@pytest.mark.parametrize(
    ("override", "sets"),
    [
        ("sparsity.topk=8", True),
        ("++sparsity.topk=8", True),
        ("~sparsity.topk", True),
        ("sparsity=constant_90", True),
        ("sparsity.layer_topk={0:3}", True),
        ("sparsity.dense_layers=[0]", True),
        ("+sparsity.denoising.topk_ranges=[[0,0.3,64]]", True),
        ("sparsity.denoising.refresh=4", True),
        # dense steps and layers are dense in every method
        ("sparsity.denoising.dense_steps=2", False),
        ("++sparsity.denoising.dense_layers=[1]", False),
        ("denoising=plan", False),
        ("callbacks.samples.sparsity=[dense]", False),
        ("attention.tile_thw=[2,2,2]", False),
    ],
)
def test_which_settings_are_about_the_tiles_that_are_kept(override, sets):
    assert sets_tiles_kept(override) == sets
    assert without_tiles_kept(["seed=1", override]) == (("seed=1",) if sets else ("seed=1", override))


def config(training: Any, attention: str, *own: str) -> Any:
    """That of a tiny run of which nothing but the first checks is run."""
    cfg = training.config("sparsity.sparsity=null", "sparsity.topk=2", "trainer.max_steps=1")
    cfg.attention = attention_config(attention, own, tile_thw=(1, 2, 2))
    return cfg


@pytest.mark.parametrize("attention", UNSELECTIVE)
def test_a_typed_topk_is_refused_before_anything_is_written(training, attention):
    cfg = config(training, attention, *UNSELECTIVE[attention])
    settings = SparsityOverrides.of(hydra("seed=0", "sparsity.sparsity=null", "++sparsity.topk=2", attention=attention))
    with pytest.raises(ValueError, match=f"^sparsity.topk=2 does not apply to attention={attention}: it selects no"):
        run_module.train(cfg, settings)
    assert not training.output.exists()


def test_a_rule_without_a_topk_is_named(training):
    settings = SparsityOverrides.of(hydra("++sparsity.topk=2", attention="video_sparse"))
    message = r"^sparsity\.topk=2 does not apply to attention=video_sparse: its rule=top_p has no top-k$"
    with pytest.raises(ValueError, match=message):
        run_module.train(config(training, "video_sparse", "rule=top_p", "top_p=0.9"), settings)


@pytest.mark.parametrize(
    ("attention", "words"),
    [
        ("video_sparse", ("sparsity.topk=2",)),
        ("staged", ("sparsity.topk=2",)),
        ("neighborhood", ("sparsity.denoising.dense_steps=2", "sparsity.topk=null")),
    ],
)
def test_what_the_attention_has_a_use_for_is_not_refused(training, monkeypatch, attention, words):
    def after_the_checks(cfg: Any) -> None:
        raise ValueError("nothing was refused")

    monkeypatch.setattr(run_module, "_tell_export", after_the_checks)
    with pytest.raises(ValueError, match="nothing was refused"):
        run_module.train(
            config(training, attention), SparsityOverrides.of(hydra("seed=0", *words, attention=attention))
        )


def test_a_run_of_its_own_config_has_no_groups():
    cfg = hydra("name=again")
    cfg.runtime.choices = {}
    SparsityOverrides.of(cfg).refuse_without_selection()


@pytest.mark.parametrize("word", ["sparsity.denoising.refresh=2", "sparsity.denoising.shared_cache=true"])
def test_selections_without_a_topk_may_be_kept(word):
    settings = SparsityOverrides.of(hydra(word, attention="sparge"))
    settings.refuse_without_selection(predicts=True)
    assert without_tiles_kept([word, "sparsity.topk=2"], predicts=True) == (word,)
    with pytest.raises(ValueError, match=r"^sparsity\.topk=2 does not apply to attention=sparge: it has no top-k$"):
        SparsityOverrides.of(hydra("sparsity.topk=2", attention="sparge")).refuse_without_selection(predicts=True)
    with pytest.raises(ValueError, match=r"does not apply to attention=sparge: its rule=cdf has no top-k$"):
        SparsityOverrides.of(hydra("sparsity.topk=2", attention="sparge")).refuse_without_selection(
            predicts=True, rule="cdf"
        )
    with pytest.raises(ValueError, match="does not apply to attention=sparge"):
        settings.refuse_without_selection()


def test_jobs_of_one_command_share_what_only_some_have_a_use_for():
    words = ("attention=full", "sparsity.topk=2")
    assert SparsityOverrides.of(hydra(*words, mode=RunMode.MULTIRUN)) == NOTHING
    NOTHING.refuse_without_selection()
    assert SparsityOverrides.of(hydra(*words)) == SparsityOverrides(overrides=("sparsity.topk=2",), attention="full")
