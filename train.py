"""Train a video diffusion transformer: `python train.py experiment=quickstart`."""

import hydra
from omegaconf import DictConfig

from vsa.training.train import command, run


@hydra.main(version_base="1.3", config_path="configs", config_name="train")
def main(cfg: DictConfig) -> None:
    run(cfg)


if __name__ == "__main__":
    command(main)
