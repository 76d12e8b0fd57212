"""Losses of flow matching and of finetuning, by their formulas."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.objectives.small_nets import make_batch, make_net, sparse_attention
from vsa.attention.full import FullAttention
from vsa.diffusion.flow_matching import FlowShift, sample_sigmas
from vsa.objectives.flow_matching import FinetuneLoss, FlowMatchingLoss, attention_outputs


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


def test_a_given_first_frame_is_clean_at_timestep_0_and_in_no_loss():
    model, shift = make_net(sparse_attention), FlowShift(kind="constant", value=2.0)
    batch, latents = make_batch()
    plain = FlowMatchingLoss(shift=shift).noised(model, batch, latents, seed=3)
    loss = FinetuneLoss(shift=shift, velocity=0.5, first_frame=0.5)
    # a seed whose draws give the first frame of one of the two samples
    seed, noised = next(
        (seed, noised)
        for seed in range(100)
        if (noised := loss.noised(model, batch, latents, seed=seed)).given.tolist() == [False, True]
    )
    plain = FlowMatchingLoss(shift=shift).noised(model, batch, latents, seed=seed)
    assert torch.equal(noised.x_t[0], plain.x_t[0])
    assert torch.equal(noised.x_t[1, :, 0], latents[1, :, 0])
    assert torch.equal(noised.x_t[1, :, 1:], plain.x_t[1, :, 1:])
    expected = plain.timestep[:, None].repeat(1, 2)
    expected[1, 0] = 0
    assert torch.equal(noised.timestep, expected)

    teacher = make_net(FullAttention, seed=1)
    velocity, theirs = (
        net(noised.x_t, noised.timestep, batch.text, batch.text_mask, **own).detach().requires_grad_()
        for net, own in ((model, {"topk": 2}), (teacher, {}))
    )
    for target in (noised.target, theirs):
        per_frame = (velocity - target).double().square().mean((1, 3, 4))
        torch.testing.assert_close(
            noised.mse(velocity, target).double(),
            torch.stack([per_frame[0].mean(), per_frame[1, 1:].mean()]),
            rtol=1e-5,
            atol=0,
        )
        # the control: over all frames
        assert (per_frame[1].mean() / per_frame[1, 1:].mean() - 1).abs() > 1e-3
    (grad,) = torch.autograd.grad(noised.mse(velocity, noised.target).sum(), velocity)
    assert grad[1, :, 0].eq(0).all()
    assert grad[1, :, 1:].ne(0).any()
    assert grad[0, :, 0].ne(0).any()
    parts = loss.mixed(model, teacher, batch, noised, topk=2).parts
    torch.testing.assert_close(parts["data"], noised.mse(velocity, noised.target), rtol=1e-5, atol=0)
    torch.testing.assert_close(parts["velocity"], noised.mse(velocity, theirs), rtol=1e-5, atol=0)


def test_an_expert_trains_on_its_noise_levels():
    model, (batch, latents) = make_net(FullAttention), make_batch()
    loss = FlowMatchingLoss(shift=FlowShift(value=2.0), noise_range=(0.875, 1.0))
    for seed in range(5):
        noised = loss.noised(model, batch, latents, seed=seed)
        assert noised.timestep.min() >= 875
    # of its own samples, those at the start of a denoising
    assert loss.progress_share(0.0, 0.125, 36) == pytest.approx(1)
    assert loss.progress_share(0.125, 1.0, 36) == pytest.approx(0)
    drawn = sample_sigmas(seed=0, step=0, num_slots=2000, shift=2.0, between=(0.875, 1.0))
    assert loss.progress_share(0.0, 0.06, 36) == pytest.approx((drawn > 0.94).double().mean().item(), abs=0.01)
    with pytest.raises(ValueError, match=r"noise_range=\[0.9, 0.9\]: expected a lower and a higher level"):
        FinetuneLoss(shift=FlowShift(), noise_range=(0.9, 0.9))


def test_first_frames_are_drawn_by_their_share_and_never_of_images():
    model, (batch, latents) = make_net(FullAttention), make_batch()
    many = replace(batch, num_slots=4000, slots=torch.arange(4000), seeds=torch.arange(4000))
    small = latents[:1, :, :, :2, :2].expand(4000, -1, -1, -1, -1)
    loss = FlowMatchingLoss(shift=FlowShift(), first_frame=0.3)
    given = loss.noised(model, many, small, seed=0).given
    # five standard deviations
    assert abs(given.float().mean() - 0.3) < 5 * (0.3 * 0.7 / 4000) ** 0.5
    # a part of the batch draws what the whole of it does
    part = replace(many, slots=many.slots[7:19], seeds=many.seeds[7:19])
    assert torch.equal(loss.noised(model, part, small[7:19], seed=0).given, given[7:19])
    image = loss.noised(model, batch, latents[:, :, :1], seed=0)
    assert image.given is None
    assert image.timestep.shape == (2,)
    none = FlowMatchingLoss(shift=FlowShift()).noised(model, batch, latents, seed=0)
    assert none.given is None
    with pytest.raises(ValueError, match=r"first_frame=1.0: expected"):
        FlowMatchingLoss(shift=FlowShift(), first_frame=1.0)
