"""A model whose attention is compared: its queries, keys and values, and denoising runs with other methods in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vsa.attention.denoising import DenoisingPlan
from vsa.attention.tiling import Grid
from vsa.evaluation.comparison.agreement import Denoised, Sampled, numbers_of
from vsa.evaluation.comparison.captures import Capture, Captures, Keep
from vsa.evaluation.comparison.methods import Method
from vsa.evaluation.comparison.settings import CompareSettings
from vsa.evaluation.inspection.clip import Clip


class ComparedModel(ABC):
    """A model of a run, an export or a pipeline.

    Attributes:
        source: path or hub id, for humans.
        num_layers: number of layers.
        grid_thw: token grid of a clip.
        tile_thw: tokens per tile of its own method; None: it has no tiles.
        attention: config of its own method, if it is known and not dense.
        own: the model as it was trained, as a further method of denoising runs; empty for dense models.
        text_in_rows: whether rows of tokens hold text beside the video.
    """

    source: str
    num_layers: int
    grid_thw: Grid
    tile_thw: Grid | None = None
    attention: Mapping[str, Any] | None = None
    own: Sequence[Method] = ()
    text_in_rows: bool = False

    @abstractmethod
    def open_clip(self, name: str) -> Clip:
        """The clip of a file, or of a sample's id."""

    @abstractmethod
    def watch(self, clip: Clip, seed: int) -> Callable[[float, Keep], None]:
        """A function that runs the model on the noised clip at a timestep and passes what its layers see to `keep`."""

    @abstractmethod
    def prepare(self, methods: Sequence[Method], asked: CompareSettings) -> DenoisingPlan:
        """Prepare the sampling; returns the plan of every method except dense attention.

        Raises:
            ValueError: settings that do not suit the model, before anything is measured.
        """

    @abstractmethod
    def sample(
        self, method: Method, prompts: Sequence[str], plan: DenoisingPlan | None, progress: Callable[[int], None]
    ) -> Sampled:
        """Sample clips with a method.

        Methods are training-free: they use the model's weights without its own gates, and gates of a method at their
        initial values. A trained method is the model as it is.

        Args:
            method: the method.
            prompts: N captions; their noise is the same for each method.
            plan: plan that the method follows where it has an effect; its own budget applies where the plan has none.
                None for dense attention, the reference.
            progress: function called after every sampler step with the number of clips it advanced.
        """

    @abstractmethod
    def sampling(self) -> Mapping[str, Any]:
        """Prepared settings of the sampling and the weights, as plain values."""

    @torch.no_grad()
    def capture(
        self,
        clips: Sequence[Clip],
        *,
        layers: Sequence[int],
        timesteps: Sequence[float],
        seed: int = 0,
        progress: Callable[[int], None] = lambda _: None,
    ) -> Captures:
        """Capture q, k, v of layers on noised clips, with the model's own attention at its trained top-k.

        Args:
            clips: clips from `open_clip`.
            layers: indices of the layers.
            timesteps: timesteps in [0, 1000].
            seed: seed of the noise.
            progress: function called with 1 after each forward.
        """
        captures: list[Capture] = []
        for clip in clips:
            forward = self.watch(clip, seed)
            for timestep in timesteps:

                def keep(layer: int, ctx, q, k, v, extra, name=clip.name, timestep=timestep) -> None:
                    if layer not in layers:
                        return
                    q, k, v, *rest = (ctx.layout.unpermute(x).cpu() for x in (q, k, v, *extra.values()))
                    row = ctx.layout.segments
                    (video,) = (i for i, segment in enumerate(row) if segment.is_video)
                    captures.append(
                        Capture(
                            name=name,
                            grid_thw=row[video].grid_thw,
                            q=q,
                            k=k,
                            v=v,
                            layer=layer,
                            timestep=timestep,
                            extra=dict(zip(extra, rest, strict=True)),
                            topk=None if self.attention is None else ctx.topk.count,
                            before=[text.num_tokens for text in row[:video]],
                            after=[text.num_tokens for text in row[video + 1 :]],
                        )
                    )

                forward(timestep, keep)
                progress(1)
        return Captures(items=captures, source=self.source, attention=self.attention)

    @torch.no_grad()
    def denoise(
        self,
        prompts: Sequence[str],
        methods: Sequence[Method],
        plan: DenoisingPlan,
        progress: Callable[[int], None] = lambda _: None,
    ) -> list[Denoised]:
        """Sample the same prompts from the same noise with each method.

        Dense attention, the first method, is the reference.

        Args:
            prompts: N captions.
            methods: dense attention first.
            plan: plan of every method except dense attention.
            progress: function called after every sampler step with the number of clips it advanced.
        """
        rows: list[Denoised] = []
        dense: Sampled | None = None
        for method in methods:
            clips = self.sample(method, prompts, plan if rows else None, progress)
            rows.append(Denoised(method=method.label, family=method.family, **numbers_of(clips, dense)))
            dense = dense or clips
        return rows
