"""What every family that trains must fulfil: it equals its class, runs train it, and its export is the class again."""

from __future__ import annotations

import inspect
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.integrations import tiny
from tests.tiny_runs import TinyTraining
from tests.training.distillations import DISTILL
from vsa.attention.context import AttnContext, recorded_index
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.checkpoints.convert import Conversion, convert
from vsa.checkpoints.golden import attention_output, check_golden
from vsa.checkpoints.weight_source import open_network, open_weights
from vsa.evaluation.attention_map import denoise_once
from vsa.evaluation.comparison.captures import Watched
from vsa.integrations.diffusers import load_sparse
from vsa.integrations.diffusers.families.parts import Inputs
from vsa.integrations.diffusers.layer_block import Pass
from vsa.integrations.diffusers.network import DiffusersNetwork
from vsa.sampling.pipeline import encode_prompts, generate, load_run

pytestmark = pytest.mark.filterwarnings("ignore:tiles .* are .* full")

SIZES = ("num_layers", "num_attention_heads", "attention_head_dim", "ffn_dim", "freq_dim")
# the codec of the toy clips has 16 channels, their text encoder a width of 64
DATA = {"in_channels": 16, "out_channels": 16}
# of the toy clips, 8 tiles of (1, 2, 2) tokens
LATENT = (16, 2, 8, 8)


class Trained(NamedTuple):
    """A family in a run: a class with the sizes of the toy clips, the settings that it needs, and layers that act on
    nothing, as those of the text after the last joint attention."""

    make: Any
    settings: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()


FAMILIES = {
    "wan": Trained(partial(tiny.wan, **DATA, text_dim=64), ("data.text_padding=zeros", "model=diffusers")),
    "ltx": Trained(partial(tiny.ltx, **DATA, caption_channels=64)),
    "hunyuan": Trained(partial(tiny.hunyuan, **DATA, text_embed_dim=64), ("model.constants.pooled_text=0",)),
    "hunyuan15": Trained(
        partial(tiny.hunyuan15, in_channels=33, out_channels=16, text_embed_dim=64),
        unused=("attn.add_q_proj", "attn.to_add_out", "ff_context.net.0.proj", "ff_context.net.2"),
    ),
    "minimax_h3": Trained(
        partial(tiny.minimax_h3, in_channels=16, text_dim=64),
        ("attention.gate_bias=false", "attention.coarse_text=true"),
    ),
    "kandinsky5": Trained(
        partial(tiny.kandinsky5, in_visual_dim=16, out_visual_dim=16, in_text_dim=64),
        ("model.constants.pooled_text=0", "data.text_padding=zeros"),
    ),
    "cogvideox": Trained(partial(tiny.cogvideox, **DATA, text_embed_dim=64), ("data.text_padding=zeros",)),
}


class Family:
    """Runs of one family, which the tests of a module share."""

    def __init__(self, name: str, folder: Path):
        self.family, self.folder = FAMILIES[name], folder / "pretrained"
        self.model = self.family.make().model
        self.model.save_pretrained(self.folder)
        self.runs = TinyTraining(folder / "outputs", pytest.MonkeyPatch())

    @cached_property
    def trained(self) -> Path:
        """Run folder of a sparse finetune."""
        self.train("run=whole")
        return self.runs.folder("whole")

    @cached_property
    def exported(self) -> Path:
        """Folder of its weights for diffusers."""
        folder = self.folder.parent / "exported"
        convert(open_weights(self.trained, "model"), folder, Conversion())
        return folder

    def train(self, *settings: str) -> None:
        sizes = (f"~model.{name}" for name in SIZES)
        own = [] if "model=diffusers" in self.family.settings else ["model=from_checkpoint"]
        task = () if any(setting.startswith("task=") for setting in settings) else ("task=finetune",)
        start = ("start=dense", f"init_from={self.folder}")
        self.runs(*start, *task, *sizes, *own, *self.family.settings, *settings)


# what they have in common is tested with every run of the others
SLOW = ("hunyuan15", "ltx", "minimax_h3", "kandinsky5")


@pytest.fixture(scope="module", params=[pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in FAMILIES])
def family(request, tmp_path_factory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def gradients(model: torch.nn.Module, out: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out.square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def packed(case: tiny.Case) -> tuple[Tensor, Tensor]:
    """Latents and timesteps in the form of a network, for LTX, whose rows are flat."""
    return case.inputs["hidden_states"].transpose(1, 2).unflatten(2, tiny.GRID), case.inputs["timestep"]


def at_flow_times(case: tiny.Case) -> tuple[Tensor, Tensor]:
    """The same for CogVideoX, whose noise has the schedule of its scheduler."""
    alphas, sigmas = (x[:, None, None, None, None] for x in schedule(case))
    return case.inputs["hidden_states"].transpose(1, 2) / (alphas + sigmas), (
        1000 * sigmas / (alphas + sigmas)
    ).flatten()


def schedule(case: tiny.Case) -> tuple[Tensor, Tensor]:
    scheduler = diffusers.CogVideoXDDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        rescale_betas_zero_snr=True,
        snr_shift_scale=1.0 if case.model.config.use_rotary_positional_embeddings else 3.0,
    )
    alphas = scheduler.alphas_cumprod[case.inputs["timestep"]]
    return alphas.sqrt().float(), (1 - alphas).sqrt().float()


def flow_velocity(case: tiny.Case) -> Tensor:
    """noise - x0 from CogVideoX's prediction v, with x0 = alpha x - sigma v and noise = sigma x + alpha v."""
    alphas, sigmas = (x[:, None, None, None, None] for x in schedule(case))
    x, v = (tensor.transpose(1, 2) for tensor in (case.inputs["hidden_states"], case.run()))
    return (sigmas * x + alphas * v) - (alphas * x - sigmas * v)


def as_they_are(case: tiny.Case) -> tuple[Tensor, Tensor]:
    return case.inputs["hidden_states"], case.inputs["timestep"]


POOLED = torch.full((2, 8), 0.5)
CASES = {
    "wan": (tiny.wan, as_they_are, lambda case: case.run(), {}),
    "ltx": (tiny.ltx, packed, lambda case: case.run().transpose(1, 2).unflatten(2, tiny.GRID), {"fps": 10}),
    "hunyuan": (
        partial(tiny.hunyuan, (tiny.TEXT, 3), guidance_embeds=True),
        as_they_are,
        lambda case: case.run(pooled_projections=POOLED, guidance=torch.full((2,), 3000.0)),
        {"pooled_text": 0.5, "guidance": 3.0},
    ),
    "hunyuan 1.5": (
        partial(tiny.hunyuan15, (tiny.TEXT, 3), glyphs=(0, 0), in_channels=9),
        lambda case: (case.inputs["hidden_states"], case.inputs["timestep"]),
        lambda case: case.run(hidden_states=F.pad(case.inputs["hidden_states"], (*(0,) * 6, 0, 5))),
        {},
    ),
    "kandinsky5": (
        partial(tiny.kandinsky5, visual_cond=True),
        lambda case: (case.inputs["hidden_states"].movedim(-1, 1), case.inputs["timestep"]),
        lambda case: case.run(
            hidden_states=F.pad(case.inputs["hidden_states"], (0, 5)),
            pooled_projections=POOLED,
            scale_factor=(1.0, 3.16, 3.16),
        ).movedim(-1, 1),
        {"pooled_text": 0.5, "rope_scale": 3.16},
    ),
    "cogvideox": (tiny.cogvideox, at_flow_times, flow_velocity, {}),
    "cogvideox 2b": (partial(tiny.cogvideox, rope=False), at_flow_times, flow_velocity, {}),
    "cogvideox 1.5": (partial(tiny.cogvideox, 2), at_flow_times, flow_velocity, {}),
}


def test_layers_record_what_is_the_videos(family):
    run = load_run(family.trained, device="cpu")
    rows: dict[int, Any] = {}
    recorded: dict[int, dict[str, Tensor]] = {}

    def keep(layer: int, ctx: AttnContext, *tensors: Any) -> None:
        rows[layer] = (ctx.layout, *tensors[:3])

    methods, sizes = run.model.attention_layers, run.model.layout_for(LATENT).kv_blocks.sizes
    model = run.model.with_attention(lambda layer_idx, **_: Watched(methods[layer_idx], keep))
    text, mask = encode_prompts(run.text_encoder, ["a red circle"], "cpu", run.text_padding)
    latents, topk = torch.randn(1, *LATENT, generator=torch.Generator().manual_seed(0)), KeptTiles.of(2)
    denoise_once(model, latents, text, mask, sigma=0.5, topk=topk, recorder=recorded.__setitem__)
    assert len(recorded) == len(run.model.blocks)
    for layer, tensors in recorded.items():
        layout, q, k, v = rows[layer]
        ((start, stop),) = layout.video_spans
        assert bool(layout.text_spans) == (len(q[0]) > stop - start)
        assert {len(tensors[name][0]) for name in ("q", "k", "fine")} == {stop - start} == {int(sizes.sum())}
        assert tensors["scores"].shape[2:] == (len(sizes), len(sizes))
        lists = recorded_index(tensors).to_dense(len(sizes))
        assert (lists.sum(-1) == 2).all()
        # every token of the video sees its tiles and all of the text
        sees = lists[0].repeat_interleave(sizes, 1).repeat_interleave(sizes, 2)
        sees = F.pad(sees, (start, len(q[0]) - stop), value=True)
        logits = torch.einsum("qhd,khd->hqk", q[0, start:stop].double(), k[0].double()) * q.shape[-1] ** -0.5

        def attended(sees: Tensor, v=v, logits=logits) -> Tensor:
            weights = logits.masked_fill(~sees, -torch.inf).softmax(-1)
            return torch.einsum("hqk,khd->qhd", weights, v[0].double())

        assert (tensors["fine"][0] - attended(sees)).abs().max() < 1e-5
        # control: a tile further
        assert (tensors["fine"][0] - attended(sees.roll(int(sizes[0]), 2))).abs().max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_it_equals_its_class(name):
    make, latents, expected, constants = CASES[name]
    case = make()
    if name == "ltx":
        case.inputs["rope_interpolation_scale"] = (8 / 10, 32, 32)
    model = DiffusersNetwork(
        attention=partial(VideoSparseAttention, tile_thw=tiny.TILE),
        class_name=type(case.model).__name__,
        config=case.model.config,
        constants=constants,
    )
    own = dict(model.named_parameters())
    for key, value in case.model.state_dict().items():
        own[key].data.copy_(value)
    mask = case.inputs.get("encoder_attention_mask")
    inputs = (*latents(case), case.inputs["encoder_hidden_states"], None if mask is None else mask.bool())
    wanted, out = expected(case), model(*inputs)
    assert tiny.difference(out, wanted) < 1e-5
    theirs, ours = gradients(case.model, wanted), gradients(model, out)
    # Kandinsky casts q and k to bfloat16, and with them their gradients
    tolerance = 2e-4 if name == "kandinsky5" else 1e-5
    assert theirs.keys() == {key for key in ours if "to_gate_" not in key}
    for key, gradient in theirs.items():
        assert (ours[key] - gradient).abs().max() < tolerance * gradient.abs().max().clamp(min=1), key
    # control: one tile less
    less = model(*inputs, topk=tiny.TILES - 1)
    assert tiny.difference(less, wanted) > 1e-4
    less = gradients(model, less)
    assert any((less[key] - gradient).abs().max() > 10 * tolerance for key, gradient in theirs.items())
    # the levels of recomputation change nothing
    before = gradients(model, model(*inputs, topk=3))
    for level in ("attention", "full"):
        model.activation_checkpointing = level
        again = gradients(model, model(*inputs, topk=3))
        assert all(torch.equal(again[key], gradient) for key, gradient in before.items())


def test_it_finetunes_and_resumes(family):
    family.train("run=twice", "trainer.max_steps=2")
    family.train("run=twice", "ckpt_path=last")
    assert family.trained
    whole, twice = family.runs.tensors("whole"), family.runs.tensors("twice")
    assert whole.keys() == twice.keys()
    assert all(torch.equal(whole[name], twice[name]) for name in whole)
    assert sum(".to_gate_compress." in name for name in whole) > 0


@torch.no_grad()
def test_its_export_is_the_class_again(family):
    weights = open_weights(family.trained, "model")
    model = getattr(diffusers, type(family.model).__name__).from_pretrained(family.exported)
    plain = dict(model.named_parameters())
    assert all(torch.equal(plain[name], weights[name]) for name in plain)
    gates = {name: weights[name] for name in weights if name not in plain}
    assert gates
    assert all("to_gate_" in name for name in gates)
    # Wan's own network for Wan
    errors = check_golden(family.exported, partial(attention_output, open_network(family.exported)[0]))
    assert len(errors) == 2
    assert not any(error.failed for error in errors)
    network = weights.network()
    weights.load(network, "required")
    given = Inputs(
        x=tiny.randn(2, *LATENT),
        # packed rows of a batch have one
        timestep=torch.tensor([700.0, 700.0 if network.parts.packed else 300.0]),
        text=tiny.randn(2, tiny.TEXT, network.text_dim, seed=1),
        mask=None,
        image=None,
        grid=network.grid(LATENT),
    )
    # all 8 tiles, and the 4 of the training
    for topk in (8, 4):
        model = load_sparse(family.exported, topk=topk)
        arguments = network.parts.inputs(model, given, network.constants)
        out = network.parts.velocity(model(**arguments).sample, model, given, network.constants)
        assert tiny.difference(network(given.x, given.timestep, given.text, topk=topk), out) < 1e-5
        assert tiny.difference(network(given.x, given.timestep, given.text, topk=2), out) > 1e-4


TEXT, MASK = tiny.randn(1, tiny.TEXT, 64, seed=1), torch.arange(tiny.TEXT)[None] < 4
NO_GLYPHS = dict(prompt_embeds_2=torch.zeros(1, 3, 8), prompt_embeds_mask_2=torch.zeros(1, 3, dtype=torch.long))
# by class a pipeline, which is imported where it runs, and what stands for its encoders
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "WanTransformer3DModel": ("WanPipeline", dict(prompt_embeds=TEXT)),
    "LTXVideoTransformer3DModel": (
        "LTXPipeline",
        dict(prompt_embeds=TEXT, prompt_attention_mask=MASK, height=256, width=256, num_frames=9),
    ),
    "HunyuanVideoTransformer3DModel": (
        "HunyuanVideoPipeline",
        dict(prompt_embeds=TEXT, prompt_attention_mask=MASK.long(), pooled_prompt_embeds=torch.zeros(1, 8)),
    ),
    "HunyuanVideo15Transformer3DModel": (
        "HunyuanVideo15Pipeline",
        dict(prompt_embeds=TEXT, prompt_embeds_mask=MASK.long(), height=128, width=128, **NO_GLYPHS),
    ),
    "Kandinsky5Transformer3DModel": (
        "Kandinsky5T2VPipeline",
        dict(
            prompt_embeds_qwen=TEXT,
            prompt_embeds_clip=torch.zeros(1, 8),
            prompt_cu_seqlens=torch.tensor([0, tiny.TEXT]),
        ),
    ),
    "CogVideoXTransformer3DModel": ("CogVideoXPipeline", dict(prompt_embeds=TEXT)),
}


class AsClass(torch.nn.Module):
    """A trained network in the place of its class: the class's own arguments, the network's blocks and layout."""

    def __init__(self, network: DiffusersNetwork, topk: int):
        super().__init__()
        self.network, self.topk = network, topk

    def __getattr__(self, name: str) -> Any:
        return getattr(super().__getattr__("network").transformer, name) if name != "network" else self._modules[name]

    def forward(self, **arguments: Any) -> Any:
        network, mask = self.network, arguments.get("encoder_attention_mask")
        ctx = AttnContext(layout=network.layout_for(LATENT, "cpu"), topk=KeptTiles.of(vars(self)["topk"]))
        groups = network._groups(ctx, None if mask is None else mask.bool(), tiny.TEXT)
        network.current.value = Pass(video=ctx.layout, groups=groups, per_token=False)
        return network.transformer.forward(**arguments)


# the text encoders of their pipelines take seconds to import
DEAR = ("hunyuan", "hunyuan15", "kandinsky5")


@torch.no_grad()
@pytest.mark.parametrize(
    "family",
    # MiniMax-H3 has blocks in place of a pipeline, the test before runs its class
    [pytest.param(name, marks=pytest.mark.slow if name in DEAR else ()) for name in FAMILIES if name != "minimax_h3"],
    indirect=True,
)
def test_its_export_runs_in_its_pipeline(family):
    """The plain pipeline with `load_sparse` draws what it draws with the trained network itself."""
    name = type(family.model).__name__
    kind, given = getattr(diffusers, PIPELINES[name][0]), PIPELINES[name][1]
    scheduler: Any = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    if "CogVideoX" in name:
        scheduler = diffusers.CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, snr_shift_scale=1.0)
    weights = open_weights(family.trained, "model")
    network: Any = weights.network()
    weights.load(network, "required")
    # no encoders, no VAE
    parts = {key: None for key, value in inspect.signature(kind).parameters.items() if value.default is value.empty}

    def drawn(transformer: Any) -> Tensor:
        own: dict[str, Any] = {**parts, "transformer": transformer, "scheduler": scheduler}
        guidance = {"guidance_scale": 1.0}
        if "guider" in own:
            own["vae"], own["guider"], guidance = torch.nn.Identity(), diffusers.ClassifierFreeGuidance(1.0), {}
            own["vae"].config, own["vae"].device = SimpleNamespace(latent_channels=16), torch.device("cpu")
            own["vae"].temporal_compression_ratio, own["vae"].spatial_compression_ratio = 4, 16
        pipe = kind(**own)
        pipe.set_progress_bar_config(disable=True)
        call = {"height": 64, "width": 64, "num_frames": 5, **guidance, **given}
        return pipe(**call, num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="latent")[0]

    plain = getattr(diffusers, name).from_pretrained(family.exported)
    sparse = drawn(load_sparse(family.exported, transformer=plain))
    assert weights.sparse is not None
    topk = weights.sparse.grid_topk[0][0]
    assert tiny.difference(drawn(AsClass(network, topk)), sparse) < 1e-5
    assert tiny.difference(drawn(AsClass(network, topk - 1)), sparse) > 1e-5


def test_adapters_train(family):
    pytest.importorskip("peft")
    family.train("run=lora", "task.lora={_target_:vsa.checkpoints.lora.LoRA,rank:2,alpha:3}")
    run, before = family.runs.folder("lora"), open_weights(family.folder)
    merged = open_weights(run, "model")
    adapters = {name.partition(".lora_")[0] for name in family.runs.last("lora").tensors("model") if ".lora_" in name}
    changed = {name.removesuffix(".weight") for name in before if not torch.equal(before[name], merged[name])}
    assert adapters - changed == {f"transformer_blocks.1.{name}" for name in family.family.unused}
    assert changed <= adapters
    # every layer has adapters, and gates train beside them
    assert all(any(name.startswith(prefix) for name in adapters) for prefix in merged.network().block_prefixes)
    assert any(merged[name].any() for name in merged if ".to_gate_compress.weight" in name)
    convert(merged, run.parent / "merged", Conversion(golden=False))
    plain = getattr(diffusers, type(family.model).__name__).from_pretrained(run.parent / "merged")
    assert all(torch.equal(value, merged[name]) for name, value in plain.named_parameters())


@pytest.mark.parametrize("family", ["wan", "ltx"], indirect=True)
def test_gates_train_alone(family):
    family.train("run=gates", "lora=gates", "trainer.max_steps=2")
    family.train("run=gates", "lora=gates", "ckpt_path=last")
    before, run = open_weights(family.folder), family.runs.folder("gates")
    after = open_weights(run, "model")
    assert all(torch.equal(after[name], before[name]) for name in before)
    gates = sorted(set(after) - set(before))
    assert gates
    assert all(after[name].any() for name in gates if name.endswith("weight"))
    # the others have no moments
    moments = {name.removeprefix("optimizer/").rpartition("/")[0] for name in family.runs.tensors("gates")}
    assert moments >= set(gates)
    assert not moments & set(before)
    convert(after, run.parent / "gates-exported", Conversion(golden=False))
    assert sorted(load_sparse(run.parent / "gates-exported").state_dict().keys() - set(before)) == gates


def test_it_samples(family):
    run = load_run(family.trained, device="cpu")
    sparse, dense = (generate(run, ["a red circle"], run.settings(steps=2, at=at)) for at in ("current", "dense"))
    assert sparse.isfinite().all()
    assert not torch.equal(sparse, dense)


def test_it_is_distilled(family):
    family.train("run=distilled", *DISTILL, "trainer.max_steps=2")
    run = load_run(family.runs.folder("distilled"), device="cpu")
    assert run.step_list is not None
    assert generate(run, ["a red circle"], run.settings()).isfinite().all()
