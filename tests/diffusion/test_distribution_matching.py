"""Distribution matching against definitions written out in float64, other formulas and distributions."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from vsa.diffusion import distribution_matching as dm
from vsa.diffusion import rollout as ro
from vsa.diffusion.flow_matching import add_noise, noise_like, shift_sigma, weighted_loss
from vsa.diffusion.sampler import sample_few_step

SHAPE = (3, 2, 4, 2, 3)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def field(x: Tensor, timestep: Tensor) -> Tensor:
    """A velocity that depends on place, time and neighbours."""
    t = (timestep / 1000).view(-1, *[1] * (x.ndim - 1)).to(x.dtype)
    return torch.tanh(x) * (0.5 + t) + 0.1 * x.roll(1, -1) - 0.3


# guidance


@given(scale=st.floats(-3, 20), s=st.floats(0.01, 1))
@settings(max_examples=50, deadline=None)
def test_guidance_forms_equal_their_formulas(scale: float, s: float):
    cond, uncond, x_t = randn(2, 5, seed=1), randn(2, 5, seed=2), randn(2, 5, seed=3)
    sigma = torch.full((2,), s, dtype=torch.float64)
    standard = dm.guide_score(cond, uncond, scale, "standard")
    torch.testing.assert_close(standard, (1 - scale) * uncond + scale * cond)
    torch.testing.assert_close(dm.guide_score(cond, uncond, scale - 1, "additive"), standard)
    # the same guidance on predicted data
    x0_cond, x0_uncond = (dm.predicted_x0(x_t, v, sigma) for v in (cond, uncond))
    torch.testing.assert_close(
        dm.predicted_x0(x_t, standard, sigma), (1 - scale) * x0_uncond + scale * x0_cond, atol=1e-9, rtol=1e-9
    )
    # control: the forms are a whole (cond - uncond) apart
    apart = dm.guide_score(cond, uncond, scale, "additive") - standard
    torch.testing.assert_close(apart, cond - uncond, atol=1e-9, rtol=1e-9)


def test_no_guidance_is_one_in_the_standard_and_zero_in_the_additive_form():
    assert dm.standard_scale(1.0, "standard") == dm.standard_scale(0.0, "additive") == 1.0
    assert dm.standard_scale(3.5, "additive") == 4.5


# the gradient


def by_hand(x0: Tensor, real: Tensor, fake: Tensor) -> Tensor:
    """The published gradient, sample by sample and element by element."""
    out = torch.zeros_like(x0)
    for b in range(len(x0)):
        elements = list(zip(*(t[b].flatten().tolist() for t in (x0, real, fake)), strict=True))
        norm = math.fsum(abs(x - r) for x, r, _ in elements) / len(elements)
        out[b] = torch.tensor([(f - r) / norm for _, r, f in elements], dtype=x0.dtype).view_as(x0[b])
    return out


@given(batch=st.integers(1, 4), size=st.integers(1, 6), scale=st.floats(1e-3, 1e3), seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_gradient_is_the_published_one_at_any_shape_and_scale(batch: int, size: int, scale: float, seed: int):
    x0, real, fake = (scale * randn(batch, 2, size, seed=3 * seed + i) for i in range(3))
    actual = dm.dmd_gradient(x0, real, fake)
    torch.testing.assert_close(actual.gradient, by_hand(x0, real, fake), atol=1e-12, rtol=1e-10)
    torch.testing.assert_close(actual.normalizer, (x0 - real).abs().mean((1, 2)))
    torch.testing.assert_close(actual.raw_norm, (fake - real).square().mean((1, 2)).sqrt())
    # control: the other score as reference is another gradient
    assert (by_hand(x0, fake, real) - actual.gradient).abs().max() > 1e-3


def test_normalizer_is_per_sample_and_takes_the_scale_of_the_data_out():
    x0, real, fake = (randn(*SHAPE, seed=i) for i in range(3))
    scale = torch.tensor([1.0, 10.0, 0.01], dtype=torch.float64).view(-1, 1, 1, 1, 1)
    alone = dm.dmd_gradient(x0, real, fake).gradient
    torch.testing.assert_close(dm.dmd_gradient(scale * x0, scale * real, scale * fake).gradient, alone)
    # control: one normaliser for the batch, as in some published code, lets the large sample drown the small
    raw = scale * (fake - real)
    batch_wide = raw / (scale * (x0 - real)).abs().mean()
    assert (batch_wide[2].abs() < 0.01 * alone[2].abs()).all()


def test_gradient_equals_the_weighted_difference_of_scores_of_the_paper():
    # DMD, eq. 7: w * alpha * (fake_score - real_score); eq. 8: w = sigma^2 / alpha / mean|x0 - real|;
    # with alpha = 1 - sigma and score = -noise / sigma
    sigma = torch.tensor([0.1, 0.6, 0.97], dtype=torch.float64)
    x0, noise, real_v, fake_v = (randn(*SHAPE, seed=i) for i in range(4))
    s = sigma.view(-1, 1, 1, 1, 1)
    x_t = add_noise(x0, noise, sigma)
    real_x0, fake_x0 = dm.predicted_x0(x_t, real_v, sigma), dm.predicted_x0(x_t, fake_v, sigma)
    real_score, fake_score = (-(x_t + (1 - s) * v) / s for v in (real_v, fake_v))
    alpha = 1 - s
    weight = s**2 / alpha / (x0 - real_x0).abs().mean((1, 2, 3, 4), keepdim=True)
    paper_gradient = weight * alpha * (fake_score - real_score)
    # ours leaves out the alpha that stays in the paper's, as the authors' code does
    torch.testing.assert_close(alpha * dm.dmd_gradient(x0, real_x0, fake_x0).gradient, paper_gradient)
    assert (alpha * dm.dmd_gradient(x0, fake_x0, real_x0).gradient - paper_gradient).abs().max() > 0.1


def test_close_predictions_in_low_precision_keep_their_difference():
    # a good critic: velocities differ by 1e-6, predictions near 100
    x_t, gap = (100 * randn(2, 50)).float(), 1e-6 * randn(2, 50, seed=1)
    velocity, sigma = randn(2, 50, seed=2), torch.tensor([0.02, 0.5])
    exact = sigma.double().view(-1, 1) * gap
    difference = dm.predicted_x0(x_t, velocity, sigma) - dm.predicted_x0(x_t, velocity + gap, sigma)
    torch.testing.assert_close(difference, exact, rtol=1e-4, atol=1e-12)
    # control: in fp32 the predictions are 7.6e-6 apart at best
    s = sigma.view(-1, 1)
    fp32 = (x_t - s * velocity.float()) - (x_t - s * (velocity + gap).float())
    assert ((fp32 - exact).abs() > 0.5 * exact.abs()).double().mean() > 0.5


def test_non_finite_predictions_stay_in_the_gradient_of_their_sample():
    x0, real, fake = (randn(3, 4, seed=i) for i in range(3))
    clean = dm.dmd_gradient(x0, real, fake).gradient
    broken_real, broken_fake = real.clone(), fake.clone()
    broken_real[1, 2], broken_fake[2, 0] = math.nan, math.inf
    result = dm.dmd_gradient(x0, broken_real, broken_fake)
    assert result.gradient[1].isnan().all()
    assert result.gradient[2].isfinite().tolist() == [False, True, True, True]
    assert result.raw_norm.isfinite().tolist() == [True, False, False]
    torch.testing.assert_close(result.gradient[0], clean[0])


def test_a_teacher_that_agrees_with_the_generator_gives_a_finite_gradient():
    x0, fake = randn(2, 4), randn(2, 4, seed=1)
    actual = dm.dmd_gradient(x0, x0, fake)
    torch.testing.assert_close(actual.gradient, (fake - x0) / dm.MIN_NORMALIZER)
    assert (dm.dmd_gradient(x0, x0, x0).gradient == 0).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_autograd_of_the_loss_is_the_gradient(dtype: torch.dtype):
    # far smaller than x0: in fp32 x0 - (x0 - gradient) would keep two digits of it
    x0 = (100 * randn(*SHAPE)).to(dtype).requires_grad_()
    gradient = 1e-3 * randn(*SHAPE, seed=1)
    loss = dm.dmd_loss(x0, gradient)
    assert loss.shape == (3,)
    torch.testing.assert_close(loss, 0.5 * gradient.square().mean((1, 2, 3, 4)), rtol=1e-9, atol=0)
    weights = torch.tensor([1.0, 0.5, 3.0], dtype=torch.float64)
    weighted_loss(loss, weights, 4.5).backward()
    expected = gradient * (weights / 4.5).view(-1, 1, 1, 1, 1) / gradient[0].numel()
    assert x0.grad is not None
    # rounding of x0 - gradient in float64, then of the gradient to the dtype of x0
    rounding = 1e-12 / gradient[0].numel() + torch.finfo(dtype).eps * expected.abs()
    assert ((x0.grad.double() - expected).abs() <= rounding).all()
    # control: the difference formed in fp32
    if dtype == torch.float32:
        naive = x0 - (x0 - gradient.float()).detach()
        wrong = (naive.double() - gradient).abs() / gradient.abs()
        assert wrong.mean() > 1e-3


def test_gradient_has_no_graph_and_descent_moves_towards_the_teacher():
    x0 = randn(2, 6).requires_grad_()
    real, fake = randn(2, 6, seed=1).requires_grad_(), x0 * 1.0
    result = dm.dmd_gradient(x0, real, fake)
    assert not result.gradient.requires_grad
    dm.dmd_loss(x0, result.gradient).sum().backward()
    assert real.grad is None
    assert x0.grad is not None
    # with a critic that returns x0 the gradient points from the teacher to x0
    after = x0.detach() - 0.1 * x0.grad
    assert ((after - real).abs() < (x0 - real).abs()).all()


# losses of the critic, the classifier and the regulariser


def test_critic_loss_is_flow_matching_on_constant_data():
    x0, noise = randn(*SHAPE, seed=1).requires_grad_(), randn(*SHAPE, seed=2)
    velocity = randn(*SHAPE).requires_grad_()
    loss = dm.critic_loss(velocity, x0, noise)
    torch.testing.assert_close(loss, (velocity - noise + x0).square().mean((1, 2, 3, 4)))
    loss.sum().backward()
    assert x0.grad is None
    torch.testing.assert_close(velocity.grad, 2 * (velocity - (noise - x0)).detach() / x0[0].numel())
    # controls: the opposite velocity, and data instead of velocity
    for wrong in (x0 - noise, x0):
        assert (loss - (velocity - wrong).square().mean((1, 2, 3, 4))).abs().min() > 0.05


def test_best_critic_predicts_the_mean_of_what_the_generator_made():
    # at sigma 1 the input tells nothing: the best constant velocity is noise - mean(x0)
    x0, noise = 3 + 0.1 * randn(4096, 1), randn(4096, 1, seed=1)
    shift = torch.linspace(-6, 0, 61, dtype=torch.float64)
    losses = torch.stack([dm.critic_loss(noise + c, x0, noise).mean() for c in shift])
    assert shift[losses.argmin()] == pytest.approx(-3, abs=0.06)


@given(st.lists(st.tuples(st.floats(-200, 200), st.floats(-200, 200)), min_size=1, max_size=6))
@settings(max_examples=50, deadline=None)
def test_gan_losses_are_cross_entropies(logits: list[tuple[float, float]]):
    real, fake = torch.tensor(logits, dtype=torch.float64).T
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    ones, zeros = torch.ones_like(real), torch.zeros_like(real)
    critic = bce(real, ones, reduction="none") + bce(fake, zeros, reduction="none")
    torch.testing.assert_close(dm.gan_critic_loss(real, fake), critic)
    torch.testing.assert_close(dm.gan_generator_loss(fake), bce(fake, ones, reduction="none"))


def test_gan_losses_push_in_opposite_directions_and_average_over_a_sample():
    real, fake = randn(2, 5).requires_grad_(), randn(2, 5, seed=1).requires_grad_()
    dm.gan_critic_loss(real, fake).sum().backward()
    assert real.grad is not None
    assert fake.grad is not None
    assert (real.grad < 0).all()
    assert (fake.grad > 0).all()
    other = fake.detach().clone().requires_grad_()
    loss = dm.gan_generator_loss(other)
    torch.testing.assert_close(loss, -torch.sigmoid(other).log().mean(1))
    loss.sum().backward()
    assert other.grad is not None
    assert (other.grad < 0).all()


def test_velocity_matching_teaches_the_student_only():
    student, teacher = randn(*SHAPE).requires_grad_(), randn(*SHAPE, seed=1).requires_grad_()
    loss = dm.velocity_matching_loss(student, teacher)
    torch.testing.assert_close(loss, (student - teacher).square().mean((1, 2, 3, 4)))
    loss.sum().backward()
    assert teacher.grad is None
    torch.testing.assert_close(student.grad, 2 * (student - teacher).detach() / teacher[0].numel())


# what is drawn


def test_streams_of_seeds_are_distinct_and_reproducible():
    seeds = torch.tensor([0, 1, 2**40, 2**62 + 5])
    names = ("generator", "fake_score", "step 0", "step 1")
    streams = [ro.stream_seeds(seeds, name) for name in names]
    assert len({int(s) for row in [seeds, *streams] for s in row}) == 20
    assert all((row >= 0).all() and row.dtype == torch.int64 for row in streams)
    for name, row in zip(names, streams, strict=True):
        assert torch.equal(ro.stream_seeds(seeds[2:], name), row[2:])
    noise = torch.stack([noise_like(torch.empty(4, 4096), row) for row in streams])
    correlation = torch.corrcoef(noise.flatten(0, 1)) - torch.eye(16)
    # 120 pairs of 4096 draws: 5.5 standard deviations
    assert correlation.abs().max() < 5.5 / 64


@given(
    window=st.tuples(st.floats(0, 1), st.floats(0, 1)).filter(lambda w: w[0] < w[1]),
    shift=st.floats(0.2, 12),
    slots=st.integers(1, 32),
    iteration=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_score_levels_stay_in_the_window(window: tuple[float, float], shift: float, slots: int, iteration: int):
    low, high = window
    sigma = dm.score_sigmas(
        seed=3,
        iteration=iteration,
        num_slots=slots,
        update="generator",
        shift=shift,
        min_ratio=low,
        max_ratio=high,
    )
    assert sigma.shape == (slots,)
    assert sigma.dtype == torch.float64
    assert (sigma >= low).all()
    assert (sigma <= high).all()
    # stratified: the i-th smallest lies in the i-th part of the unit interval, shifted and clamped
    edges = shift_sigma(torch.arange(slots + 1, dtype=torch.float64) / slots, shift).clamp(low, high)
    sorted_sigma = sigma.sort().values
    assert (sorted_sigma >= edges[:-1] - 1e-6).all()
    assert (sorted_sigma <= edges[1:] + 1e-6).all()


@pytest.mark.parametrize("shift", [1.0, 3.0, 8.0])
def test_score_levels_follow_the_published_distribution(shift: float):
    def draw(update: dm.Update, iteration: int = 7, seed: int = 1) -> Tensor:
        return dm.score_sigmas(seed=seed, iteration=iteration, num_slots=1000, update=update, shift=shift)

    # integers 0..999, warped, clamped to 20..980
    t = torch.arange(1000, dtype=torch.float64) / 1000
    published_levels = (shift * t / (1 + (shift - 1) * t)).clamp(0.02, 0.98)
    sigma = draw("generator")
    # both stratified: a quantile differs by at most one stratum, whose largest width is the slope at 0
    torch.testing.assert_close(sigma.sort().values, published_levels, atol=1.1e-3 * shift, rtol=0)
    assert (published_levels - shift_sigma(t, shift + 1).clamp(0.02, 0.98)).abs().max() > 1.1e-3 * shift
    assert torch.equal(draw("generator"), sigma)
    for other in (draw("fake_score"), draw("generator", 8), draw("generator", 7, 2)):
        assert abs(float(torch.corrcoef(torch.stack([other, sigma]))[0, 1])) < 0.2


def test_rollout_index_is_uniform_reproducible_and_independent():
    n, count = 3, 3000
    draws = {
        update: torch.tensor(
            [ro.rollout_index(seed=5, iteration=i, num_steps=n, update=update) for i in range(0, 5 * count, 5)]
        )
        for update in ("generator", "fake_score")
    }
    # 4.5 standard deviations of a binomial
    slack = 4.5 * math.sqrt(count * (1 / 3) * (2 / 3))
    for indices in draws.values():
        assert (indices.bincount(minlength=n) - count / n).abs().max() < slack
        # neighbours are independent too
        pairs = (n * indices[:-1] + indices[1:]).bincount(minlength=9)
        assert (pairs - count / 9).abs().max() < 4.5 * math.sqrt(count / 9)
    together = (n * draws["generator"] + draws["fake_score"]).bincount(minlength=9)
    assert (together - count / 9).abs().max() < 4.5 * math.sqrt(count / 9)
    again = ro.rollout_index(seed=5, iteration=35, num_steps=n, update="generator")
    assert again == draws["generator"][7]
    others = [ro.rollout_index(seed=6, iteration=i, num_steps=n, update="generator") for i in range(0, 500, 5)]
    assert others != draws["generator"][:100].tolist()


# step lists and rollouts


@given(
    steps=st.lists(st.integers(1, 1000), min_size=1, max_size=8, unique=True).map(lambda v: sorted(v, reverse=True)),
    shift=st.floats(0.3, 12),
)
@settings(max_examples=60, deadline=None)
def test_any_falling_list_warps_to_a_falling_list(steps: list[int], shift: float):
    assert ro.step_list(steps) == tuple(float(t) for t in steps)
    warped_steps = ro.step_list(steps, shift)
    assert all(0 < t <= 1000 for t in warped_steps)
    assert all(a > b for a, b in pairwise(warped_steps))
    for t, w in zip(steps, warped_steps, strict=True):
        assert w == pytest.approx(1000 * shift * t / (1000 + (shift - 1) * t))
    # warping its own result is warping once by the product
    assert ro.step_list(warped_steps, 2.0) == pytest.approx(ro.step_list(steps, 2 * shift))


def test_known_lists():
    assert ro.step_list((1000, 757, 522)) == (1000.0, 757.0, 522.0)
    assert ro.step_list((1000, 750, 500, 250), 5.0) == pytest.approx((1000, 937.5, 833.333333, 625))


STEPS = (1000.0, 757.0, 522.0)
SEEDS = torch.tensor([11, 12, 13])


def unrolled(latents: Tensor, seeds: Tensor, index: int) -> Tensor:
    """Backward simulation written out: predict the data, noise it to the next level, predict again."""
    x = ro.rollout_noise(latents, seeds, 0)
    for i in range(index + 1):
        sigma = STEPS[i] / 1000
        x0 = x - sigma * field(x, torch.full((len(x),), STEPS[i]))
        if i < index:
            after = STEPS[i + 1] / 1000
            x = (1 - after) * x0 + after * ro.rollout_noise(latents, seeds, i + 1)
    return x0


@pytest.mark.parametrize("index", [0, 1, 2])
def test_simulated_rollout_is_the_written_out_one(index: int):
    latents = torch.empty(SHAPE, dtype=torch.float64)
    actual = ro.rollout(field, latents, SEEDS, STEPS, index)
    torch.testing.assert_close(actual, unrolled(latents, SEEDS, index), atol=1e-6, rtol=0)
    # controls: another step, another seed
    assert (unrolled(latents, SEEDS, (index + 1) % 3) - actual).abs().max() > 1e-2
    assert (unrolled(latents, SEEDS + 1, index) - actual).abs().max() > 1e-2


def test_every_step_of_a_rollout_has_its_own_noise():
    rows = torch.stack([ro.rollout_noise(torch.empty(3, 4096), SEEDS, i) for i in range(3)]).flatten(0, 1)
    # 36 pairs of 4096 draws: 5.5 standard deviations
    assert (torch.corrcoef(rows) - torch.eye(9)).abs().max() < 5.5 / 64


def test_a_run_starts_from_the_noise_of_its_seeds():
    latents = torch.empty(SHAPE)
    assert torch.equal(ro.rollout_noise(latents, SEEDS, 0), noise_like(latents, SEEDS))
    assert not torch.equal(ro.rollout_noise(latents, SEEDS, 1), noise_like(latents, SEEDS))


@pytest.mark.parametrize("steps", [STEPS[:1], STEPS[:2], STEPS])
@pytest.mark.parametrize("gradients", [True, False])
def test_last_index_is_the_few_step_sampler_bit_for_bit_in_any_batch(steps: tuple[float, ...], gradients: bool):
    def samples(size: int, *, stream: int) -> Tensor:
        parts = zip(torch.empty(SHAPE).split(size), SEEDS.split(size), strict=True)
        # fresh noise of another step is the control
        clips = (
            sample_few_step(
                field, noise_like(x, seeds), steps, fresh=lambda i, x=x, s=seeds: ro.rollout_noise(x, s, i + stream)
            )
            for x, seeds in parts
        )
        return torch.cat(list(clips))

    with torch.set_grad_enabled(gradients):
        rollout = ro.rollout(field, torch.empty(SHAPE), SEEDS, ro.step_list(steps), len(steps) - 1)
    for size in (1, 2, 3):
        assert torch.equal(rollout, samples(size, stream=0))
    if len(steps) > 1:
        assert (rollout - samples(3, stream=1)).abs().max() > 1e-2


def test_a_sample_is_rolled_out_the_same_in_any_batch_and_dtype():
    def pointwise(x: Tensor, timestep: Tensor) -> Tensor:
        assert x.dtype == torch.float32
        return field(x, timestep)

    latents = torch.empty(SHAPE)
    whole = ro.rollout(pointwise, latents, SEEDS, STEPS, 2)
    for i in range(3):
        assert torch.equal(ro.rollout(pointwise, latents[i : i + 1], SEEDS[i : i + 1], STEPS, 2)[0], whole[i])
    assert torch.equal(ro.rollout(pointwise, latents.bfloat16(), SEEDS, STEPS, 2), whole)
    assert not torch.equal(whole[0], whole[1])


def test_data_latent_rollout_is_one_forward_from_noised_data():
    latents = randn(*SHAPE, seed=4)
    calls: list[Tensor] = []

    def counting_field(x: Tensor, timestep: Tensor) -> Tensor:
        calls.append(timestep)
        return field(x, timestep)

    for index, t in enumerate(STEPS):
        x_t = (1 - t / 1000) * latents + t / 1000 * ro.rollout_noise(latents, SEEDS, index)
        actual = ro.rollout(counting_field, latents, SEEDS, STEPS, index, "data_latent")
        expected = x_t - t / 1000 * field(x_t, torch.full((3,), t))
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=0)
    assert [c.tolist() for c in calls] == [[1000.0] * 3, [757.0] * 3, [522.0] * 3]
    # control: simulation does not look at the data, except where both start from pure noise
    apart = (
        ro.rollout(field, latents, SEEDS, STEPS, 1) - ro.rollout(field, latents, SEEDS, STEPS, 1, "data_latent")
    ).abs()
    assert apart.max() > 1e-2


@pytest.mark.parametrize("source", ["simulate", "data_latent"])
def test_only_the_last_forward_of_a_rollout_has_a_graph(source):
    scale = torch.ones((), dtype=torch.float64, requires_grad=True)
    modes: list[bool] = []

    def scaled_field(x: Tensor, timestep: Tensor) -> Tensor:
        modes.append(torch.is_grad_enabled())
        return scale * field(x, timestep)

    latents = randn(*SHAPE, seed=4)
    out = ro.rollout(scaled_field, latents, SEEDS, STEPS, 2, source)
    assert modes == ([False, False, True] if source == "simulate" else [True])
    out.sum().backward()
    assert scale.grad is not None
    # x0 = x - sigma * scale * field: linear in the last scale if the earlier ones are constants
    x_t = {
        "simulate": lambda: (
            0.478 * ro.rollout(field, latents, SEEDS, STEPS, 1) + 0.522 * ro.rollout_noise(latents, SEEDS, 2)
        ),
        "data_latent": lambda: 0.478 * latents + 0.522 * ro.rollout_noise(latents, SEEDS, 2),
    }[source]()
    expected = -0.522 * field(x_t, torch.full((3,), 522.0)).sum()
    torch.testing.assert_close(scale.grad, expected, atol=1e-5, rtol=0)
    with torch.no_grad():
        assert not ro.rollout(scaled_field, latents, SEEDS, STEPS, 2, source).requires_grad
    if source == "simulate":
        # control: the gradient through all steps is another one
        whole = torch.ones((), dtype=torch.float64, requires_grad=True)
        x = ro.rollout_noise(latents, SEEDS, 0)
        for i, t in enumerate(STEPS):
            x0 = x - t / 1000 * whole * field(x, torch.full((3,), t))
            if i < 2:
                x = (1 - STEPS[i + 1] / 1000) * x0 + STEPS[i + 1] / 1000 * ro.rollout_noise(latents, SEEDS, i + 1)
        x0.sum().backward()
        assert whole.grad is not None
        assert abs(float(whole.grad - expected)) > 1e-2


# bad input

ONE, TWO = torch.zeros(2, 1), torch.zeros(2, 2)


def levels(**changed: float | str) -> Tensor:
    arguments = {"seed": 0, "iteration": 0, "num_slots": 2, "update": "generator", **changed}
    return dm.score_sigmas(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: dm.guide_score(ONE, ONE, 3.0, "plus"), "cfg_form must be standard or additive, got 'plus'"),  # type: ignore[arg-type]
        (lambda: dm.guide_score(ONE, ONE, math.nan, "standard"), "guidance scale must be finite, got nan"),
        (lambda: dm.guide_score(ONE, TWO, 3.0, "standard"), r"got \[2, 1\] and \[2, 2\]"),
        (lambda: dm.predicted_x0(ONE, TWO, torch.ones(2)), r"x_t and velocity .* \[2, 1\] and \[2, 2\]"),
        (lambda: dm.predicted_x0(ONE, ONE, torch.ones(3)), r"\[2\], got shape \[3\]"),
        (lambda: dm.dmd_gradient(ONE, TWO, ONE), r"x0 and real_x0 .* \[2, 1\] and \[2, 2\]"),
        (lambda: dm.dmd_gradient(ONE, ONE, TWO), r"x0 and fake_x0 .* \[2, 1\] and \[2, 2\]"),
        (lambda: dm.dmd_loss(ONE, TWO), r"x0 and gradient .* \[2, 1\] and \[2, 2\]"),
        (lambda: dm.critic_loss(ONE, ONE, TWO), r"x0 and noise .* \[2, 1\] and \[2, 2\]"),
        (lambda: dm.critic_loss(TWO, ONE, ONE), r"\[2, 2\] and \[2, 1\]"),
        (lambda: dm.velocity_matching_loss(ONE, TWO), r"\[2, 1\] and \[2, 2\]"),
        (lambda: dm.gan_critic_loss(ONE, TWO), r"real_logits and fake_logits .* \[2, 1\] and \[2, 2\]"),
        (lambda: dm.gan_generator_loss(torch.zeros(())), r"fake_logits must be \[B, ...\], got shape \[\]"),
        (lambda: ro.stream_seeds(torch.zeros(1, 2), "a"), r"seeds must be \[B\], got shape \[1, 2\]"),
        (lambda: levels(min_ratio=0.5, max_ratio=0.5), "min_ratio=0.5, max_ratio=0.5"),
        (lambda: levels(min_ratio=-0.1), "min_ratio=-0.1, max_ratio=0.98"),
        (lambda: levels(max_ratio=1.1), "max_ratio=1.1"),
        (lambda: levels(max_ratio=math.nan), "max_ratio=nan"),
        (lambda: levels(shift=0.0), "flow shift must be above 0, got 0.0"),
        (lambda: levels(num_slots=0), "num_slots must be at least 1, got 0"),
        (lambda: levels(update="critic"), "update must be generator or fake_score, got 'critic'"),
        (lambda: ro.rollout_index(seed=0, iteration=0, num_steps=0, update="generator"), "num_steps .* got 0"),
        (lambda: ro.rollout_index(seed=0, iteration=0, num_steps=1, update="x"), "got 'x'"),  # type: ignore[arg-type]
        (lambda: ro.step_list(()), r"timesteps must be strictly decreasing .* got \[\]"),
        (lambda: ro.step_list((1000, 500, 500)), "1000, 500, 500"),
        (lambda: ro.step_list((500, 757)), "500, 757"),
        (lambda: ro.step_list((1001, 500)), "1001, 500"),
        (lambda: ro.step_list((1000, 0)), "1000, 0"),
        (lambda: ro.step_list((math.nan,)), "nan"),
        (lambda: ro.step_list((1000, 500), -1.0), "flow shift must be above 0, got -1.0"),
        (lambda: ro.rollout(field, ONE, SEEDS[:2], STEPS, 3), r"index must be in 0..2, got 3"),
        (lambda: ro.rollout(field, ONE, SEEDS[:2], STEPS, -1), r"index must be in 0..2, got -1"),
        (lambda: ro.rollout(field, ONE, SEEDS[:2], (522, 757), 0), "522, 757"),
        (lambda: ro.rollout(field, ONE, SEEDS[:2], STEPS, 0, "data"), "simulate or data_latent, got 'data'"),  # type: ignore[arg-type]
        (lambda: ro.rollout(field, ONE, SEEDS, STEPS, 0), r"\[2\], got shape \[3\]"),
    ],
)
def test_bad_input_is_refused_by_name_and_value(call, message: str):
    with pytest.raises(ValueError, match=message):
        call()
