"""Lightning data modules of latent shards and of clips rendered on the fly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from vsa.data.index import INDEX_NAME
from vsa.data.index_statistics import statistics_of
from vsa.data.plan import Source
from vsa.data.plan_datamodule import ENDLESS, PlanDataModule
from vsa.data.revisions import Phases, continued, phases_of, revision_at
from vsa.data.sample_store import SampleStore, ShardStore, ToyStore, open_shards
from vsa.data.splits import SplitBy, split_group
from vsa.data.toy_shards import prepare_toy_shards
from vsa.data.toy_videos import ToyClips
from vsa.data.world.scenes import MOST_WORDS, WorldClips
from vsa.data.world.store import WorldStore
from vsa.data.world.tables import find_photographs
from vsa.settings import AtLeastOne, validated


@validated
@dataclass(kw_only=True, eq=False)
class LatentDataModule(PlanDataModule):
    """Batches from folders of latent shards.

    Args:
        root: folder of shards; exclusive with `sources`.
        sources: several folders of shards, {name: {"root": folder, "weight": share of the steps}}.
        val_by: grouping of samples that are held out together, by the file they come from; see `vsa.data.splits`.
        val_field: field of the caption file, for `val_by=field`.
        drop: drop list of samples to leave out, written by `vsa check-data` or a run; it changes the order.
        revision: revision of folders that have grown, or phases: pairs of a first step and the revision from then on,
            the first at step 0; of `sources`, by name. None: the newest ones, in a resumed run those of its record.
        toy: toy clips to render to `videos` and to encode to `root` if `root` has no index.
        videos: folder of the video files that the shards were made from, shown beside generated clips; toy clips are
            rendered to it.
    """

    root: str | None = None
    sources: Mapping[str, Mapping[str, Any]] | None = None
    val_by: SplitBy = "id"
    val_field: str | None = None
    drop: str | None = None
    revision: AtLeastOne | Phases | Mapping[str, AtLeastOne | Phases] | None = None
    toy: ToyClips | None = None
    videos: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.root is None) == (self.sources is None):
            raise ValueError(f"expected exactly one of root and sources, got root={self.root}, sources={self.sources}")
        if self.toy is not None and (self.root is None or self.videos is None):
            raise ValueError(f"toy clips need root and videos, got root={self.root} and videos={self.videos}")
        self._group = split_group(self.val_by, self.val_field)
        entries = {"main": {"root": self.root}} if self.root is not None else dict(self.sources or {})
        for name, entry in entries.items():
            if not {"root"} <= set(entry) <= {"root", "weight"}:
                raise ValueError(f"source {name}: expected the keys root and, optionally, weight, got {sorted(entry)}")
        self._roots = {str(name): str(entry["root"]) for name, entry in entries.items()}
        self._weights = {str(name): float(entry.get("weight", 1.0)) for name, entry in entries.items()}
        self._phases = {name: phases_of(self.revision, name) for name in self._roots}
        self._used: dict[str, list[list[int]]] = {}
        if isinstance(self.revision, Mapping) and (odd := self.revision.keys() - self._roots.keys()):
            raise ValueError(f"revision: {sorted(odd)} are none of the sources {sorted(self._roots)}")

    def prepare_data(self) -> None:
        """Render and encode the requested toy clips if they are missing."""
        if self.toy is None or self.videos is None:
            return
        prepare_toy_shards(self.toy, Path(self.videos), Path(self._roots["main"]), self.codec, self.text_encoder)

    def before_data(self) -> PlanDataModule:
        """Toy clips that are still to be rendered are stood for by the same ones, drawn on the fly."""
        root = Path(self._roots.get("main", ""))
        if self.toy is None or (root / INDEX_NAME).is_file():
            return self
        rank_zero_info(f"{root} is not there yet: {self.toy.count} toy clips are rendered and encoded before training")
        own: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(PlanDataModule)}
        own["stats"] = "data"
        return ToyOnlineDataModule(**own, toy=self.toy)

    @property
    def places(self) -> list[Path]:
        """Folders and files that are read."""
        return [Path(place) for place in (*self._roots.values(), self.drop, self.videos) if place is not None]

    def open_store(self) -> SampleStore:
        """The shards of every source in the last phase, without the samples of the drop list."""
        return self._store_at(ENDLESS, rank_zero_info)

    def open_phases(self) -> Iterator[tuple[int, SampleStore]]:
        """A phase begins where a source gets a newer revision."""
        steps = sorted({first for phases in self._phases.values() for first, _ in phases})
        self._used = {name: [] for name in self._roots}
        for step in steps:
            store = self._store_at(step, rank_zero_info if step == steps[-1] else lambda line: None)
            for name, revision in store.revisions.items():
                if revision not in [used for _, used in self._used[name]]:
                    self._used[name].append([step, revision])
            yield step, store

    def keep(self, state: Mapping[str, Any]) -> None:
        """See the base; a phase that a setting adds begins at the step of the checkpoint or later."""
        recorded = state.get("revision", {})
        for name, phases in self._phases.items():
            used = recorded.get(name, [(0, 1)])
            self._phases[name] = continued(phases, used, state["step"], self._roots[name])

    def state_dict(self) -> dict[str, Any]:
        """That of the base, with the revisions of sets that have grown."""
        grown = any(rows != [[0, 1]] for rows in self._used.values())
        return {**super().state_dict(), **({"revision": self._used} if grown else {})}

    def _store_at(self, step: int, tell: Callable[[str], None]) -> ShardStore:
        revisions = {name: revision_at(phases, step) for name, phases in self._phases.items()}
        return open_shards(self._roots, revisions=revisions, drop=self.drop, tell=tell)

    def split_group(self, store: Any, source: str, sample_id: str) -> str:
        """Group of a sample by `val_by`."""
        return self._group(store.entry(source, sample_id))

    def training_statistics(self, store: Any, sources: Mapping[str, Source]) -> tuple[Tensor, Tensor]:
        """Statistics of the samples that are neither held out nor dropped."""
        entries = [
            store.entry(name, sample_id)
            for name, source in sources.items()
            for ids in source.buckets.values()
            for sample_id in ids
        ]
        mean, std = statistics_of(entries, store.codec.channels)
        return mean.float(), std.float()

    def source_weights(self) -> Mapping[str, float]:
        """The configured weights."""
        return self._weights


@validated
@dataclass(kw_only=True, eq=False)
class ToyOnlineDataModule(PlanDataModule):
    """Toy clips rendered and encoded in the loader, without files: a pure function of (seed, sample).

    Args:
        toy: set of toy clips.
    """

    toy: ToyClips

    def open_store(self) -> SampleStore:
        """Clips on demand."""
        return ToyStore(self.toy, self.codec, self.text_encoder)

    def source_weights(self) -> Mapping[str, float]:
        """One source."""
        return {"toy": 1.0}


@validated
@dataclass(kw_only=True, eq=False)
class WorldOnlineDataModule(PlanDataModule):
    """Clips of several objects before a photograph, rendered and encoded on the training device, without files.

    Args:
        world: set of clips.

    Raises:
        ImportError: the package of the photographs is not installed.
        ValueError: a caption may be longer than the text encoder's.
    """

    world: WorldClips

    def __post_init__(self) -> None:
        super().__post_init__()
        find_photographs()
        if self.text_encoder.max_tokens < MOST_WORDS:
            raise ValueError(
                f"text_encoder.max_tokens must be at least {MOST_WORDS}, the longest caption of the world, got "
                f"{self.text_encoder.max_tokens}"
            )

    def open_store(self) -> SampleStore:
        """Clips on demand."""
        return WorldStore(self.world, self.codec, self.text_encoder)

    def source_weights(self) -> Mapping[str, float]:
        """One source."""
        return {"world": 1.0}
