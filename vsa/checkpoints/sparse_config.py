"""`sparse_attention.json`: settings beyond the weights that an engine needs to run a sparse checkpoint as trained."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from vsa.attention.base import AttentionMethod, described_settings
from vsa.attention.denoising import DenoisingPlan
from vsa.attention.kept_tiles import KeptTiles
from vsa.attention.layout import Partition
from vsa.attention.named import NAMED, example_of, layers_of, refuse_settings
from vsa.attention.sparge.mask import without_readings
from vsa.attention.sparsity import ConstantSparsity, Scaling
from vsa.attention.tiling import BlockOrder
from vsa.attention.video_sparse import VideoSparseAttention
from vsa.files import inner_name, parse_json, read_text, typed, write_whole
from vsa.settings import Bound, Count, Positive, validated

SCHEMA_VERSION = 2
SPARSE_CONFIG = "sparse_attention.json"

Size = Annotated[int, Bound(">=", 1), Bound("<=", 1 << 16)]
Grid = tuple[Size, Size, Size]
# a hundred times the tokens of the longest clips
_MOST_TOKENS = 1 << 24


Rows = tuple[tuple[int, ...], ...]
"""Kv tiles per query tile: for each trained grid one row with an entry per layer."""

_ENTRIES = {"topk_ranges": ("start", "stop", "grid_topk"), "step_topk": ("step", "grid_topk")}
"""Keys in the file of the fields that are lists of tuples here and lists of objects there."""

VERSION_2 = {"step_topk": (), "refresh": 1, "shared_cache": False, "settings": None}
"""Keys that version 1 lacks, with the values it implies: a file with only these values is written as version 1."""

LATER_SETTINGS = {"gate_bias": True, "coarse_text": False}
"""Settings of video_sparse that files of earlier versions lack, with the values they imply."""


@validated
@dataclass(frozen=True, kw_only=True)
class SparseAttentionConfig:
    """Settings of the self-attention of a sparse checkpoint.

    Trained grids have the top-k of the end of their training; `layer_topk` derives that of other grids from the first.

    Args:
        method: name of the method (`vsa.attention.named`).
        tile_thw: tokens per tile along time, height, width for video_sparse; None where `settings` describe the method.
        partition: for video_sparse, cube or a kind of runs, see `vsa.attention.layout.TileLayout`.
        block_order: for video_sparse, order of the tiles, which affects results only by rounding.
        fine_gate: for video_sparse, whether the fine output has a gate too.
        gate_keys: names of the tensors of the attention, such as gates, among the weights.
        grid_topk: kv tiles per query tile, for each trained grid one row with an entry per layer; all tiles if the
            method has no top-k.
        num_tiles: video tiles of each trained grid; grids with equal numbers have equal rows of top-k.
        grids: trained token grids, the reference grid first.
        budget: scaling of top-k with the number of tiles on other grids: count (constant top-k), fraction (constant
            sparsity) or an exponent between 0 and 1, see `vsa.attention.sparsity.SparsitySchedule`.
        topk_ranges: ranges of denoising progress with rows other than `grid_topk`: start (0 is pure noise), end
            (exclusive, 1 is clean), rows.
        dense_layers: layers that keep all tiles regardless of `grid_topk`; with a method without top-k they run dense
            attention.
        dense_steps: number of first denoising steps in which all layers are dense in this sense.
        step_topk: ascending denoising steps, from 0, and the rows from each step on, which have priority over ranges.
        refresh: see `vsa.attention.denoising.DenoisingPlan`.
        shared_cache: see `vsa.attention.denoising.DenoisingPlan`.
        settings: all settings of the method, by constructor argument; None for video_sparse if `tile_thw`, `partition`,
            `block_order` and `fine_gate` are its only ones, as version 1 has it.
        step_list: timesteps of a distilled generator; None for a model that is sampled with many steps.
        flow_shift: flow shift for sampling, which may differ from that of the training; None: that of the pipeline.
        guidance_form: standard, `uncond + scale * (cond - uncond)`, or additive, `cond + scale * (cond - uncond)`.
        guidance_scale: recommended scale; None if unknown.
        golden: file with golden inputs and outputs; None without.
        golden_tolerance: largest relative error against them; 0.02 is the rounding of bfloat16.

    Raises:
        ValueError: names an invalid value.
    """

    method: str
    tile_thw: Grid | None
    partition: Partition | None
    block_order: BlockOrder | None
    fine_gate: bool
    gate_keys: tuple[str, ...]
    grid_topk: Rows
    num_tiles: tuple[int, ...]
    grids: tuple[Grid, ...]
    budget: Scaling = "fraction"
    topk_ranges: tuple[tuple[float, float, Rows], ...] = ()
    dense_layers: tuple[int, ...] = ()
    dense_steps: Count = 0
    step_topk: tuple[tuple[int, Rows], ...] = ()
    refresh: int | tuple[tuple[int, int], ...] = 1
    shared_cache: bool = False
    settings: Mapping[str, Any] | None = None
    step_list: tuple[float, ...] | None = None
    flow_shift: Positive | None = None
    guidance_form: Literal["standard", "additive"] = "standard"
    guidance_scale: float | None = None
    golden: str | None = None
    golden_tolerance: Annotated[float, Bound(">", 0), Bound("<=", 0.02)] | None = None

    def __post_init__(self) -> None:
        if self.tile_thw is not None:
            object.__setattr__(self, "tile_thw", tuple(self.tile_thw))
        for name in ("gate_keys", "num_tiles", "dense_layers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name in _ENTRIES:
            entries = tuple((*place, tuple(map(tuple, rows))) for *place, rows in getattr(self, name))
            object.__setattr__(self, name, entries)
        for name in ("grids", "grid_topk"):
            object.__setattr__(self, name, tuple(tuple(row) for row in getattr(self, name)))
        if self.step_list is not None:
            object.__setattr__(self, "step_list", tuple(self.step_list))
        if self.settings is not None:
            # as after reading the file: tuples become lists, and 1 stays different from 1.0
            object.__setattr__(self, "settings", json.loads(json.dumps(dict(self.settings))))
        if not isinstance(self.refresh, int):
            object.__setattr__(self, "refresh", tuple(tuple(row) for row in self.refresh))
        self._check()

    def _check(self) -> None:
        if self.method not in NAMED:
            raise ValueError(f"method must be one of {', '.join(NAMED)}, got {self.method!r}")
        if self.settings is None and self.method != "video_sparse":
            raise ValueError(f"settings={self.settings} do not apply to method={self.method}")
        for name in ("tile_thw", "partition", "block_order"):
            if ((value := getattr(self, name)) is None) != (self.settings is not None):
                raise ValueError(f"{name}={value} does not apply to method={self.method}")
        tiles = () if self.tile_thw is None else (("tile_thw", self.tile_thw),)
        for name, triple in (*tiles, *(("grids", grid) for grid in self.grids)):
            if math.prod(triple) > _MOST_TOKENS:
                raise ValueError(f"{name}={list(triple)}: expected at most {_MOST_TOKENS:,} tokens")
        if not self.grids or len(self.grids) != len(self.num_tiles):
            raise ValueError(f"num_tiles must have one entry per grid, got {len(self.num_tiles)} and {len(self.grids)}")
        self._check_topk("grid_topk", self.grid_topk)
        for start, stop, rows in self.topk_ranges:
            if not 0 <= start < stop <= 1:
                raise ValueError(f"topk_ranges must be in [0, 1] with start < stop, got {start} and {stop}")
            self._check_topk("grid_topk of topk_ranges", rows)
        for _, rows in self.step_topk:
            self._check_topk("grid_topk of step_topk", rows)
        if any(not 0 <= layer < self.num_layers for layer in self.dense_layers):
            raise ValueError(f"dense_layers must be in 0..{self.num_layers - 1}, got {list(self.dense_layers)}")
        if self.settings is not None:
            self._check_settings(self.settings)
        # DenoisingPlan refuses invalid combinations
        replace(self.denoising, step_topk=tuple((step, 1) for step, _ in self.step_topk))
        # raises ValueError for an unknown budget
        self._scaled(self.grid_topk[0][0], self.num_tiles[0])
        if (self.golden is None) != (self.golden_tolerance is None):
            raise ValueError(
                f"golden and golden_tolerance come together, got {self.golden} and {self.golden_tolerance}"
            )
        if self.golden is not None:
            inner_name(self.golden, "golden")

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        refuse_settings(self.method, settings, self.grids)
        if self.selects:
            return
        assert self._example is not None
        self.denoising.refuse_without_topk(self.method, predicts=self._example.predicts)
        all_tiles = tuple((n,) * self.num_layers for n in self.num_tiles)
        if self.topk_ranges or self.step_topk or self.grid_topk != all_tiles:
            raise ValueError(f"{self.method} selects no tiles, its grid_topk must be all of {list(self.num_tiles)}")

    def _check_topk(self, name: str, rows: Rows) -> None:
        if len(rows) != len(self.grids):
            raise ValueError(f"{name} must have one row per grid, got {len(rows)} rows and {len(self.grids)} grids")
        by_tiles: dict[int, tuple[int, ...]] = {}
        for row, num_tiles, grid in zip(rows, self.num_tiles, self.grids, strict=True):
            if not row or len(row) != self.num_layers:
                raise ValueError(f"{name} must have one entry per layer, got {len(row)} for grid {grid}")
            if min(row) < 1 or max(row) > num_tiles:
                raise ValueError(
                    f"{name} must be in 1..{num_tiles}, the tiles of grid {grid}, got {min(row)}..{max(row)}"
                )
            if by_tiles.setdefault(num_tiles, row) != row:
                raise ValueError(f"{name} has {by_tiles[num_tiles]} and {row} for grids of {num_tiles} tiles")

    @property
    def num_layers(self) -> int:
        return len(self.grid_topk[0])

    @property
    def selects(self) -> bool:
        """Whether its method has a top-k."""
        return self._example is None or self._example.selects

    @cached_property
    def _example(self) -> AttentionMethod | None:
        """A layer with the settings; None for video_sparse."""
        return None if self.settings is None else example_of(layers_of(NAMED[self.method], self.settings, None))

    @property
    def denoising(self) -> DenoisingPlan:
        """Dense steps and layers, and the reuse of selections; the top-k of steps is stored here, by grid."""
        return DenoisingPlan(
            dense_steps=self.dense_steps,
            dense_layers=self.dense_layers,
            refresh=self.refresh,
            shared_cache=self.shared_cache,
        )

    def layer_topk(self, num_tiles: int, *, progress: float = 1.0, step: int | None = None) -> tuple[float, ...]:
        """Kv tiles per query tile of each layer on a grid of `num_tiles` tiles.

        Args:
            num_tiles: video tiles of the grid.
            progress: denoising progress in [0, 1], 0 is pure noise.
            step: denoising step from 0; None disregards `dense_steps`.
        """
        if step is not None and step < self.dense_steps:
            return (num_tiles,) * self.num_layers
        return self.kept_on(num_tiles).at(progress, step).layers

    def kept_on(self, num_tiles: int) -> KeptTiles:
        """Kv tiles per query tile on a grid of `num_tiles` tiles, outside of the dense steps."""
        return KeptTiles(
            self._on_grid(self.grid_topk, num_tiles),
            ranges=tuple((start, stop, self._on_grid(rows, num_tiles)) for start, stop, rows in self.topk_ranges),
            steps=tuple((step, self._on_grid(rows, num_tiles)) for step, rows in self.step_topk),
        )

    def _on_grid(self, rows: Rows, num_tiles: int) -> tuple[int, ...]:
        if num_tiles in self.num_tiles:
            counts = rows[self.num_tiles.index(num_tiles)]
        else:
            counts = tuple(self._scaled(count, num_tiles) for count in rows[0])
        return tuple(num_tiles if layer in self.dense_layers else count for layer, count in enumerate(counts))

    def _scaled(self, count: int, num_tiles: int) -> int:
        rule = ConstantSparsity(topk=count, budget=self.budget, reference_tiles=self.num_tiles[0])
        return rule.target_topk(num_tiles)

    def sampled_at(self, steps: tuple[float, ...]) -> SparseAttentionConfig:
        """Settings of a generator with these timesteps, whose weights include flow shift and guidance."""
        if self.step_list == steps:
            return self
        return replace(self, step_list=steps, flow_shift=None, guidance_form="standard", guidance_scale=1.0)

    def to_json(self) -> str:
        """Content of the file."""
        return json.dumps(self.to_values(), indent=1) + "\n"

    def to_values(self) -> dict[str, Any]:
        """Plain values of the file; version 1, which more engines read, if no newer key is needed."""
        values = asdict(self)
        for name, keys in _ENTRIES.items():
            values[name] = tuple(dict(zip(keys, entry, strict=True)) for entry in values[name])
        if all(values[key] == value for key, value in VERSION_2.items()):
            return {key: value for key, value in values.items() if key not in VERSION_2} | {"schema_version": 1}
        return values | {"schema_version": SCHEMA_VERSION}

    @classmethod
    def from_json(cls, text: str) -> SparseAttentionConfig:
        """The config from the content of a file.

        Raises:
            ValueError: not a JSON object, another schema version, missing or unexpected keys, or an invalid value.
        """
        values = parse_json(text, "it")
        # checked first, since another version may have other keys
        version = values.get("schema_version")
        if version not in (1, SCHEMA_VERSION):
            raise ValueError(f"schema_version is {version}, this version reads 1 and {SCHEMA_VERSION}")
        values = {key: value for key, value in values.items() if key != "schema_version"}
        known_keys = {field.name for field in fields(cls)} - (set(VERSION_2) if version == 1 else set())
        # keys of version 2 are optional
        missing, unknown = sorted(known_keys - set(VERSION_2) - set(values)), sorted(set(values) - known_keys)
        if missing or unknown:
            raise ValueError(f"missing keys {missing}, unexpected keys {unknown}")
        try:
            for name, keys in _ENTRIES.items():
                for entry in values.get(name, ()):
                    if set(entry) != set(keys):
                        raise TypeError(f"{name} has an entry with {sorted(entry)} instead of {', '.join(keys)}")
                values[name] = [tuple(entry[key] for key in keys) for entry in values.get(name, ())]
            if values["method"] == "sparge" and isinstance(values.get("settings"), Mapping):
                values["settings"] = without_readings(values["settings"])
            if values["method"] == "video_sparse" and isinstance(values.get("settings"), Mapping):
                settings = LATER_SETTINGS | values["settings"]
                # in the order of a file of this version
                names = [name for name in described_settings(VideoSparseAttention) if name in settings]
                values["settings"] = {name: settings[name] for name in names} | settings
            return cls(**values)
        except TypeError as error:
            raise ValueError(f"a value has the wrong type ({error})") from None


def denoising_fields(topks: Sequence[KeptTiles], plan: DenoisingPlan, num_layers: int) -> dict[str, Any]:
    """The fields of a `SparseAttentionConfig` that depend on the denoising progress, except `dense_layers`.

    Args:
        topks: top-k of each trained grid, from one schedule.
        plan: plan of the schedule.
        num_layers: number of layers of the model.
    """

    def rows(row_of: Callable[[KeptTiles], tuple[float, ...]]) -> tuple[tuple[float, ...], ...]:
        return tuple(KeptTiles(row_of(topk)).by_layer(num_layers) for topk in topks)

    ranges, steps = topks[0].ranges, topks[0].steps
    return {
        "grid_topk": rows(lambda topk: topk.layers),
        "topk_ranges": tuple((*ranges[i][:2], rows(lambda topk, i=i: topk.ranges[i][2])) for i in range(len(ranges))),
        "step_topk": tuple((steps[i][0], rows(lambda topk, i=i: topk.steps[i][1])) for i in range(len(steps))),
        "dense_steps": plan.dense_steps,
        "refresh": plan.refresh,
        "shared_cache": plan.shared_cache,
    }


def read_sparse_config(folder: str | Path) -> SparseAttentionConfig:
    """The `sparse_attention.json` of a weights folder.

    Raises:
        ValueError: names a file that is missing, has another schema version or does not parse.
    """
    path = Path(folder) / SPARSE_CONFIG
    try:
        text = read_text(path)
    except FileNotFoundError:
        command = f"vsa convert {typed(path.parent)} OUT --sparsity S --grid T H W"
        remedy = f"{command} writes it, with what they were trained with"
        raise ValueError(f"{path} is missing: it says how gates of a sparse checkpoint are used; {remedy}") from None
    try:
        return SparseAttentionConfig.from_json(text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def write_sparse_config(folder: str | Path, config: SparseAttentionConfig) -> Path:
    """Write `sparse_attention.json` into a weights folder atomically; returns its path."""
    path = Path(folder) / SPARSE_CONFIG
    write_whole(path, config.to_json())
    return path


def has_sparse_config(folder: str | Path) -> bool:
    """Whether a weights folder has a `sparse_attention.json`."""
    return (Path(folder) / SPARSE_CONFIG).is_file()
