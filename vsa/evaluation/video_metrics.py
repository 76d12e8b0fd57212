"""Pixel metrics of clips: agreement of two clips, and signs of a broken one.

T H W frames, height and width; videos are uint8 `[T, H, W, 3]`, so the data range is 255 everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torchmetrics.functional.image import peak_signal_noise_ratio, structural_similarity_index_measure

from vsa.diffusion.flow_matching import refuse_other_shape

DATA_RANGE = 255.0
BLACK_LEVEL = 0.10
"""Share of the data range up to which a pixel is black (`pixel_black_th` of ffmpeg's blackdetect filter)."""
BLACK_SHARE = 0.98
"""Share of black pixels from which a frame is black (`picture_black_ratio_th` of the same filter)."""

FLICKER_HOLDS = (1, 2, 4)
"""Numbers of frames for which a flickering picture is constant; 4 is the temporal stride of common video codecs."""
LPIPS_CHUNK = 16
"""Number of frames that pass through the LPIPS trunk together."""


def psnr(video: Tensor, reference: Tensor) -> float:
    """Peak signal-to-noise ratio in dB of a clip's pixels, inf for equal clips.

    Args:
        video: uint8 `[..., 3]`.
        reference: the same shape.
    """
    refuse_other_shape(video=video, reference=reference)
    return float(peak_signal_noise_ratio(video.double(), reference.double(), data_range=DATA_RANGE))


def ssim(video: Tensor, reference: Tensor) -> float:
    """Structural similarity (SSIM), averaged over frames, colour channels and pixels; 1 for equal clips up to 1e-5.

    Gaussian window of 11 pixels and standard deviation 1.5, K1 = 0.01, K2 = 0.03, frames mirrored at their border.
    Source: Wang et al., "Image quality assessment: from error visibility to structural similarity" (2004), section
    III-C.

    Args:
        video: uint8 `[T, H, W, 3]`, at least 6 pixels high and wide.
        reference: the same shape.
    """
    refuse_other_shape(video=video, reference=reference)
    if min(video.shape[1:3]) < 6:
        raise ValueError(f"SSIM needs frames of at least 6x6 pixels, got {video.shape[1]}x{video.shape[2]}")
    # frame by frame, since the five filtered maps of a long clip would take gigabytes
    values = []
    for pair in zip(video, reference, strict=True):
        frame, reference_frame = (_channels_first(f[None]) for f in pair)
        values.append(structural_similarity_index_measure(frame, reference_frame, data_range=DATA_RANGE))
    return float(torch.stack(values).double().mean())


def black_frames(video: Tensor) -> float:
    """Share of black frames: at least 98% of the pixels are below 10% of the range in every channel.

    The thresholds are those of ffmpeg's blackdetect filter, which uses luma only and therefore counts saturated blue as
    black.

    Args:
        video: uint8 `[T, H, W, 3]`.
    """
    dark = video.amax(-1) <= BLACK_LEVEL * DATA_RANGE
    return float((dark.float().mean((1, 2)) >= BLACK_SHARE).double().mean())


def uniform_frames(video: Tensor) -> float:
    """Share of frames of one colour: the standard deviation of every channel is below one grey level.

    Args:
        video: uint8 `[T, H, W, 3]`.
    """
    return float((video.double().std((1, 2), correction=0).amax(-1) < 1.0).double().mean())


def motion(video: Tensor) -> float:
    """Mean absolute change of luma from frame to frame, as a share of the range; 0 is a still.

    One minus this is VBench's "temporal flickering" on luma (Huang et al., 2024, section 3.2.1), which counts all
    motion as flicker; see `flicker`.

    Args:
        video: uint8 `[T, H, W, 3]`.
    """
    if len(video) < 2:
        return 0.0
    return float(luma(video).diff(dim=0).abs().mean()) / DATA_RANGE


def flicker(video: Tensor) -> float:
    """Flicker: mean luma change that is reversed at once, as a share of the range, at the rate where it is largest.

    At a hold of h frames, d_t is the change of a pixel from frame t to t + h. Where the next h frames change it in the
    opposite direction, `min(|d_t|, |d_t+h|)` counts, else nothing. The largest mean over h = 1, 2, 4 is taken: a codec
    that packs 4 frames into a latent frame flickers at that rate. Frames that alternate between a and b count
    `|a - b|`, a cut counts nothing, and so does motion, unless something passes a pixel in fewer than 4 frames:
    compare with the flicker of a reference where there is one.

    Args:
        video: uint8 `[T, H, W, 3]`; fewer than 3 frames cannot flicker.
    """
    frames = luma(video)
    strengths = [0.0]
    for hold in FLICKER_HOLDS:
        if len(frames) > 2 * hold:
            change = frames[hold:] - frames[:-hold]
            now, after = change[:-hold], change[hold:]
            taken_back = torch.minimum(now.abs(), after.abs()) * (now * after < 0)
            strengths.append(float(taken_back.mean()) / DATA_RANGE)
    return max(strengths)


def luma(video: Tensor) -> Tensor:
    """float32 `[T, H, W]` in 0..255: weighted sum of gamma-encoded R, G, B (Rec. ITU-R BT.709).

    Args:
        video: uint8 `[T, H, W, 3]`.
    """
    return video.float() @ torch.tensor([0.2126, 0.7152, 0.0722])


def load_lpips(folder: str | Path) -> Callable[[Tensor, Tensor], float]:
    """LPIPS with the AlexNet trunk as a function of two clips `[T, H, W, 3]`: mean over frames, 0 for equal ones.

    The calibrated linear layers come with the package `lpips`; the trunk is read from `folder`, nothing is downloaded.
    Source: Zhang et al., "The unreasonable effectiveness of deep features as a perceptual metric" (2018).

    Args:
        folder: folder with torchvision's AlexNet weights, one file `alexnet-*.pth`.
    """
    weight_files = sorted(Path(folder).glob("alexnet-*.pth"))
    if len(weight_files) != 1:
        raise ValueError(f"LPIPS needs one file alexnet-*.pth in {folder}, got {len(weight_files)}")
    try:
        import lpips
    # a torchvision built for another torch ends in RuntimeError
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"LPIPS needs the packages lpips and torchvision (pip install lpips): {error}") from None
    # the initialisation of its trunk must not change the caller's random state
    with torch.random.fork_rng(devices=[]):
        network = lpips.LPIPS(net="alex", pnet_rand=True, verbose=False).requires_grad_(False)
    _load_trunk(network.net, weight_files[0])

    def distance(video: Tensor, reference: Tensor) -> float:
        refuse_other_shape(video=video, reference=reference)
        pairs = zip(video.split(LPIPS_CHUNK), reference.split(LPIPS_CHUNK), strict=True)
        with torch.no_grad():
            values = [network(*(_channels_first(x) / (DATA_RANGE / 2) - 1 for x in pair)).flatten() for pair in pairs]
        return float(torch.cat(values).double().mean())

    return distance


def _load_trunk(trunk: torch.nn.Module, path: Path) -> None:
    """Copy the convolutions of a torchvision AlexNet file into LPIPS's slices of it, which keep its layer numbers."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    for name, parameter in trunk.named_parameters():
        # slice3.6.weight is layer 6 of the features
        key = f"features.{name.partition('.')[2]}"
        if key not in saved or saved[key].shape != parameter.shape:
            shape = list(saved[key].shape) if key in saved else None
            raise ValueError(f"{path} is not AlexNet: expected {key} of shape {list(parameter.shape)}, got {shape}")
        parameter.copy_(saved[key])


def _channels_first(frames: Tensor) -> Tensor:
    """float32 `[N, 3, H, W]` of uint8 `[N, H, W, 3]`."""
    return frames.permute(0, 3, 1, 2).float()
