"""`vsa plan`: what the command prints, and what it refuses."""

from __future__ import annotations

import re

import pytest

from vsa.training.estimate.gpus import MEASURED_BY

PLAN = ("plan", "model=dit_60m", "model.text_dim=64", "trainer.devices=1", "--grid", "4", "8", "8")
CLASS = (
    "model=diffusers",
    "model.class_name=LTXVideoTransformer3DModel",
    "model.config={num_layers: 2, num_attention_heads: 2, attention_head_dim: 64, cross_attention_dim: 128, "
    "in_channels: 16, out_channels: 16, caption_channels: 64}",
    "data.text_encoder.dim=64",
)


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (
            (),
            0,
            "activation_checkpointing=auto takes none: the least recomputation that fits and leaves 2% of the memory",
        ),
        (
            ("task.parallel.activation_checkpointing=full",),
            0,
            "take activation_checkpointing=none: the least recomputation that fits",
        ),
        (("--gpu", "RTX 4090"), 0, "RTX 4090 lacks measured rates"),
        (
            ("--gpu", "GT 710"),
            1,
            "--gpu GT 710: unknown kind of GPU, give its memory (--memory GIB; vsa info there shows it)",
        ),
        (("--gpu", "GT 710", "--memory", "1.5"), 1, "error: it needs"),
        (("trainer.devices=auto",), 1, "trainer.devices=auto: a plan needs a number of GPUs, as in trainer.devices=8"),
        (("trainer.devices=3",), 1, "data.batch_size=8 must be a multiple of the 3 micro-batches of a step"),
        (
            ("data.batch_size=24", "trainer.accumulate_grad_batches=12"),
            0,
            "each GPU: 2 samples a micro-batch, 12 micro-batches a step",
        ),
        (("trainer.devices=2", "task.parallel.sequence=2", "trainer=fsdp"), 0, "of text, shared by 2 GPUs"),
        (("task.parallel.sequence=2",), 1, "task.parallel.sequence=2 must divide the number of ranks, which is 1"),
        (
            ("trainer.devices=64", "task.parallel.sequence=64", "trainer=fsdp"),
            1,
            "task.parallel.sequence=64: a sample of (4, 8, 8) tokens has 4 query tiles to divide",
        ),
        (("trainer=fsdp", "trainer.devices=2", "task.parallel.offload=true"), 0, "  beside it, of the host  "),
        (("task.parallel.offload=true",), 1, "task.parallel.offload=true is for FSDP2: set trainer=fsdp"),
        (
            ("trainer=fsdp", "task.parallel.frozen=rounded"),
            1,
            "task.parallel.frozen=rounded is for one device without FSDP2, which shards fp32 weights",
        ),
        (
            ("task=distill", "task.teacher=T", "flop_budget=1e15"),
            1,
            "flop_budget=1000000000000000.0 applies to jobs of one network, this one ends at trainer.max_steps",
        ),
        (("flop_budget=1e15", "sparsity=missed_mass"), 1, "flop_budget needs a schedule known in advance, MissedMass"),
        (("data.batch_size=1",), 0, "each GPU: 1 sample a micro-batch, 1 micro-batch a step"),
    ],
)
def test_the_command(words, status, said, command_line):
    exit_code, out, err = command_line(*PLAN, *words)
    assert exit_code == status, err
    assert said in out + err
    assert len(err.splitlines()) == status


def test_a_budget_decides_the_steps(command_line):
    # 4 samples of 256 tokens a step
    exit_code, out, err = command_line(*PLAN, "data.batch_size=4", "sample_token_budget=1e6")
    assert exit_code == 0, err
    assert "the run: 977 steps, " in out
    # seconds are measured when the run begins
    exit_code, out, err = command_line(*PLAN, "second_budget=9")
    assert exit_code == 0, err
    assert "time of a step" in out
    assert "the run: " not in out


@pytest.mark.parametrize(("tokens", "waits"), [(("4", "8", "8"), True), (("32", "64", "64"), False)])
def test_a_step_is_not_faster_than_its_host(tokens, waits, command_line):
    exit_code, out, err = command_line(*PLAN[:5], *tokens)
    assert exit_code == 0, err
    # ten blocks; a step of six takes 78 to 83 ms in docs/race.md, of which the GPU works 38
    assert ("waiting for the host" in out) == waits
    assert (re.search(r"^  sum +130\.0$", out, re.M) is not None) == waits


@pytest.mark.slow
def test_a_class_is_estimated_by_other_blocks_and_says_so(command_line):
    told = "activations and times are those of Wan's blocks in the sizes of LTXVideoTransformer3DModel"
    for words, equal in ((CLASS, True), (("model=dit_60m", "model.text_dim=64"), False)):
        exit_code, out, err = command_line("plan", *words, *PLAN[3:])
        assert exit_code == 0, err
        assert (told in out) == equal


def test_the_fused_adamw_of_gpus_has_no_temporaries(command_line):
    # a batch of one small clip: weights, moments and gradients are nearly all of the memory
    exit_code, out, err = command_line(*PLAN, "data.batch_size=1", "task.parallel.activation_checkpointing=full")
    assert exit_code == 0, err
    table = out.partition("memory of a GPU")[2].partition("time of a step")[0]
    assert "optimizer moments" in table
    assert "temporaries" not in table


def test_an_unknown_kind_names_all_that_it_lacks_and_how_to_measure_it(command_line):
    exit_code, _, err = command_line(*PLAN, "--gpu", "GT 710")
    assert exit_code == 1
    assert len(err.splitlines()) == 1
    for name, command in MEASURED_BY.items():
        assert name in err
        # each command once, without the place in its output
        assert err.count(f"({command.partition(' (')[0]})") == 1, command
    exit_code, out, _ = command_line(*PLAN, "--gpu", "GT 710", "--memory", "80", "trainer.devices=2", "trainer=fsdp")
    assert exit_code == 0
    for name, command in MEASURED_BY.items():
        assert f"  {name:22} {command}\n" in out
