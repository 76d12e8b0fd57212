"""Denoising from noise to latents: few-step sparse generator against many-step model; text encoder and VAE apart."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vsa.diffusion.flow_matching import noise_like
from vsa.diffusion.rollout import rollout_noise
from vsa.diffusion.sampler import VelocityFn, euler_sigmas, guide, sample_euler, sample_few_step
from vsa.models.video_dit import VideoDiT

from .checks import compare
from .distill import STEP_LIST
from .problems import Shape
from .step import TEXT_TOKENS, fill_zeros, latent_size, named_model, random_source, video_dit
from .timing import Measured, Op, Setup, Skipped, added, against, attempt, breakdown, measure

# sampling settings of Wan at 480p (diffusers 0.42.1, WanPipeline)
_STEPS, _GUIDANCE, _FLOW_SHIFT = 50, 5.0, 3.0
# VSA (arXiv 2505.13389), section 3: 3 sparse steps against 50 dense ones
_PAPER = 50.9
_VAE_DTYPES = ("float32", "bfloat16")


class Clip:
    """One clip to denoise: its initial noise, its caption and the empty caption.

    Args:
        shape: token grid and batch.
        model: model whose latent channels and text width are used.
        dtype: dtype of the noise.
        device: device of the tensors.
    """

    def __init__(self, shape: Shape, model: VideoDiT, dtype: torch.dtype, device: torch.device):
        size = latent_size(shape, model)
        self.seeds = torch.arange(shape.batch)
        self.noise = noise_like(torch.empty(size, dtype=dtype, device=device), self.seeds)
        self.text, self.null = (
            torch.randn(shape.batch, TEXT_TOKENS, model.text_dim, generator=random_source(device, seed), device=device)
            for seed in (1, 2)
        )

    def conditioned(self, model: VideoDiT, topk: int) -> VelocityFn:
        """Velocity for the caption without guidance: one forward."""

        def velocity(x: Tensor, timestep: Tensor) -> Tensor:
            return model(x, timestep, self.text, topk=topk)

        return velocity

    def guided(self, model: VideoDiT, topk: int, together: bool) -> VelocityFn:
        """Guided velocity: forwards with and without caption, `together` in one batch or one after the other."""
        both = torch.cat((self.text, self.null))

        def velocity(x: Tensor, timestep: Tensor) -> Tensor:
            if together:
                twice = model(torch.cat((x, x)), torch.cat((timestep, timestep)), both, topk=topk)
                cond, uncond = twice.float().chunk(2)
            else:
                cond, uncond = (model(x, timestep, text, topk=topk).float() for text in (self.text, self.null))
            return guide(cond, uncond, _GUIDANCE)

        return velocity

    def few_steps(self, velocity: VelocityFn, timesteps: Sequence[float] = STEP_LIST) -> Tensor:
        """Latents of the few-step sampler, fresh noise drawn as in inference."""
        return sample_few_step(velocity, self.noise, timesteps, fresh=partial(rollout_noise, self.noise, self.seeds))

    def many_steps(self, velocity: VelocityFn, steps: int) -> Tensor:
        """Latents of the Euler sampler."""
        return sample_euler(velocity, self.noise, euler_sigmas(steps, _FLOW_SHIFT))


def denoise(shape: Shape, setup: Setup) -> Measured:
    """Denoising: the sparse few-step generator against the dense model, with text encoder and VAE timed apart."""
    models = _same_weights(shape, setup)
    clip = Clip(shape, models["dense"], torch.float32, setup.device)
    with torch.no_grad():
        exact = _exact_latents(shape, models["dense"], setup)
        plain = clip.few_steps(clip.conditioned(models["dense"], shape.tiles))
    around, skipped = _text_and_vae(shape, clip.noise, setup)
    rows, notes = list(around.values()), list[str]()
    for mode in setup.modes:
        # one static graph per batch size and top-k, no dynamic shapes
        with torch.no_grad(), torch._dynamo.config.patch(automatic_dynamic_shapes=False):
            torch.compiler.reset()
            if mode == "compiled":
                for model in models.values():
                    model.compile_blocks()
            _check_latents(shape, clip, models, plain, exact)
            own, form = _denoising_rows(shape, clip, models, mode, setup)
        names = [name for name in models if name != "dense"]
        sums, more = _whole_rows(mode, names, own, around)
        rows += [*own.values(), *sums]
        notes += [*(_ratios(name, mode, own, form) for name in names), *more]
    return Measured(rows, skipped, tuple(notes))


def _same_weights(shape: Shape, setup: Setup) -> dict[str, VideoDiT]:
    """The dense model and, with the same weights, one sparse model per requested backend."""
    torch.manual_seed(0)
    models = {name: video_dit(shape, name, setup.device) for name in ("dense", *setup.backends)}
    fill_zeros(models["dense"])
    for model in models.values():
        model.load_state_dict(models["dense"].state_dict(), strict=False)
        model.to(setup.dtype).eval().requires_grad_(False)
    return models


def _exact_latents(shape: Shape, dense: VideoDiT, setup: Setup) -> Tensor:
    """Latents of the dense model after 3 steps in the next higher precision."""
    dtype = torch.float32 if setup.dtype.itemsize == 2 else torch.float64
    clip = Clip(shape, dense, dtype, setup.device)
    return clip.few_steps(clip.conditioned(copy.deepcopy(dense).to(dtype), shape.tiles))


def _check_latents(shape: Shape, clip: Clip, models: dict[str, VideoDiT], plain: Tensor, exact: Tensor) -> None:
    """Compare the sparse generators with all tiles kept with the dense model, then set their gates to random values.

    Raises:
        ValueError: the distance from the exact latents exceeds the rounding error of the dense model, or the comparison
            does not distinguish sparse from dense latents.
    """
    dense = clip.few_steps(clip.conditioned(models["dense"], shape.tiles))
    for name, model in list(models.items())[1:]:
        roles = model.parameter_roles()
        gates = [p for key, p in model.named_parameters() if roles[key] == "gate"]
        for gate in gates:
            # zero gates leave out the coarse output
            gate.zero_()
        whole, sparse = (clip.few_steps(clip.conditioned(model, topk)) for topk in (shape.tiles, shape.topk))
        compare(
            f"the {len(STEP_LIST)}-step generator on {name}",
            got={"dense": dense, "all tiles": whole},
            damaged={"dense": dense, "all tiles": sparse},
            plain={"dense": plain, "all tiles": plain},
            exact={"dense": exact, "all tiles": exact},
        )
        for gate in gates:
            gate.normal_(std=0.02)


def _denoising_rows(
    shape: Shape, clip: Clip, models: dict[str, VideoDiT], mode: str, setup: Setup
) -> tuple[dict[str, dict[str, Any]], str]:
    """Rows by op, and the form of the guided forwards."""
    kind = "compiled denoising" if mode == "compiled" else "denoising"

    def kept(name: str) -> int:
        return shape.tiles if name == "dense" else shape.topk

    def timed(calls: dict[str, Callable[[int], Tensor]], steps: int) -> dict[str, dict[str, Any]]:
        """Rows of calls that take a number of steps, each warmed up with a single step."""
        ops = [
            Op(name=op, call=partial(call, steps), passes=(kind,), warm_up=partial(call, 1))
            for op, call in calls.items()
        ]
        return dict(zip(calls, measure(ops, setup), strict=True))

    def guided(name: str, together: bool) -> Callable[[int], Tensor]:
        return partial(clip.many_steps, clip.guided(models[name], kept(name), together))

    # all models use the form of guidance that is fastest for the dense one
    forms = {
        f"dense, 1 step, guidance {_GUIDANCE:g}, {form}": together
        for form, together in (("two forwards", False), ("one forward of two", True))
    }
    rows = timed({op: guided("dense", together) for op, together in forms.items()}, 1)
    form = min(forms, key=lambda op: rows[op]["median_ms"])
    for name, model in models.items():
        velocity = clip.conditioned(model, kept(name))

        def few_steps(steps: int, velocity: VelocityFn = velocity) -> Tensor:
            return clip.few_steps(velocity, STEP_LIST[:steps])

        rows |= timed({_few(name): few_steps}, len(STEP_LIST))
        rows |= timed({_many(name, guided=True): guided(name, forms[form])}, _STEPS)
        if name == "dense":
            rows |= timed({_many(name, guided=False): partial(clip.many_steps, velocity)}, _STEPS)
        flops = model.flops(clip.noise.shape[1:], kept(name), TEXT_TOKENS, training=False).executed * shape.batch
        for op, forwards in ((_few(name), len(STEP_LIST)), (_many(name, guided=True), 2 * _STEPS)):
            rows[op]["useful_tflops"] = round(forwards * flops / rows[op]["median_ms"] / 1e9, 4)
        if setup.device.type == "cuda":
            rows[_few(name)]["gpu_ms"] = breakdown(partial(few_steps, len(STEP_LIST)))
    for row in rows.values():
        against(row, rows[_many("dense", guided=True)])
    return rows, form.rpartition(", ")[2]


def _few(name: str) -> str:
    """Name of the op of few-step sampling."""
    return f"{name}, {len(STEP_LIST)} steps"


def _many(name: str, *, guided: bool) -> str:
    """Name of the op of Euler sampling."""
    return f"{name}, {_STEPS} steps" + (f", guidance {_GUIDANCE:g}" if guided else "")


def _ratios(name: str, mode: str, rows: dict[str, dict[str, Any]], form: str) -> str:
    own = rows[_few(name)]["median_ms"]
    others = (_many("dense", guided=True), _many("dense", guided=False), _few("dense"), _many(name, guided=True))
    of_paper, *ratios = (f"{rows[op]['median_ms'] / own:.1f}x {op}" for op in others)
    return (
        f"{mode}, no CUDA graphs: {_few(name)} takes {own / 1e3:.3f} s, faster than others by {of_paper}, {form} "
        f"(the paper: {_PAPER}x); {'; '.join(ratios)}"
    )


def _whole_rows(
    mode: str, names: list[str], rows: dict[str, dict[str, Any]], around: dict[str, dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[str]]:
    """Sums from caption to pixels, for the parts that could be measured; guidance also needs the empty caption."""
    whole_rows, notes = list[dict[str, Any]](), list[str]()
    for codec in (key for key in around if key.startswith("VAE")):
        if not {_captions(1), _captions(2)} <= set(around):
            break

        def whole(op: str, captions: int, codec: str = codec) -> dict[str, Any]:
            parts = (rows[op], around[_captions(captions)], around[codec])
            return added(f"{op}, text encoder, {codec}", [(1.0, part) for part in parts])

        dense = whole(_many("dense", guided=True), 2)
        sparse = [whole(_few(name), 1) for name in names]
        for row in (dense, *sparse):
            against(row, dense)
        whole_rows += [dense, *sparse]
        notes += [f"{mode}, with text encoder and {codec}: {row['speedup']:.2f}x, {row['op']}" for row in sparse]
    return whole_rows, notes


def _text_and_vae(shape: Shape, latents: Tensor, setup: Setup) -> tuple[dict[str, dict[str, Any]], Skipped]:
    """Rows of Wan's text encoder and VAE decoder with random weights; tiny ones unless the shape has a named model."""
    large, device = named_model(shape) is not None, setup.device

    def encode(name: str, captions: int) -> Op:
        from transformers import UMT5Config, UMT5EncoderModel

        # google/umt5-xxl, as in Wan
        size: dict[str, Any] = {"d_model": 4096, "d_ff": 10240, "num_heads": 64, "num_layers": 24, "vocab_size": 256384}
        if not large:
            size = {"d_model": 32, "d_ff": 64, "num_heads": 4, "num_layers": 2, "vocab_size": 128}
        config = UMT5Config(**size, d_kv=size["d_model"] // size["num_heads"], feed_forward_proj="gated-gelu")
        with device:
            encoder: Any = UMT5EncoderModel(config).eval().requires_grad_(False)
        words = torch.randint(1, 128, (captions, TEXT_TOKENS), generator=random_source(device, 0), device=device)
        return Op(name=name, call=partial(encoder.to(setup.dtype), words, torch.ones_like(words)), passes=("text",))

    def decode(name: str, dtype: torch.dtype) -> Op:
        from diffusers import AutoencoderKLWan

        with device:
            vae: Any = AutoencoderKLWan(base_dim=96 if large else 8).eval().requires_grad_(False)
        call = partial(vae.to(dtype).decode, latents.to(dtype), return_dict=False)
        return Op(name=name, call=call, passes=("pixels",), warm_up=call)

    makes = {_captions(n): partial(encode, _captions(n), n) for n in (1, 2)}
    # the codec of data sets computes in float32
    makes |= {f"VAE decode in {d}": partial(decode, f"VAE decode in {d}", getattr(torch, d)) for d in _VAE_DTYPES}
    rows, skipped = dict[str, dict[str, Any]](), Skipped()
    for name, make in makes.items():
        # one network at a time, because building the encoder takes 23 GB
        ops = list[Op]()
        attempt(ops, skipped, name, make)
        rows |= {row["op"]: row for row in measure(ops, setup)}
    return rows, skipped


def _captions(number: int) -> str:
    return f"text encoder, captions: {number}"
