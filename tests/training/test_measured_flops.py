"""Pairs of rules without a fixed count, against dense masks of the lists, on a grid with ragged tiles."""

from __future__ import annotations

import signal

import pytest
import torch

from tests.training.test_resume import SignalAt, assert_same
from vsa.attention.context import AttnContext
from vsa.models.network import Network

RULES = {
    "sparge": (
        "attention=sparge",
        "~attention.tile_thw",
        "attention.q_tokens=8",
        "attention.kv_tokens=4",
        "attention.tau=0.5",
        "attention.theta=-1",
        "attention.allow_training=true",
    ),
    "top_p": ("attention=video_sparse", "attention.rule=top_p", "attention.top_p=0.5", "attention.over=head"),
    # beside an annealed top-k
    "larger_of_both": (
        "attention=pooled_tail",
        "attention.rule=larger_of_both",
        "attention.top_p=0.4",
        "sparsity=linear",
        "sparsity.topk=null",
        "sparsity.dense_steps=1",
        "sparsity.total_steps=4",
    ),
}


@pytest.fixture
def counted(monkeypatch):
    """Pairs of every counted list, by a dense mask of its tokens."""
    found, count = [], AttnContext.count

    def watch(ctx, index):
        count(ctx, index)
        if ctx.listed is not None:
            mask = index.to_dense(ctx.layout.kv_blocks.num)
            for dim, blocks in ((2, ctx.layout.video_blocks), (3, ctx.layout.kv_blocks)):
                mask = mask.repeat_interleave(blocks.sizes, dim=dim)
            found.append(int(mask.sum()))

    monkeypatch.setattr(AttnContext, "count", watch)
    return found


@pytest.mark.parametrize(
    "overrides",
    [RULES["top_p"], *(pytest.param(RULES[name], marks=pytest.mark.slow) for name in ("sparge", "larger_of_both"))],
    ids=["top_p", "sparge", "larger_of_both"],
)
def test_the_pairs_of_lists_are_counted_logged_and_resumed(training, counted, overrides):
    settings = (*overrides, "trainer.max_steps=6", "trainer.log_every_n_steps=3", "trainer.accumulate_grad_batches=2")
    trainer = training(*settings, "run=straight")
    model, straight = trainer.model.model, training.last("straight").state
    # two micro-batches in six steps, two layers; not the validation
    assert len(counted) == 24
    assert straight["flops_measured"] == 14 * model.head_dim * sum(counted)
    rows = training.metrics("straight")
    layout = model.layout_for(tuple(straight["latent_shapes"][0]))
    dense = len(counted) * 2 * model.num_heads * layout.num_tokens**2
    assert 0.05 < sum(counted) / dense < 0.95
    for step, part in ((3, counted[:12]), (6, counted[12:])):
        others = straight["flops_total"] * step / 6
        expected = others + 14 * model.head_dim * sum(counted[: 4 * step])
        assert float(rows[step]["throughput/flops_total"]) == pytest.approx(expected, rel=1e-8)
        assert float(rows[step]["sparsity/measured_density"]) == pytest.approx(2 * sum(part) / dense, rel=1e-8)
    # between two log lines
    with pytest.raises(SystemExit):
        training(*settings, callbacks=(SignalAt(7, signal.SIGTERM),))
    assert training.last().step == 4
    training(*settings, "ckpt_path=last")
    assert_same(training.tensors(), training.tensors("straight"))
    names = "flops_measured", "flops_total", "pairs_measured"
    assert [training.last().state[name] for name in names] == [straight[name] for name in names]
    for name in ("throughput/flops_total", "sparsity/measured_density"):
        assert training.metrics()[6][name] == rows[6][name]


def test_a_run_goes_on_with_its_rule_alone(training):
    settings = (*RULES["top_p"], "trainer.max_steps=1")
    training(*settings)
    for other in ("attention.top_p=0.4", "attention.over=layer"):
        key, _, value = other.partition("=")
        with pytest.raises(ValueError, match=rf"was trained with {key}=.*, the settings have {value}"):
            training(*settings, other, "trainer.max_steps=2", "ckpt_path=last")


@pytest.mark.parametrize("level", ["attention", "attention_mlp", "full"])
def test_what_is_computed_again_counts_once(training, counted, level):
    settings = (*RULES["sparge"], "trainer.max_steps=2")
    training(*settings, "run=none")
    once = sum(counted)
    training(*settings, f"task.parallel.activation_checkpointing={level}")
    # the control: lists were made again
    assert sum(counted) > 2 * once
    assert training.last().state["flops_measured"] == training.last("none").state["flops_measured"]


def test_a_measured_budget_ends_a_run(training, monkeypatch):
    settings = (*RULES["sparge"], "trainer.log_every_n_steps=2")
    training(*settings, "run=steps", "trainer.max_steps=4")
    state = training.last("steps").state
    each = (state["flops_total"] + state["flops_measured"]) / 4
    # planned for far fewer pairs
    monkeypatch.setattr("vsa.attention.sparge.method.SpargeAttention.expected_share", 1e-6)
    trainer = training(*settings, f"flop_budget={each * 30.5}", "~trainer.max_steps")
    planned = training.last().state["config"]["trainer"]["max_steps"]
    assert planned > 32 == trainer.global_step == trainer.max_steps
    # it does not go on, unless it may compute more
    again = (*settings, "~trainer.max_steps", "ckpt_path=last")
    training(*again, f"flop_budget={each * 30.5}")
    assert training.last().step == 32
    assert training(*again, f"flop_budget={each * 32.5}").global_step == 34
    assert torch.isfinite(torch.tensor(float(training.metrics()[32]["val/loss"])))


def test_a_distillation_counts_passes_without_gradients(distill, training, monkeypatch):
    found, count = [], AttnContext.count

    def watch(ctx, index):
        count(ctx, index)
        if ctx.listed is not None:
            found.append((14 if torch.is_grad_enabled() else 4, int(ctx.listed)))

    monkeypatch.setattr(AttnContext, "count", watch)
    trainer = distill("attention=video_sparse", *RULES["top_p"][1:], "trainer.max_steps=2")
    assert {flops for flops, _ in found} == {4, 14}
    assert training.last().state["flops_measured"] == trainer.model.model.head_dim * sum(
        flops * pairs for flops, pairs in found
    )


def test_networks_count_nothing_unless_asked():
    assert Network.tally is None
