"""The losses of finetuning, by their formulas."""

from __future__ import annotations

import pytest
import torch

from tests.objectives.small_nets import make_batch, make_net, sparse_attention
from vsa.attention.full import FullAttention
from vsa.diffusion.flow_matching import FlowShift
from vsa.objectives.flow_matching import FinetuneLoss, attention_outputs


def test_the_parts_of_the_loss_are_what_they_say():
    model, teacher = make_net(sparse_attention), make_net(FullAttention, seed=1)
    batch, latents = make_batch()
    shift = FlowShift(kind="constant", value=2.0)
    loss = FinetuneLoss(shift=shift, data=0.5, velocity=2.0, attention=0.25)
    noised_batch = loss.noised(model, batch, latents, seed=3)
    terms = loss.mixed(model, teacher, batch, noised_batch, topk=2)
    ask = (noised_batch.x_t, noised_batch.timestep, batch.text, batch.text_mask)

    def outputs_of(net, **own):
        """Velocity and what the output projection of each self-attention is made of, in raster order."""
        outputs = []
        layout = net.layout_for(latents.shape[1:], latents.device)
        hooks = [
            block.attn1.to_out[0].register_forward_hook(lambda m, i, o: outputs.append(layout.unpermute(o).double()))
            for block in net.blocks
        ]
        velocity = net(*ask, **own).double()
        for hook in hooks:
            hook.remove()
        return velocity, outputs

    ours, our_layers = outputs_of(model, topk=2)
    theirs, their_layers = outputs_of(teacher)
    data = (ours - noised_batch.target).square().flatten(1).mean(1)
    velocity = (ours - theirs).square().flatten(1).mean(1)
    layers = [
        (a - b).square().flatten(1).mean(1) / b.square().flatten(1).mean(1)
        for a, b in zip(our_layers, their_layers, strict=True)
    ]
    assert len(layers) == 3
    attention = torch.stack(layers).mean(0)
    for name, expected in (("data", data), ("velocity", velocity), ("attention", attention)):
        torch.testing.assert_close(terms.parts[name].double(), expected, rtol=1e-5, atol=0)
        assert expected.min() > 1e-3
    torch.testing.assert_close(terms.mse.double(), 0.5 * data + 2 * velocity + 0.25 * attention, rtol=1e-5, atol=0)
    # the teacher gets no gradient, the model gets one through each part
    terms.mse.sum().backward()
    assert all(p.grad is None for p in teacher.parameters())
    assert all(p.grad is not None for n, p in model.named_parameters() if "to_gate" not in n)
    # validation is flow matching on data alone
    plain = loss(model, batch, noised_batch, topk=2)
    torch.testing.assert_close(plain.mse.double(), data, rtol=1e-5, atol=0)


def test_a_model_matches_itself():
    model = make_net(FullAttention)
    batch, latents = make_batch()
    loss = FinetuneLoss(shift=FlowShift(kind="constant", value=1.0), data=0.0, velocity=1.0, attention=1.0)
    noised = loss.noised(model, batch, latents, seed=0)
    assert loss.mixed(model, model, batch, noised, topk=1).mse.abs().max() < 1e-10
    # control
    assert loss.mixed(model, make_net(FullAttention, 1), batch, noised, topk=1).mse.min() > 1e-3


@pytest.mark.parametrize("level", ["none", "attention", "attention_mlp", "full"])
def test_collected_attention_outputs_carry_gradients(level):
    model = make_net(sparse_attention)
    model.activation_checkpointing = level
    batch, latents = make_batch()
    with attention_outputs(model, True) as outputs:
        model(latents, torch.tensor([300.0, 700.0]), batch.text, batch.text_mask, topk=2)
    assert sorted(outputs) == [0, 1, 2]
    sum(value.square().sum() for value in outputs.values()).backward()
    assert model.blocks[0].attn1.to_q.weight.grad.abs().max() > 0
    # nothing was collected again, and the hooks are gone
    assert sorted(outputs) == [0, 1, 2]
    assert not any(block.attn1.to_out[0]._forward_hooks for block in model.blocks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"velocity": -1.0}, "velocity=-1.0: expected a number of at least 0, got -1.0"),
        ({"data": 0.0}, "are all 0: nothing to train"),
    ],
)
def test_impossible_weights_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        FinetuneLoss(shift=FlowShift(kind="constant", value=1.0), **settings)
