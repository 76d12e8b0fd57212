"""Installation of an attention method in a loaded diffusers transformer, and its removal."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from vsa_kernels.dispatch import resolve_backend

from vsa.attention.base import AttentionMethod
from vsa.attention.denoising import Denoising, DenoisingPass, DenoisingPlan, progress_of
from vsa.attention.kept_tiles import Budget, KeptTiles
from vsa.attention.layout import BlockOrder, Partition, Segment
from vsa.attention.named import NAMED, name_of
from vsa.attention.sparsity import ConstantSparsity
from vsa.attention.video_sparse import Backend
from vsa.checkpoints.sparse_config import SparseAttentionConfig
from vsa.integrations.diffusers.factories import Gates, MethodFactory, named_factory
from vsa.integrations.diffusers.families import family_of
from vsa.integrations.diffusers.families.family import Family
from vsa.integrations.diffusers.processors import Processor
from vsa.integrations.diffusers.tile_attention import CurrentPass, Pass, TileAttention


class Installed(NamedTuple):
    """One modified attention layer, with the data that `remove` needs to restore it.

    Args:
        attn: attention module of the layer.
        original: original processor of the module.
        owner: module in which the method's modules are registered, the block or its attention.
        added: names of these modules.
    """

    attn: Any
    original: Any
    owner: Any
    added: tuple[str, ...]


class Applied:
    """An attention method in a transformer: the installed layers, the kept tiles and the current pass.

    Denoising steps are counted by the timestep: a lower timestep than in the last pass is the next step, an equal one
    the same step, and a higher one starts a new clip at step 0. If two transformers share a clip (Wan2.2), each counts
    its own steps. Where selections are reused, the passes of a step are distinguished by their order (classifier-free
    guidance runs the pass with the prompt first), and a batch with two equal halves of latents is one guided clip in
    families that guide in one batch; different latents at the timestep of step 0 are a new clip.

    Args:
        family: family of the transformer.
        kept_on: tiles kept on a grid of N tiles.
        plan: dense steps and layers, and reuse of selections.
        trained: settings of the sparse checkpoint with the gates; None without one.
    """

    def __init__(
        self,
        family: Family,
        kept_on: Callable[[int], KeptTiles],
        plan: DenoisingPlan,
        trained: SparseAttentionConfig | None = None,
    ):
        # all layers of a pass need the same numbers
        self.family, self.kept_on, self.plan, self.trained = family, cache(kept_on), plan, trained
        # passes differ by their timestep; reading it waits for the device
        self._reads_timestep = plan.follows_steps or kept_on(1).changes
        self.current = CurrentPass()
        self.layers: list[Installed] = []
        self.methods: list[AttentionMethod] = []
        self.hook: torch.utils.hooks.RemovableHandle | None = None
        self.step = self.number = 0
        self.last_timestep: float | None = None
        self._latents: Tensor | None = None
        self._denoising = Denoising(plan)

    def before_forward(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook that reads the grid, the text segments and the denoising step from the arguments.

        Returns:
            positional and keyword arguments without those that the family replaces.
        """
        for i, layer in enumerate(self.layers):
            _refuse_fused(layer.attn, i)
            if not isinstance(other := layer.attn.processor, Processor):
                what = f"layer {i} got the processor {type(other).__name__} in place of its attention method"
                raise ValueError(f"{what}: take it back (unfuse_qkv_projections() after a fusion), or call remove()")
        signature = inspect.signature(type(transformer).forward)
        bound = signature.bind(transformer, *args, **kwargs)
        arguments = bound.arguments
        arguments.update({name: None for name in self.family.replaced if name in arguments})
        grid = self.family.grid(transformer.config, arguments)
        now = DenoisingPass(dense_layers=self.plan.dense_layers)
        if self._reads_timestep:
            now = self._next_pass(self.family.timestep(arguments), arguments["hidden_states"].detach())
        self.current.value = Pass(
            grid_thw=grid,
            texts=None if self.family.texts is None else self.family.texts(arguments, grid),
            denoising=now,
        )
        return bound.args[1:], bound.kwargs

    def _next_pass(self, now: float, latents: Tensor) -> DenoisingPass:
        plan, before = self.plan, self.last_timestep
        again = now == before
        if again and self.step == 0 and self._latents is not None:
            # with a single step, all clips have the same timestep
            again = torch.equal(latents, self._latents)
        self.number = self.number + 1 if again else 0
        if before is None or now > before or (now == before and not again):
            self.step, self._denoising = 0, Denoising(plan)
        elif now < before:
            self.step += 1
        self.last_timestep, conditional = now, None
        if plan.keeps_selections:
            self._latents = latents
        if plan.shared_cache and self.family.guided_batch and len(latents) % 2 == 0:
            conditional = "second" if torch.equal(*latents.chunk(2)) else None
        return self._denoising.at(self.step, progress_of(now), number=self.number, conditional=conditional)

    @property
    def ran(self) -> bool:
        """Whether there has been a forward pass."""
        return self.current.value is not None

    def describe(self) -> dict[str, Any]:
        """Description of the method and of the tiles that it kept at the grid of the last pass, as plain values."""
        now = self.current.value
        if now is None:
            raise ValueError("describe() needs a forward pass first")
        method: Any = self.methods[0]
        layout = method.layout((Segment(now.grid_thw),), "cpu")
        tiles = layout.num_video_tiles
        topk = now.denoising.kept(self.kept_on(tiles), tiles, len(self.methods))
        density = topk.mean(tiles) / tiles if method.selects else method.expected_pairs(layout) / layout.num_tokens**2
        return {
            "method": type(method).__name__,
            **({} if name_of(method) is None else method.settings()),
            "tile_thw": None if layout.tile_thw is None else list(layout.tile_thw),
            "partition": layout.partition,
            "block_order": layout.block_order,
            "gates": sorted({name for layer in self.layers for name in layer.added}),
            "grid_thw": list(now.grid_thw),
            "num_tiles": tiles,
            "topk": topk.number,
            "sparsity": 1 - density,
        }


def apply(
    transformer: Any,
    method: str | MethodFactory = "video_sparse",
    *,
    sparsity: float | str | None = None,
    topk: int | Sequence[int] | None = None,
    dense_layers: Sequence[int] = (),
    dense_steps: int = 0,
    denoising: DenoisingPlan | None = None,
    tile_thw: Sequence[int] | None = None,
    partition: Partition | None = None,
    block_order: BlockOrder | None = None,
    gates: Gates | None = None,
    settings: Mapping[str, Any] | None = None,
    backend: Backend | None = None,
) -> Applied:
    """Replace the self-attention of a diffusers transformer by an attention method; `remove` restores it.

    Cross-attention is not changed. In joint models, text tokens have their own tiles, are visible to every query, and
    attend to everything. A model with gradient checkpointing must run its backward before the next forward with another
    grid, because the recomputation reads the grid of the last forward. Set up offloading and compilation of a pipeline
    after `apply`, so that they include the gates.

    Args:
        transformer: a transformer of one of the classes in `families.FAMILIES`.
        method: the name of a method in `configs/attention`, or a factory called with dim, num_heads, head_dim and
            layer_idx. Except for video_sparse, a method that is named must have no parameters to train.
        sparsity: share of video tiles skipped per query tile, in [0, 1).
        topk: video tiles kept per query tile, one number or one per layer. Exactly one of sparsity and topk is
            required, except for methods without a top-k ("full", "neighborhood", ...), which take neither.
        dense_layers: layers that keep all tiles; the single blocks of HunyuanVideo are numbered after its double
            blocks.
        dense_steps: number of first denoising steps of a clip that keep all tiles, see `Applied`.
        denoising: further changes during a denoising: budgets by progress or step, reuse of selections, and whether the
            unconditional pass has its own selections.
        tile_thw: tokens per tile of video_sparse; None: (4, 4, 4).
        partition: partition of video_sparse; None: cube.
        block_order: block order of video_sparse; None: nested.
        gates: gates of video_sparse. none: for models without trained gates, the output is the fine stage; coarse and
            coarse_and_fine: register the gates in the blocks, at the identity, to be loaded or trained. None: none.
        settings: constructor settings of another method, beside those of its config: `{"window_thw": (18, 24, 24)}`.
        backend: backend of attention; None chooses by device.
    """
    family = family_of(transformer)
    tiled = dict(tile_thw=tile_thw, block_order=block_order, partition=partition, gates=gates)
    tile_options: dict[str, Any] = {name: value for name, value in tiled.items() if value is not None}
    if tile_options and method != "video_sparse":
        name, value = next(iter(tile_options.items()))
        raise ValueError(f"{name}={value} applies to video_sparse only, got {method}")
    if settings and (callable(method) or method == "video_sparse"):
        raise ValueError(f"settings={dict(settings)} apply to named methods except video_sparse, got {method}")
    gate_settings = dict(family.gate_settings or {})
    if gates == "coarse_and_fine" and not gate_settings.get("gate_bias", True):
        raise ValueError(f"gates={gates}: gates of {family.name} have no bias to start at 1, expected coarse")
    if gates not in (None, "none"):
        tile_options["gate_settings"] = gate_settings
    factory = method if callable(method) else named_factory(method, tile_options, dict(settings or {}), backend)
    if method == "full" and (sparsity is not None or topk is not None):
        raise ValueError(f"full attention keeps all tiles, got sparsity={sparsity} and topk={topk}")
    has_budget = sparsity is not None or topk is not None
    if not has_budget and method != "video_sparse":
        # methods that select nothing keep all tiles
        sparsity = 0
    own = {name: value for name, value in (("dense_layers", dense_layers), ("dense_steps", dense_steps)) if value}
    plan = DenoisingPlan() if denoising is None else denoising
    for name, value in own.items():
        if getattr(plan, name):
            raise ValueError(f"{name} is set twice: {name}={value}, and {name}={getattr(plan, name)} in denoising")
    whole = replace(plan, **own)
    kept_on = constant_topk(sparsity, topk, whole, len(family.blocks(transformer)))
    applied = install(transformer, family, factory, kept_on, whole, backend)
    selects = any(layer.selects for layer in applied.methods)
    try:
        if not selects:
            first = applied.methods[0]
            plan.refuse_without_topk(type(first).__name__, predicts=first.predicts)
    except ValueError:
        remove(transformer)
        raise
    if has_budget != selects and method != "full":
        remove(transformer)
        name = type(applied.methods[0]).__name__
        budget_text = f"got topk={topk} and sparsity={sparsity if has_budget else None}"
        raise ValueError(
            f"{name} selects no tiles, {budget_text}"
            if has_budget
            else f"{name} needs exactly one of topk and sparsity, {budget_text}"
        )
    return applied


def applied_attention(transformer: Any) -> Applied | None:
    """The method that `apply` has installed in a transformer, None without one."""
    return getattr(transformer, "_applied_attention", None)


def remove(transformer: Any) -> None:
    """Remove the method of `apply`: its processors, hook and gates; the model is as before.

    This also removes trained gates, so save them first.
    """
    applied = applied_attention(transformer)
    if applied is None:
        raise ValueError(f"{type(transformer).__name__} has no attention method to remove")
    for layer in applied.layers:
        layer.attn.set_processor(layer.original)
        for name in layer.added:
            delattr(layer.owner, name)
    assert applied.hook is not None
    applied.hook.remove()
    del transformer._applied_attention


def constant_topk(
    sparsity: float | str | None, topk: int | Sequence[int] | None, plan: DenoisingPlan, num_layers: int
) -> Callable[[int], KeptTiles]:
    """Tiles kept on a grid of N tiles, for the arguments of `apply`."""
    by_layer = (topk,) if topk is None or isinstance(topk, int) else tuple(int(n) for n in topk)
    if len(by_layer) != num_layers and isinstance(topk, Sequence):
        raise ValueError(f"topk must have one entry for each of the {num_layers} layers, got {len(by_layer)}")
    # the schedule checks that exactly one of the two is given and in range
    for k in by_layer:
        ConstantSparsity(topk=k, sparsity=None if sparsity is None else float(sparsity))
    for layer in plan.dense_layers:
        if not 0 <= layer < num_layers:
            raise ValueError(f"dense_layers must be in 0..{num_layers - 1}, got {layer}")
    budgets = [Budget(k, sparsity) for k in by_layer]
    own = [budget for i, budget in enumerate(budgets) if len(budgets) == 1 or i not in plan.dense_layers]

    def kept_on(num_tiles: int) -> KeptTiles:
        for budget in (*own, *(budget for *_, budget in (*plan.ranges, *plan.steps))):
            budget.check(num_tiles)
        return plan.constant(tuple(budget.tiles(num_tiles, plan.rounding) for budget in budgets), num_tiles)

    return kept_on


def install(
    transformer: Any,
    family: Family,
    factory: MethodFactory,
    kept_on: Callable[[int], KeptTiles],
    plan: DenoisingPlan,
    backend: Backend | None = None,
    trained: SparseAttentionConfig | None = None,
) -> Applied:
    """Install the layers of a factory in a transformer; if one of them does not fit, nothing changes.

    Args:
        transformer: a transformer of the family.
        family: structure of the transformer.
        factory: factory of its layers.
        kept_on: see `Applied`.
        plan: see `Applied`.
        backend: backend of the fine stage; None chooses by device.
        trained: see `Applied`.
    """
    if applied_attention(transformer) is not None:
        raise ValueError(f"{type(transformer).__name__} already has an attention method, call remove() first")
    applied = Applied(family, kept_on, plan, trained)
    # everything is built and checked before the first layer changes
    rows = "" if family.text == "none" else f"{type(transformer).__name__} has text in its rows"
    for i, block in enumerate(family.blocks(transformer)):
        attn = getattr(block, family.attention)
        applied.methods.append(_layer_method(factory, attn, i, family, backend))
        if rows and not applied.methods[i].takes_text:
            fitting = ", ".join(name for name, method_class in NAMED.items() if method_class.takes_text)
            what = f"{type(applied.methods[i]).__name__} takes rows of one video, but {rows}"
            raise ValueError(f"{what}: use full, or with their default settings {fitting}")
        applied.methods[i].check_model(len(family.blocks(transformer)))
        added = applied.methods[i].extra_modules()
        owner = block if family.gates_in == "block" else attn
        for name in added:
            if hasattr(owner, name):
                raise ValueError(f"{family.gates_in} {i} already has an attribute {name}")
        applied.layers.append(Installed(attn, attn.processor, owner, tuple(added)))
    for i, (layer, layer_method) in enumerate(zip(applied.layers, applied.methods, strict=True)):
        for name, module in layer_method.extra_modules().items():
            layer.owner.register_module(name, module)
        attend = TileAttention(layer_method, i, applied.kept_on, applied.current, family.text)
        layer.attn.set_processor(family.processor(attend))
    applied.hook = transformer.register_forward_pre_hook(applied.before_forward, with_kwargs=True)
    transformer._applied_attention = applied
    return applied


def _refuse_fused(attn: Any, layer: int) -> None:
    # the fused weights would not be read; modules without the function replace the processor and keep the attribute
    if getattr(attn, "fused_projections", False) and hasattr(attn, "unfuse_projections"):
        raise ValueError(f"layer {layer} has fused projections, call unfuse_qkv_projections() first")


def _layer_method(
    factory: MethodFactory, attn: Any, layer: int, family: Family, backend: Backend | None
) -> AttentionMethod:
    """The method of one layer, on the device and in the dtype of the layer's weights."""
    if (processor := type(attn.processor).__name__) not in family.original:
        raise ValueError(f"layer {layer}: expected the processor {' or '.join(family.original)}, got {processor}")
    _refuse_fused(attn, layer)
    query, heads = getattr(attn, family.query), getattr(attn, family.heads)
    head_dim = query.out_features // heads
    if backend is not None:
        # raises for a head dim that a named backend cannot run; the device may still change
        resolve_backend(backend, torch.device("meta"), torch.bfloat16, head_dim)
    # the initialisation of gates must not change the caller's random state
    with torch.random.fork_rng(devices=[]):
        method = factory(dim=query.in_features, num_heads=heads, head_dim=head_dim, layer_idx=layer)
    weight = query.weight
    # gates cannot have the dtype of quantised weights; a method without gates needs no dtype
    return method.to(weight.device, weight.dtype) if method.extra_modules() else method.to(weight.device)
