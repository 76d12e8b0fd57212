"""FLOPs of training steps, at the mean top-k of the training samples."""

from __future__ import annotations

from functools import cache, partial

from vsa.attention.kept_tiles import KeptTiles
from vsa.data.batch import VideoBatch
from vsa.models.flops import FlopCount, weighted_flops
from vsa.models.network import Network
from vsa.training.modules.base import DiffusionModule


def expected_topk(module: DiffusionModule, network: Network, topk: KeptTiles, shape: tuple[int, ...]) -> KeptTiles:
    """Mean over training samples of latents `[C, T, H, W]`.

    Args:
        module: its objective knows the distribution of denoising progress.
        network: network that keeps the tiles.
        topk: video kv tiles per query tile.
        shape: latent shape.
    """
    tokens = network.layout_for(shape).num_tokens
    return topk.expected(partial(module.objective.progress_share, num_tokens=tokens))


class StepFlops:
    """FLOPs of a sample in the optimizer steps of a module.

    Args:
        module: training module with its networks.
        measured: whether those of selected tiles are left out where they are measured, see `MeasuredFlops`.
    """

    def __init__(self, module: DiffusionModule, *, measured: bool = False):
        self._module, self._measured = module, measured
        self._of_pass = cache(self._count)

    def __call__(self, batch: VideoBatch, step: int) -> FlopCount:
        """Training FLOPs of one sample of a micro-batch in optimizer step `step` (from 0), over all networks."""
        shape, text_len = tuple(batch.latents.shape[1:]), batch.text.shape[1]
        image_len = 0 if batch.image_embeds is None else batch.image_embeds.shape[1]
        kind = shape, self._module.topk(shape, step), text_len, image_len
        passes = self._module.passes(step)
        return weighted_flops([(times, self._of_pass(network, training, *kind)) for network, training, times in passes])

    def _count(
        self, network: Network, training: bool, shape: tuple[int, ...], topk: KeptTiles, text_len: int, image_len: int
    ) -> FlopCount:
        expected = expected_topk(self._module, network, topk, shape) if network.selects else None
        if self._measured and network.measured:
            expected = 0
        return network.flops(shape, expected, text_len, image_len=image_len, training=training)
