"""Merging of a sparse adaptation and a few-step distillation of one dense base into one generator.

`merged = base + a * (sparse - base) + b * (few_step - base)`. Gates, which only the sparse weights have, are copied. A
sparse run gives a run folder with weights only, to sample, score, convert and `init_from=`; a sparse diffusers folder
gives a diffusers folder.

Source: TurboDiffusion trains and merges its sparse attention and its distillation this way (arXiv 2512.16093).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from vsa.attention.full import FullAttention
from vsa.checkpoints.convert import with_dtypes
from vsa.checkpoints.run_weights import RunWeights
from vsa.checkpoints.wan import export_pretrained, gate_names
from vsa.checkpoints.wan_names import is_gate
from vsa.checkpoints.weight_files import finite, refuse_existing
from vsa.checkpoints.weight_source import open_weights
from vsa.checkpoints.weights import WeightSource
from vsa.checkpoints.weights_run import write_weights_run
from vsa.diffusion.sampler import step_list
from vsa.models.init import without_memory
from vsa.models.network import Network

# values of a run's checkpoint that describe its weights; the others are for resuming its training
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
    "image_encoder",
    "latent_shapes",
)


class MergedTensors(Mapping[str, Tensor]):
    """Tensors of the merged model, each computed when it is accessed.

    Args:
        base: dense tensors by name.
        sparse: tensors of the base after the sparse adaptation, and its gates.
        few_step: tensors of the base after the distillation.
        sparse_weight: factor of `sparse - base`.
        few_step_weight: factor of `few_step - base`.
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
        return finite(merged, name, f"the merged weights in {sparse.dtype} with the factors {self._weights}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._sparse)

    def __len__(self) -> int:
        return len(self._sparse)


def merge(base: Tensor, sparse: Tensor, few_step: Tensor, sparse_weight: float, few_step_weight: float) -> Tensor:
    """`base + sparse_weight * (sparse - base) + few_step_weight * (few_step - base)` in float64.

    With weights of 1, if one source equals the base, the result equals the other one exactly.
    """
    merged = base.double()
    for source, weight in ((sparse, sparse_weight), (few_step, few_step_weight)):
        merged = merged + weight * (source.double() - base)
    return merged


def networks(sparse: WeightSource) -> tuple[Network, Network]:
    """The network of the sparse source, and the same with dense attention, on the meta device.

    Raises:
        ValueError: the source has no config, or its attention is dense.
    """
    with without_memory():
        model, dense = sparse.network(), sparse.network(attention=FullAttention)
    if model.is_dense:
        raise ValueError(f"--sparse {sparse.name} has full attention and no gates: there is no sparse adaptation in it")
    return model, dense


def few_step_list(few_step: WeightSource, given: Sequence[float] | None) -> tuple[float, ...]:
    """The timesteps of the distilled source: its own, or `given` if it has none.

    Raises:
        ValueError: none or both, or a list that does not decrease within (0, 1000].
    """
    if few_step.step_list is None:
        if given is None:
            raise ValueError(f"--few-step {few_step.name} does not name its timesteps: set --step-list")
        return step_list(given)
    if given is not None:
        own = list(few_step.step_list)
        raise ValueError(f"--few-step {few_step.name} has the step list {own}, leave --step-list {list(given)} out")
    return few_step.step_list


def refuse_other_models(base: WeightSource, sparse: WeightSource, few_step: WeightSource) -> Network:
    """Refuse sources of different architectures; returns the sparse network, on the meta device.

    Raises:
        ValueError: names the difference.
    """
    for option, source in (("the base", base), ("--few-step", few_step)):
        if gates := sorted(filter(is_gate, source)):
            raise ValueError(f"{option} {source.name} has gates ({gates[0]}, ...), but only --sparse may be sparse")
        if source.sparse is not None:
            name = source.sparse.method
            raise ValueError(f"{option} {source.name} has {name} attention, but only --sparse may be sparse")
    for option, source in (("the base", base), ("--sparse", sparse)):
        if source.step_list is not None:
            raise ValueError(f"{option} {source.name} is distilled already, to the timesteps {list(source.step_list)}")
    model, dense = networks(sparse)
    sparse.check(model, "required" if gate_names(model) else "absent")
    for source in (base, few_step):
        try:
            source.check(dense, "absent")
        except ValueError as error:
            raise ValueError(f"{error} (the model is that of --sparse {sparse.name})") from None
    return model


def refuse_other_data(sources: Sequence[WeightSource]) -> None:
    """Refuse sources with different latents or text encoders, as far as known.

    Raises:
        ValueError: names the difference with both values.
    """
    known_facts: dict[str, tuple[Any, str]] = {}
    for source in sources:
        facts = {key: source.state[key] for key in ("latent_mean", "latent_std") if key in source.state}
        for key in ("codec", "text_encoder", "image_encoder"):
            if key in source.state:
                facts[f"{key} hash"] = source.state[key]["hash"]
        if "data" in source.run_config:
            facts["data.text_padding"] = source.run_config["data"].get("text_padding", "mask")
        for key, value in facts.items():
            expected, name = known_facts.setdefault(key, (value, source.name))
            if value != expected:
                raise ValueError(f"{source.name} has {key} {value}, {name} has {expected}")


def other_base(source: WeightSource, base: WeightSource) -> str | None:
    """The initial weights that a run names if they are not known to be the base; otherwise, or if unknown, None."""
    spec = source.run_config.get("init_from")
    teacher = source.state.get("teacher") or {}
    if spec is None or spec == base.source or teacher.get("digest") == base.digest:
        return None
    # the folder may be the checkpoint of a run folder, or the transformer of a pipeline folder
    place = base.folder.resolve()
    return None if Path(spec).resolve() in (place, *place.parents) else spec


def merged_state(sparse: WeightSource, steps: tuple[float, ...], merged_from: Mapping[str, Any]) -> dict[str, Any]:
    """`state.json` of the merged run: that of the sparse one, with the step list and without its training state."""
    state = {key: sparse.state[key] for key in KEPT if key in sparse.state}
    if sparse.run_config.get("task", {}).get("lora") is not None:
        # the adapters are merged into the weights
        state["config"] = {**state["config"], "task": {**state["config"]["task"], "lora": None}}
    return {**state, "step_list": list(steps), "merged_from": dict(merged_from)}


def merge_checkpoints(
    base: str,
    out: Path,
    *,
    sparse: str,
    few_step: str,
    factors: tuple[float, float] = (1.0, 1.0),
    steps: Sequence[float] | None = None,
) -> list[str]:
    """Write the merged generator: a run folder for a sparse run, a diffusers folder for a sparse folder.

    Args:
        base: dense weights that both others were trained from; for all three see `open_weights`.
        out: target folder, which must not exist.
        sparse: the base adapted to sparse attention.
        few_step: the base distilled to few steps, dense.
        factors: factors of `sparse - base` and of `few_step - base`.
        steps: timesteps of a distilled source that does not record its own.

    Returns:
        lines that report the result.

    Raises:
        ValueError: sources that do not match, or a merged value that is not finite.
    """
    refuse_existing(out)
    source_by_role = {
        key: open_weights(spec) for key, spec in (("base", base), ("sparse", sparse), ("few_step", few_step))
    }
    dense, adapted, distilled = sources = list(source_by_role.values())
    model = refuse_other_models(*sources)
    refuse_other_data(sources)
    timesteps = few_step_list(distilled, steps)
    lines = [
        f"note: {source.name} started from {spec}, which is not known to be the base {dense.name}"
        for source in (adapted, distilled)
        if (spec := other_base(source, dense)) is not None
    ]
    weights = dict(zip(("sparse_weight", "few_step_weight"), factors, strict=True))
    merged = MergedTensors(dense, adapted, distilled, **weights)
    if isinstance(adapted, RunWeights):
        merged_from = {
            key: {"source": source.source, "digest": source.digest} for key, source in source_by_role.items()
        }
        state = merged_state(adapted, timesteps, {**merged_from, **weights})
        write_weights_run(out, merged, state)
    else:
        assert adapted.sparse is not None
        # the golden tensors were computed with other weights
        own = replace(adapted.sparse.sampled_at(timesteps), golden=None, golden_tolerance=None)
        export_pretrained(with_dtypes(model, adapted), out, sparse=own, tensors=merged.__getitem__)
    gates = len(adapted) - len(dense)
    return [*lines, f"{len(dense)} tensors merged, {gates} of gates kept, timesteps {list(timesteps)}, in {out}"]
