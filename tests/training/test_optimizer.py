"""Schedules against their formulas, parameter groups against the roles."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from vsa.training.optimizer import WSD, AdamW, Constant, Cosine


def test_constant_warms_up_linearly_to_one():
    schedule = Constant(warmup_steps=4)
    assert [schedule(s) for s in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert Constant()(0) == 1.0


@given(total=st.integers(2, 5000), warmup=st.integers(0, 50), end=st.floats(0, 1))
def test_cosine_ends_at_its_end_value_and_stays(total, warmup, end):
    schedule = Cosine(total_steps=total + warmup, warmup_steps=warmup, end=end)
    assert schedule(total + warmup) == pytest.approx(end)
    assert schedule(10 * (total + warmup)) == pytest.approx(end)
    values = [schedule(s) for s in range(warmup, total + warmup + 1, max(1, total // 20))]
    assert values == sorted(values, reverse=True)
    middle = warmup + total / 2
    if middle == int(middle):
        assert schedule(int(middle)) == pytest.approx((1 + end) / 2)


def test_wsd_is_flat_then_linear():
    schedule = WSD(total_steps=100, decay_share=0.2, warmup_steps=10)
    assert schedule(0) == pytest.approx(0.1)
    assert {schedule(s) for s in range(10, 81)} == {1.0}
    assert schedule(90) == pytest.approx(0.5)
    assert schedule(100) == schedule(500) == 0.0
    # an end above zero: halfway of the decay is halfway to it
    with_floor = WSD(total_steps=100, decay_share=0.2, end=0.1)
    assert [with_floor(s) for s in (80, 90, 100, 500)] == pytest.approx([1.0, 0.55, 0.1, 0.1])
    # a run cut short: the warm-up reaches into the decay
    assert WSD(total_steps=20, decay_share=0.5, warmup_steps=40)(15) == pytest.approx(16 / 40 * 0.5)
    with pytest.raises(ValueError, match="decay_share"):
        WSD(total_steps=100, decay_share=0.0)


def _model():
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "gate": nn.Linear(4, 4)})
    roles = {"a.weight": "matrix", "a.bias": "vector", "gate.weight": "gate", "gate.bias": "gate"}
    return model, roles


def test_groups_follow_roles():
    model, roles = _model()
    recipe = AdamW(lr=0.1, schedule=Constant(), weight_decay=0.5, lr_factors={"gate": 10.0})
    groups = {g["role"]: g for g in recipe.build(model, roles).param_groups}
    assert set(groups) == {"matrix", "vector", "gate"}
    assert groups["vector"]["weight_decay"] == 0.0
    assert groups["matrix"]["weight_decay"] == 0.5
    assert groups["gate"]["names"] == ["gate.weight", "gate.bias"]
    assert groups["gate"]["base_lr"] == pytest.approx(1.0)


@pytest.mark.parametrize(("decay_roles", "decays"), [(("matrix", "gate"), True), (("matrix",), False)])
def test_biases_of_gates_decay_with_the_gates_and_those_of_layers_do_not(decay_roles, decays):
    model, roles = _model()
    nn.init.constant_(model["gate"].bias, 1.0)
    nn.init.constant_(model["a"].bias, 1.0)
    recipe = AdamW(lr=0.1, schedule=Constant(), weight_decay=0.5, decay_roles=decay_roles)
    optimizer = recipe.build(model, roles)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    recipe.set_lr(optimizer, 0)
    optimizer.step()
    assert model["gate"].bias.tolist() == pytest.approx([1 - 0.1 * 0.5 if decays else 1.0] * 4)
    assert model["a"].bias.tolist() == [1.0] * 4


def test_frozen_parameters_are_left_out():
    model, roles = _model()
    model["a"].requires_grad_(False)
    names = [n for g in AdamW(lr=0.1, schedule=Constant()).build(model, roles).param_groups for n in g["names"]]
    assert names == ["gate.weight", "gate.bias"]


def adamw(weight: torch.Tensor, grads: list[torch.Tensor], **wrong: bool) -> torch.Tensor:
    """The weight after a step for each gradient, at lr 0.05, 0.1, 0.1, ...; `wrong` turns a part into another rule."""
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, grad in enumerate(grads):
        lr = 0.1 * (1.0 if wrong.get("no_warmup") else min(1.0, (step + 1) / 2))
        if wrong.get("coupled_decay"):
            grad = grad + 0.1 * weight
        m, v = 0.9 * m + 0.1 * grad, 0.95 * v + 0.05 * grad**2
        has_correction = not wrong.get("no_correction")
        m_hat = m / (1 - 0.9 ** (step + 1)) if has_correction else m
        v_hat = v / (1 - 0.95 ** (step + 1)) if has_correction else v
        root = (v_hat + 1e-8).sqrt() if wrong.get("eps_inside") else v_hat.sqrt() + 1e-8
        decay = 0.0 if wrong.get("coupled_decay") or wrong.get("no_decay") else 0.1
        weight = weight * (1 - lr * decay) - lr * m_hat / root
    return weight


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_update_equals_adamw_written_out(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    model, roles = _model()
    model = model.double().to(device)
    recipe = AdamW(lr=0.1, schedule=Constant(warmup_steps=2), weight_decay=0.1, betas=(0.9, 0.95))
    optimizer = recipe.build(model, roles)
    weight = model["a"].weight.detach().clone()
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(4, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
    for step, grad in enumerate(grads):
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        model["a"].weight.grad = grad.to(device)
        assert recipe.set_lr(optimizer, step) == min(1.0, (step + 1) / 2)
        optimizer.step()
    actual = model["a"].weight.detach().cpu()
    weight = weight.cpu()
    torch.testing.assert_close(actual, adamw(weight, grads), rtol=1e-12, atol=1e-12)
    # the tolerance tells it from every rule that is nearly the same
    for wrong in ("no_warmup", "coupled_decay", "no_decay", "no_correction", "eps_inside"):
        assert not torch.allclose(actual, adamw(weight, grads, **{wrong: True}), rtol=1e-12, atol=1e-12), wrong


def test_unknown_role_is_refused():
    with pytest.raises(ValueError, match="'matrices'"):
        AdamW(lr=0.1, schedule=Constant(), decay_roles=("matrices",))


def test_name_patterns_come_before_roles_and_the_last_one_wins():
    model, roles = _model()
    factors = {"gate": 10.0, "gate.b*": 2.0, "*.bias": 3.0}
    optimizer = AdamW(lr=0.1, schedule=Constant(), lr_factors=factors).build(model, roles)
    rates = {n: g["base_lr"] for g in optimizer.param_groups for n in g["names"]}
    assert rates == pytest.approx({"a.weight": 0.1, "a.bias": 0.3, "gate.weight": 1.0, "gate.bias": 0.3})
    # every parameter is in one group, and the schedule moves them all
    AdamW(lr=0.1, schedule=Constant(warmup_steps=2)).set_lr(optimizer, 0)
    assert {n: g["lr"] for g in optimizer.param_groups for n in g["names"]} == pytest.approx(
        {name: rate / 2 for name, rate in rates.items()}
    )


def test_a_pattern_that_fits_nothing_is_refused():
    model, roles = _model()
    with pytest.raises(ValueError, match="matches no parameter"):
        AdamW(lr=0.1, schedule=Constant(), lr_factors={"*.weigth": 2.0}).build(model, roles)
