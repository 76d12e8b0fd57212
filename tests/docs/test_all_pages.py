"""The commands of all other pages, typed in order as they stand, with tiny models and few steps."""

from __future__ import annotations

import shutil

import pytest

from tests.docs.pages import FENCE, PAGES, ROOT, Command, commands_of
from tests.docs.test_chains import CLIPS, typist  # noqa: F401
from tests.docs.typist import WAN, Typist, lay_out
from tests.tiny_runs import command_line  # noqa: F401

IN_CHAINS = ("README.md", "quickstart.md", "own-videos.md")
LEFT_OUT = {
    # a dump of a step that was not finite
    "replay",
    # 8 machines
    "trainer.num_nodes=8",
    # tests/integrations/test_image_to_video.py
    "Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    "init_from=Wan-AI/Wan2.1-I2V-14B-720P-Diffusers",
    "outputs/finetune_wan_14b/default",
    # four ranks, tests/training/test_distributed.py
    "task.parallel.sequence=4",
    # a scheduler, a search and packages that may not be there
    "hydra/launcher=submitit_slurm",
    "hydra/sweeper=optuna",
    "outputs/dense/run",
    # https://HOST
    "data=stream",
    # runs of two experts, tests/sampling/test_experts.py
    "--transformer-2",
    "BOTH",
    # films that come later
    "--add",
    "data.revision=[[0,1],[5000,2]]",
    # a repository of the hub
    "OWNER/my-model",
    "init_from=OWNER/my-model",
    # drawn clips with photographs of a package, tests/training/test_world.py
    "experiment=world",
}


def typed_commands(name: str) -> list[Command]:
    text = (ROOT / name).read_text(encoding="utf-8")
    script = "\n".join(body for language, body in FENCE.findall(text) if language == "bash")
    listing = []
    for command in commands_of(script, name):
        words = command.words
        if "train.py" in words:
            # by a launcher of processes: this one is the only rank
            words = ("vsa", "train", *command.settings, "trainer.devices=1")
        if words[0] == "vsa" and words[1] != "sweep" and not LEFT_OUT & {*words}:
            listing.append(Command(words, name))
    return listing


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in IN_CHAINS and page.parent.name != "benchmarks"],
    ids=lambda page: page.stem,
)
def test_the_commands_run(page, typist):  # noqa: F811
    listing = typed_commands(str(page.relative_to(ROOT)))
    if not listing:
        pytest.skip("no commands of vsa")
    lay_out(typist.folder, clips=CLIPS)
    prepare(typist, listing)
    for command in listing:
        for printed in typist(command):
            if printed not in typist.typed:
                typist(printed)


def prepare(typist: Typist, listing: list[Command]) -> None:  # noqa: F811
    """What the page takes as given: runs, data and files of earlier pages."""
    words = {word for command in listing for word in command.words}
    folder = typist.folder
    (folder / "PIPELINE").symlink_to(WAN, target_is_directory=True)
    (folder / "PROMPTS.txt").write_text("a red circle\na blue square\n", encoding="utf-8")
    shutil.copy(folder / "VIDEOS" / "toy-0-000000.mp4", folder / "CLIP.mp4")
    if words & {"outputs/quickstart/default", "outputs/quickstart/stages", "RUN", "RUN_A"}:
        typist("vsa train experiment=quickstart")
        default = folder / "outputs" / "quickstart" / "default"
        for name in ("RUN", "RUN_A", "RUN_B", "outputs/quickstart/stages/a", "outputs/quickstart/stages/b"):
            shutil.copytree(default, folder / name)
    makes = [c for c in listing if c.words[1] in ("encode", "latents")]
    if any("SHARDS" in word for word in words) and not (makes and makes[0] == listing[0]):
        is_wan = any("wan" in word for word in words)
        typist(f"vsa encode VIDEOS SHARDS {f'--model {WAN}' if is_wan else '--text-dim 4096'}")
        if is_wan and any("120m" in word for word in words):
            typist("vsa encode VIDEOS HAAR_SHARDS --text-dim 4096")
    finetunes = any("experiment=finetune_wan_1_3b" in c.words for c in listing)
    if "outputs/finetune_wan_1_3b/default" in words and not finetunes:
        if not (folder / "SHARDS").exists():
            typist(f"vsa encode VIDEOS SHARDS --model {WAN}")
        typist(f"vsa train experiment=finetune_wan_1_3b data.root=SHARDS init_from={WAN} data.codec.source={WAN}")
