"""The sampler of a few-step generator as a diffusers scheduler.

This file imports diffusers at the top, because its classes are the bases; import it inside functions only.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import ConfigMixin, SchedulerMixin
from diffusers.configuration_utils import register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from torch import Tensor

from vsa.diffusion import sampler
from vsa.diffusion.flow_matching import TIMESTEP_SCALE, add_noise, velocity_to_x0
from vsa.diffusion.rollout import rollout_noise


class FewStepScheduler(SchedulerMixin, ConfigMixin):
    """Scheduler that runs `sampler.sample_few_step` in a diffusers pipeline, with the noise of the training.

    The noise of a clip comes from its seed, which a pipeline does not pass to its scheduler. Before each call, `start`
    takes the seeds and returns the initial noise:

    noise = pipe.scheduler.start(torch.empty(1, 16, 21, 60, 104), torch.tensor([0]))
    pipe(prompt, latents=noise, guidance_scale=1.0)

    Args:
        step_list: timesteps of the generator, strictly decreasing, in (0, 1000], with any shift already applied.
    """

    # model evaluations per step
    order = 1

    @register_to_config
    def __init__(self, step_list: Sequence[float]):
        steps = sampler.step_list(step_list)
        self.timesteps = torch.tensor(steps, dtype=torch.float32)
        self.sigmas = torch.tensor(steps, dtype=torch.float64) / TIMESTEP_SCALE
        self.seeds: Tensor | None = None

    def start(self, latents: Tensor, seeds: Tensor) -> Tensor:
        """Initial noise of the next call of the pipeline.

        Args:
            latents: `[B, ...]`, gives shape, dtype and device.
            seeds: int64 `[B]` of the clips.
        """
        noise = rollout_noise(latents, seeds, 0)
        self.seeds = seeds
        return noise

    def set_timesteps(self, num_inference_steps: int | None = None, device: torch.device | str | None = None) -> None:
        """Put the step list on a device; `num_inference_steps` is ignored. `start` must have been called."""
        if self.seeds is None:
            raise ValueError("a few-step generator needs the seeds of its clips: scheduler.start() before each call")
        self.timesteps = self.timesteps.to(device)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Ignored, but called by pipelines: `step` finds its index by the timestep."""

    def step(
        self, model_output: Tensor, timestep: Tensor | float, sample: Tensor, return_dict: bool = True
    ) -> SchedulerOutput | tuple[Tensor]:
        """Predict the data and add fresh noise for the next step; the last step returns the predicted data.

        Args:
            model_output: `[B, ...]` velocity at `sample`.
            timestep: a timestep of the list.
            sample: `[B, ...]` noised latents.
            return_dict: False returns a tuple.

        Returns:
            float32 `[B, ...]` as `prev_sample`, or in a tuple of one.
        """
        assert self.seeds is not None
        index = self.timesteps.tolist().index(float(timestep))
        sigmas = self.sigmas[:, None].expand(-1, len(sample))
        x = velocity_to_x0(sample.float(), model_output.float(), sigmas[index])
        if index + 1 < len(sigmas):
            x = add_noise(x, rollout_noise(x, self.seeds, index + 1), sigmas[index + 1])
        else:
            # the seeds are used up; the next clips need their own
            self.seeds = None
        return SchedulerOutput(prev_sample=x) if return_dict else (x,)
