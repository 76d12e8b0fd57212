"""Merge a sparse adaptation and a few-step distillation, trained apart from one dense base, into one generator.

`merged = base + a * (sparse - base) + b * (few_step - base)`, with a = --sparse-weight and b = --few-step-weight. What
only the sparse checkpoint has, its gates, is taken from it as it is. Each source is a run or checkpoint folder of
ours (averaged weights where there are any), a diffusers folder or a hub id. A sparse run gives a run folder with
weights alone, to sample, score, convert and `init_from=`; a sparse diffusers folder gives a diffusers folder.

python scripts/merge_deltas.py BASE --sparse ADAPTED --few-step DISTILLED OUT
python scripts/merge_deltas.py BASE --sparse EXPORT --step-list 1000 757 522 --few-step FOLDER OUT

Source: TurboDiffusion trains and merges its sparse attention and its distillation this way (arXiv 2512.16093).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vsa.attention.full import FullAttention
from vsa.checkpoints.lora import plain_tensors
from vsa.checkpoints.run_checkpoint import write_checkpoint
from vsa.checkpoints.sparse_config import SparseAttentionConfig, has_sparse_config, read_sparse_config
from vsa.checkpoints.wan import attention_of, export_pretrained, gate_names
from vsa.checkpoints.wan_config import read_transformer_config, video_dit_arguments
from vsa.checkpoints.wan_names import is_gate, is_unused
from vsa.checkpoints.weight_files import WeightFiles, new_folder, refuse_existing
from vsa.checkpoints.weight_source import PretrainedStart, RunStart, Start, resolve_start
from vsa.config import check_targets, model_factory
from vsa.diffusion.sampler import step_list
from vsa.errors import one_line_errors
from vsa.models.video_dit import VideoDiT
from vsa.sampling.pipeline import choose_weights

# what a run's checkpoint says about its weights; the rest is about going on with its training
KEPT = (
    "step",
    "seed",
    "config",
    "sparsity_state",
    "sparse_attention",
    "latent_mean",
    "latent_std",
    "codec",
    "text_encoder",
    "latent_shapes",
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One of the checkpoints to merge.

    Args:
        start: names its weights and checks them against a model.
        tensors: by parameter name, adapters merged; read from the file where they are used.
        state: `state.json` of a run; empty for a folder in diffusers' layout.
    """

    start: Start
    tensors: Mapping[str, Tensor]
    state: Mapping[str, Any]

    @property
    def name(self) -> str:
        return self.start.source

    @property
    def config(self) -> Mapping[str, Any]:
        """The config of a run."""
        return self.state.get("config") or {}


class MergedTensors(Mapping[str, Tensor]):
    """The tensors of the merged model, computed one at a time where they are asked for.

    Args:
        base: dense tensors by name.
        sparse: those of the base after the sparse adaptation, and its gates.
        few_step: those of the base after the distillation.
        sparse_weight: factor on `sparse - base`.
        few_step_weight: factor on `few_step - base`.
    """

    def __init__(
        self,
        base: Mapping[str, Tensor],
        sparse: Mapping[str, Tensor],
        few_step: Mapping[str, Tensor],
        *,
        sparse_weight: float = 1.0,
        few_step_weight: float = 1.0,
    ):
        self._base, self._sparse, self._few_step = base, sparse, few_step
        self._weights = (sparse_weight, few_step_weight)

    def __getitem__(self, name: str) -> Tensor:
        """The merged tensor in the dtype of the sparse one, summed in float64.

        Raises:
            ValueError: a value that is not finite in that dtype.
        """
        sparse = self._sparse[name]
        if name not in self._base:
            return sparse
        merged = merge(self._base[name], sparse, self._few_step[name], *self._weights).to(sparse.dtype)
        if not merged.isfinite().all():
            raise ValueError(f"the merged {name} is not finite in {sparse.dtype}, with weights {self._weights}")
        return merged

    def __iter__(self) -> Iterator[str]:
        return iter(self._sparse)

    def __len__(self) -> int:
        return len(self._sparse)


def merge(base: Tensor, sparse: Tensor, few_step: Tensor, sparse_weight: float, few_step_weight: float) -> Tensor:
    """`base + sparse_weight * (sparse - base) + few_step_weight * (few_step - base)` in float64.

    With weights of 1 a source that equals the base leaves the other one as it is.
    """
    merged = base.double()
    for source, weight in ((sparse, sparse_weight), (few_step, few_step_weight)):
        merged = merged + weight * (source.double() - base)
    return merged


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="dense checkpoint that both were trained from")
    parser.add_argument("out", type=Path, help="folder to write, must not exist")
    parser.add_argument("--sparse", required=True, metavar="SOURCE", help="the base adapted to sparse attention")
    parser.add_argument("--few-step", required=True, metavar="SOURCE", help="the base distilled to few steps, dense")
    parser.add_argument("--sparse-weight", type=float, default=1.0, metavar="A", help="factor on sparse - base (1)")
    parser.add_argument("--few-step-weight", type=float, default=1.0, metavar="B", help="factor on few_step - base (1)")
    parser.add_argument(
        "--step-list", type=float, nargs="+", metavar="T", help="timesteps of a --few-step that does not say its own"
    )
    return parser.parse_args(argv)


def open_source(spec: str) -> Source:
    """Find out what `spec` is and open it; its tensors are read later.

    Raises:
        ValueError: nothing there that holds weights.
    """
    start = resolve_start(spec)
    if isinstance(start, RunStart):
        tensors = plain_tensors(start.checkpoint, choose_weights(start.checkpoint))
        return Source(start=start, tensors=tensors, state=start.checkpoint.state)
    assert isinstance(start, PretrainedStart)
    files = WeightFiles(start.folder)
    return Source(start=start, tensors={key: files.read(key) for key in files.keys if not is_unused(key)}, state={})


def networks(sparse: Source) -> tuple[VideoDiT, VideoDiT]:
    """The network of the sparse source and the same one with dense attention, on the meta device.

    Raises:
        ValueError: no config of it, or the attention is dense.
    """
    make: Callable[..., VideoDiT]
    if isinstance(sparse.start, PretrainedStart):
        arguments = video_dit_arguments(read_transformer_config(sparse.start.folder))
        make = partial(VideoDiT, attention=attention_of(_sparse_config(sparse.start, sparse.tensors)), **arguments)
    else:
        for key in ("model", "attention"):
            if key not in sparse.config:
                raise ValueError(f"checkpoint {sparse.name} has no config for {key}")
        check_targets(sparse.config)
        make = model_factory(sparse.config)
    with torch.device("meta"):
        model, dense = make(), make(attention=FullAttention)
    method: Any = model.blocks[0].method
    if isinstance(method, FullAttention):
        raise ValueError(f"--sparse {sparse.name} has full attention and no gates: there is no sparse adaptation in it")
    return model, dense


def _sparse_config(start: PretrainedStart, tensors: Mapping[str, Tensor]) -> SparseAttentionConfig | None:
    """How the gates of a folder are used; None without any."""
    described = has_sparse_config(start.folder) or any(map(is_gate, tensors))
    return read_sparse_config(start.folder) if described else None


def few_step_list(few_step: Source, given: Sequence[float] | None) -> tuple[float, ...]:
    """The timesteps of the distilled source: its own, or those of the command line where it says none.

    Raises:
        ValueError: none or both, or a list that does not fall in (0, 1000].
    """
    own = few_step.state.get("step_list")
    if own is None:
        if given is None:
            raise ValueError(f"--few-step {few_step.name} does not say its timesteps: give them with --step-list")
        return step_list(given)
    if given is not None:
        raise ValueError(f"--few-step {few_step.name} has the step list {own}, leave --step-list {list(given)} out")
    return step_list(own)


def refuse_other_models(base: Source, sparse: Source, few_step: Source) -> VideoDiT:
    """Refuse sources that are not of one architecture; returns the sparse network, on the meta device.

    Raises:
        ValueError: names what differs.
    """
    for option, source in (("the base", base), ("--few-step", few_step)):
        if gates := sorted(filter(is_gate, source.tensors)):
            raise ValueError(f"{option} {source.name} has gates ({gates[0]}, ...), but only --sparse may be sparse")
    for option, source in (("the base", base), ("--sparse", sparse)):
        if (steps := source.state.get("step_list")) is not None:
            raise ValueError(f"{option} {source.name} is distilled already, to the timesteps {steps}")
    model, dense = networks(sparse)
    sparse.start.check(model, "required" if gate_names(model) else "absent")
    for source in (base, few_step):
        try:
            source.start.check(dense, "absent")
        except ValueError as error:
            raise ValueError(f"{error} (the model is that of --sparse {sparse.name})") from None
    return model


def refuse_other_data(sources: Sequence[Source]) -> None:
    """Refuse sources that understand different latents or texts, as far as they say it.

    Raises:
        ValueError: names the fact with both values.
    """
    known: dict[str, tuple[Any, str]] = {}
    for source in sources:
        facts = {key: source.state[key] for key in ("latent_mean", "latent_std") if key in source.state}
        for key in ("codec", "text_encoder"):
            if key in source.state:
                facts[f"{key} hash"] = source.state[key]["hash"]
        if "data" in source.config:
            facts["data.text_padding"] = source.config["data"].get("text_padding", "mask")
        for key, value in facts.items():
            wanted, name = known.setdefault(key, (value, source.name))
            if value != wanted:
                raise ValueError(f"{source.name} has {key} {value}, {name} has {wanted}")


def other_base(source: Source, base: Source) -> str | None:
    """What a run says it started from when nothing says that it was the base; None when it was, or is unknown."""
    spec = source.config.get("init_from")
    teacher = source.state.get("teacher") or {}
    if spec is None or spec == base.name or teacher.get("digest") == base.start.digest:
        return None
    # the checkpoint of a run folder, or the transformer of a pipeline's
    place = Path(base.start.folder if isinstance(base.start, PretrainedStart) else base.name).resolve()
    return None if Path(spec).resolve() in (place, *place.parents) else spec


def merged_state(sparse: Source, steps: tuple[float, ...], merged_from: Mapping[str, Any]) -> dict[str, Any]:
    """`state.json` of the merged run: that of the sparse one, with the few steps and without its training."""
    state = {key: sparse.state[key] for key in KEPT if key in sparse.state}
    if sparse.config.get("task", {}).get("lora") is not None:
        # the adapters are in the weights now
        state["config"] = {**sparse.config, "task": {**sparse.config["task"], "lora": None}}
    return {**state, "step_list": list(steps), "merged_from": dict(merged_from)}


def main(argv: list[str] | None = None) -> None:
    args = parse_args(argv)
    refuse_existing(args.out)
    base, sparse, few_step = sources = [open_source(spec) for spec in (args.base, args.sparse, args.few_step)]
    model = refuse_other_models(base, sparse, few_step)
    refuse_other_data(sources)
    steps = few_step_list(few_step, args.step_list)
    for source in (sparse, few_step):
        if (spec := other_base(source, base)) is not None:
            print(f"note: {source.name} started from {spec}, which is not known to be the base {base.name}")

    weights = {"sparse_weight": args.sparse_weight, "few_step_weight": args.few_step_weight}
    merged = MergedTensors(base.tensors, sparse.tensors, few_step.tensors, **weights)
    if isinstance(sparse.start, PretrainedStart):
        for name, parameter in model.named_parameters():
            # the files get the dtypes of the sparse source
            parameter.data = parameter.data.to(sparse.tensors[name].dtype)
        config = read_sparse_config(sparse.start.folder)
        # golden tensors are of other weights
        own = replace(config.sampled_at(steps), golden=None, golden_tolerance=None)
        export_pretrained(model, args.out, sparse=own, tensors=merged.__getitem__)
    else:
        named = {"base": base, "sparse": sparse, "few_step": few_step}
        merged_from = {key: {"source": s.name, "digest": s.start.digest} for key, s in named.items()}
        state = merged_state(sparse, steps, {**merged_from, **weights})
        # the run folder appears when all of it is written
        with new_folder(args.out) as temporary:
            write_checkpoint(temporary / "checkpoints", {"model": merged}, state)
    gates = len(sparse.tensors) - len(base.tensors)
    print(f"{len(base.tensors)} tensors merged, {gates} of gates kept, timesteps {list(steps)}, in {args.out}")


if __name__ == "__main__":
    with one_line_errors():
        main()
