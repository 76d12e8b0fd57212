"""8-bit moments of the optimizer: losses, bytes, checkpoints, other numbers of ranks, and changes of their form."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from tests.training.ranks import run_ranks
from vsa.checkpoints.moments import BLOCK, has_codes, moment_bytes, new_moment, stored
from vsa.checkpoints.run_checkpoint import read_checkpoint, write_checkpoint
from vsa.checkpoints.tensor_state import load_model_tensors, load_optimizer_tensors, optimizer_state
from vsa.models.sharding import whole
from vsa.training.optimizer import AdamW, Constant

pytest.importorskip("torchao")

INT8 = ("optim.moments=int8", "model.ffn_dim=512")
"""The rows of the second feed-forward layer, 12 x 512, are whole blocks."""


class Toy(nn.Module):
    """A matrix with codes, one row with codes, and parameters without: narrow rows and a vector."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(512, 19), nn.Linear(19, 8)
        self.table = nn.Parameter(torch.randn(1, 8, 512))

    def forward(self, x):
        return self.last(torch.tanh(self.first(x + self.table.mean(1))))


def made(moments="int8", model=None):
    model = Toy() if model is None else model
    recipe = AdamW(lr=3e-3, schedule=Constant(), betas=(0.9, 0.95), moments=moments)
    return model, recipe, recipe.build(model, dict.fromkeys(dict(model.named_parameters()), "matrix"))


def steps(model, recipe, optimizer, numbers):
    losses = []
    for step in numbers:
        x = torch.randn(32, 512, generator=torch.Generator().manual_seed(step))
        recipe.set_lr(optimizer, step)
        optimizer.zero_grad()
        loss = (model(x) - x[:, :8]).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


def test_losses_follow_those_of_fp32_moments(monkeypatch):
    exact, near = (steps(*made(moments), range(40)) for moments in ("fp32", "int8"))
    assert exact[-1] < 0.9 * exact[0]
    assert not torch.equal(exact, near)
    assert (near - exact).abs().max() < 0.005
    # control: scales that are 5% too large
    from torchao.optim import subclass_8bit as torchao

    scaled = torchao.scale_tensor
    monkeypatch.setattr(torchao, "scale_tensor", lambda *args: (scaled(*args)[0], 1.05 * scaled(*args)[1]))
    wrong = steps(*made(), range(40))
    assert (wrong - exact).abs().max() > 0.01


def test_the_estimate_counts_the_bytes_that_moments_take():
    for moments in ("fp32", "int8"):
        model, recipe, optimizer = made(moments)
        steps(model, recipe, optimizer, range(1))
        for parameter in model.parameters():
            state = optimizer.state[parameter]
            held = [t for name in ("exp_avg", "exp_avg_sq") for t in tensors_in(state[name])]
            assert sum(t.untyped_storage().nbytes() for t in held) == moment_bytes(parameter.shape, moments)
    assert [has_codes(p.shape, "int8") for p in Toy().parameters()] == [True, True, False, False, False]
    # nearly a quarter where rows are whole blocks
    assert moment_bytes((3072, 3072), "int8") / moment_bytes((3072, 3072), "fp32") == pytest.approx(0.25, rel=0.02)


def tensors_in(moment):
    return [moment.codes, moment.scale, moment.qmap] if hasattr(moment, "codes") else [moment]


def test_a_run_resumes_bit_for_bit_and_changes_its_moments_if_it_is_allowed_to(training, caplog):
    training(*INT8, "run=straight")
    training(*INT8, "run=stopped", "trainer.max_steps=2")
    half = training.last("stopped")
    coded = [key for key, value in half.tensors("optimizer").items() if value.dtype == torch.uint8]
    assert sorted(coded) == [f"blocks.{i}.ffn.net.2.weight/{key}" for i in (0, 1) for key in ("exp_avg", "exp_avg_sq")]
    with pytest.raises(ValueError, match=r"optim\.moments=int8, .*fp32.* resume\.allow=\[optim\.moments\] lets"):
        training(*INT8, "run=stopped", "ckpt_path=last", "optim.moments=fp32")
    training(*INT8, "run=stopped", "ckpt_path=last")
    straight, stopped = training.tensors("straight"), training.tensors("stopped")
    assert straight.keys() == stopped.keys()
    assert all(torch.equal(straight[key], stopped[key]) for key in straight)
    # control: the steps after the stop move the weights
    weights = half.tensors("model")
    assert max((straight[f"model/{key}"] - value).abs().max() for key, value in weights.items()) > 1e-2
    # converted: the run goes on nearly as it would have
    allow = "resume.allow=[optim.moments]"
    training(*INT8, "run=fp32", f"ckpt_path={half.path}", allow, "optim.moments=fp32")
    converted = training.tensors("fp32")
    assert not any(value.dtype == torch.uint8 for value in converted.values())
    assert max((straight[key] - converted[key]).abs().max() for key in straight if key.startswith("model/")) < 1e-3
    assert {value.item() for key, value in converted.items() if key.endswith("/step")} == {4}


@pytest.mark.parametrize("signed", [True, False])
def test_moments_are_converted_within_half_a_code(signed):
    like, values = torch.zeros(9, 2 * BLOCK), torch.randn(9, 2 * BLOCK)
    values = values if signed else values.square()
    coded = new_moment(like, "int8", signed=signed).copy_(values)
    back = new_moment(like, "fp32", signed=signed).copy_(coded)
    largest = values.view(-1, BLOCK).abs().amax(1)
    assert torch.equal(stored("m", coded, "int8")["m.scale"], largest.view(9, 2))
    # codes are at most a 64th of the largest apart, those without a sign half of that
    bound = largest.repeat_interleave(BLOCK).view_as(values) * 0.9 / (64 if signed else 128) / 2 * 1.001
    error = (back - values).abs()
    assert (error <= bound).all()
    # control: no finer codes
    assert (error > 0.8 * bound).any()


@pytest.fixture(scope="module")
def spread(tmp_path_factory) -> tuple[Path, list]:
    """Checkpoint of step 2 of three ranks, one of which holds no row of the table, and what they have at step 4."""
    folder = tmp_path_factory.mktemp("spread")

    def on_rank(rank: int):
        dist.init_process_group("gloo")
        model, recipe, optimizer = made(model=fully_shard(Toy()))
        steps(model, recipe, optimizer, range(2))
        groups = {"model": dict(model.named_parameters()), "optimizer": optimizer_state(optimizer)}
        write_checkpoint(folder, groups, {"step": 2}, together=True)
        dist.barrier()
        steps(model, recipe, optimizer, range(2, 4))
        end = everything(model, optimizer)
        again, recipe, optimizer = made(model=fully_shard(Toy()))
        load(again, optimizer, folder)
        steps(again, recipe, optimizer, range(2, 4))
        return {name: value.numpy() for name, value in end.items()}, same(everything(again, optimizer), end)

    return folder / "step-00000002", run_ranks(3, on_rank)


def everything(model, optimizer):
    return {name: whole(t) for name, t in (dict(model.named_parameters()) | optimizer_state(optimizer)).items()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def load(model, optimizer, folder):
    (path,) = [folder] if folder.name.startswith("step-") else folder.glob("step-*")
    checkpoint = read_checkpoint(path)
    load_model_tensors(model, checkpoint.open("model"), "x")
    load_optimizer_tensors(optimizer, checkpoint.open("optimizer"), "x", without=())


def test_ranks_resume_bit_for_bit(spread):
    _, results = spread
    assert [equal for _, equal in results] == [True] * 3


def test_another_number_of_ranks_resumes(spread):
    folder, results = spread
    model, recipe, optimizer = made()
    load(model, optimizer, folder)
    held = read_checkpoint(folder).tensors("optimizer")
    # codes and scales as they are
    assert same(optimizer_state(optimizer), held)
    steps(model, recipe, optimizer, range(2, 4))
    end = everything(model, optimizer)
    for name, value in results[0][0].items():
        # gradients are summed over ranks in another order, which may move a code
        if end[name].dtype == torch.uint8:
            assert (end[name].int() - torch.from_numpy(value).int()).abs().max() <= 1
        else:
            torch.testing.assert_close(end[name], torch.from_numpy(value), rtol=1e-5, atol=1e-6)


def test_a_missing_package_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(ValueError, match=r"^moments=int8 needs the package torchao: pip install 'vsa-train\[lowbit\]'"):
        made()
    made("fp32")
