"""The sampler of a few-step generator as a diffusers scheduler.

diffusers is imported here at the top, as its classes are the bases: import this file inside functions.
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
    """`sampler.sample_few_step` for a diffusers pipeline, with the noise that a generator was trained with.

    The noise of a clip comes from its seed, which a pipeline does not hand to its scheduler. `start` takes the seeds
    and gives the noise to begin with, once before each call:

    noise = pipe.scheduler.start(torch.empty(1, 16, 21, 60, 104), torch.tensor([0]))
    pipe(prompt, latents=noise, guidance_scale=1.0)

    Args:
        step_list: timesteps of the generator, falling, in (0, 1000]; they are used as they are.

    Raises:
        ValueError: no such list.
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
        """Noise that the next call of the pipeline begins with.

        Args:
            latents: `[B, ...]`, gives shape, dtype and device.
            seeds: int64 `[B]` of the clips.

        Raises:
            ValueError: if there is not one seed per clip.
        """
        noise = rollout_noise(latents, seeds, 0)
        self.seeds = seeds
        return noise

    def set_timesteps(self, num_inference_steps: int | None = None, device: torch.device | str | None = None) -> None:
        """Put the timesteps on a device; they are the list, whatever number of steps is asked for.

        Raises:
            ValueError: there was no `start`.
        """
        if self.seeds is None:
            raise ValueError("a few-step generator needs the seeds of its clips: scheduler.start() before each call")
        self.timesteps = self.timesteps.to(device)

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Part of what pipelines call; `step` finds its place by the timestep."""

    def step(
        self, model_output: Tensor, timestep: Tensor | float, sample: Tensor, return_dict: bool = True
    ) -> SchedulerOutput | tuple[Tensor]:
        """Predict the data, and noise it to the next level with fresh noise; after the last step it is the result.

        Args:
            model_output: `[B, ...]` velocity at `sample`.
            timestep: of the list.
            sample: `[B, ...]` noised latents.
            return_dict: False gives a tuple.

        Returns:
            float32 `[B, ...]` as `prev_sample`, or alone in a tuple.
        """
        assert self.seeds is not None
        index = self.timesteps.tolist().index(float(timestep))
        sigmas = self.sigmas[:, None].expand(-1, len(sample))
        x = velocity_to_x0(sample.float(), model_output.float(), sigmas[index])
        if index + 1 < len(sigmas):
            x = add_noise(x, rollout_noise(x, self.seeds, index + 1), sigmas[index + 1])
        else:
            # these seeds are used up, other clips need their own
            self.seeds = None
        return SchedulerOutput(prev_sample=x) if return_dict else (x,)
