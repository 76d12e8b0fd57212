"""Current names of classes that configs of earlier versions name."""

from __future__ import annotations

from typing import Any

MOVED = {
    "vsa.attention.annealing.": "vsa.attention.sparsity_schedules.",
    "vsa.attention.schedule.": "vsa.attention.sparsity.",
    "vsa.data.toy_datamodule.": "vsa.data.datamodule.",
    "vsa.training.distill.": "vsa.training.modules.distill.",
    "vsa.training.distill_loss.": "vsa.objectives.distribution_matching.",
    "vsa.training.finetune.FinetuneLoss": "vsa.objectives.flow_matching.FinetuneLoss",
    "vsa.training.finetune.": "vsa.training.modules.finetune.",
    "vsa.training.gan.": "vsa.objectives.discriminator.",
    "vsa.training.health.": "vsa.training.distill_metrics.",
    "vsa.training.lora.": "vsa.checkpoints.lora.",
    "vsa.training.optim.": "vsa.training.optimizer.",
    "vsa.training.pretrain.FlowMatchingLoss": "vsa.objectives.flow_matching.FlowMatchingLoss",
    "vsa.training.pretrain.": "vsa.training.modules.pretrain.",
}
"""Old prefixes of a `_target_` and their replacements; the longest matching prefix applies."""


def moved_target(target: str) -> str:
    """Current name of a class that a config of any version names."""
    fitting = [old for old in MOVED if target.startswith(old)]
    if not fitting:
        return target
    longest = max(fitting, key=len)
    return MOVED[longest] + target.removeprefix(longest)


def moved_targets(config: Any) -> Any:
    """A config of plain values with the current class name under every `_target_`."""
    if isinstance(config, dict):
        return {
            key: moved_target(value) if key == "_target_" and isinstance(value, str) else moved_targets(value)
            for key, value in config.items()
        }
    if isinstance(config, list):
        return [moved_targets(value) for value in config]
    return config
