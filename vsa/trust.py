"""Two levels of trust in settings: what is typed may do all, what stands in a file may come from others.

Typed are the words of a command line; the configs that Hydra ships count as typed. Files are experiments and sweeps,
and the configs in checkpoints, exports and published runs. Their settings refer to other settings and to nothing else,
name no server, and build classes of this project, and of Lightning those in `FOREIGN`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vsa.places import leaves

FOREIGN: Mapping[str, Sequence[str]] = {
    "Trainer": (
        *("accelerator", "strategy", "devices", "num_nodes", "precision", "deterministic", "detect_anomaly"),
        *("max_steps", "max_epochs", "max_time", "accumulate_grad_batches", "overfit_batches", "limit_val_batches"),
        *("val_check_interval", "check_val_every_n_epoch", "num_sanity_val_steps", "log_every_n_steps"),
        *("enable_checkpointing", "enable_progress_bar", "enable_model_summary"),
    ),
    "TensorBoardLogger": ("name", "version", "sub_dir", "prefix", "log_graph", "default_hp_metric"),
    "CSVLogger": ("name", "version", "prefix", "flush_logs_every_n_steps"),
    "EarlyStopping": ("monitor", "min_delta", "patience", "mode", "strict", "check_finite", "stopping_threshold"),
}
"""Classes of Lightning that a file may build, and the arguments that it may give them."""

# also within another one: ${a.${b}}
_REFERENCE = re.compile(r"\$\{[^${}:]*\}")
# an address, but no study of optuna in a file
SERVER = re.compile(r"(?<!^sqlite)://")

Key = tuple[str, ...]


def refuse_other_references(node: Any, where: str = "", top: Key = ()) -> None:
    """Refuse names and texts of a stored config that refer to more than settings, as `${oc.env:X}` does.

    Args:
        node: plain containers, not resolved.
        where: start of the message.
        top: key of the node.

    Raises:
        ValueError: names the key and the value.
    """
    for key, value in leaves(node, top):
        left = "\n".join(map(str, (*key, value)))
        while (outer := _REFERENCE.sub("", left)) != left:
            left = outer
        if "${" in left:
            raise _only_typed(key, value, "a file may refer to other settings only, as in ${KEY}", where)


def refuse_untyped(values: Sequence[tuple[Key, Any]], is_typed: Callable[[Key], bool]) -> None:
    """Refuse values of a composed config that only typed words may have.

    Args:
        values: resolved values with their keys.
        is_typed: whether a key was typed.

    Raises:
        ValueError: names the key and the value.
    """
    typed_texts = {value for key, value in values if isinstance(value, str) and is_typed(key)}
    targets = {key[:-1]: str(value) for key, value in values if key[-1] == "_target_"}
    names = {key: target.rpartition(".")[2] for key, target in targets.items() if target.startswith("lightning.")}
    for key, value in values:
        if value is None or is_typed(key):
            continue
        refuse_other_references({".".join(key): value})
        # a file may pass on what was typed
        if SERVER.search(str(value)) and value not in typed_texts:
            raise _only_typed(key, value, "a file may not name a server")
        for depth, argument in enumerate(key):
            name = names.get(key[:depth])
            if name is not None and argument not in (("_target_", *FOREIGN[name]) if name in FOREIGN else ()):
                raise _only_typed(key, value, f"a file may not set {argument} of {name}")


def _only_typed(key: Key, value: Any, rule: str, where: str = "") -> ValueError:
    # a group in a list of defaults may have a slash
    name = ".".join(key).rpartition("/")[2]
    typed = shlex.quote(f'{name}="{value}"')
    return ValueError(f"{where}{name}={value}: {rule}; if you trust it, type {typed}")
