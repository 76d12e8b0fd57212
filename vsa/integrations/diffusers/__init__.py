"""Attention methods of this project inside pretrained diffusers transformers.

from vsa.integrations.diffusers import apply, remove

apply(pipe.transformer, sparsity=0.9)
video = pipe("a red circle moving left").frames
remove(pipe.transformer)
apply(pipe.transformer, method="neighborhood", settings={"window_thw": (18, 24, 24), "stride_thw": (16, 8, 8)})
"""

from vsa.integrations.diffusers.adapter_file import merge_adapter
from vsa.integrations.diffusers.install import Applied, applied_attention, apply, remove
from vsa.integrations.diffusers.pretrained import load_sparse
from vsa.integrations.diffusers.step_schedules import percents_of, plan_of_percents, plan_of_ratios, ratios_of

__all__ = [
    "Applied",
    "applied_attention",
    "apply",
    "load_sparse",
    "merge_adapter",
    "percents_of",
    "plan_of_percents",
    "plan_of_ratios",
    "ratios_of",
    "remove",
]
