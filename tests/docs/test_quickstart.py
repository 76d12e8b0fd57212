"""The commands of the quickstart run one after the other, with a tiny model and few steps."""

from __future__ import annotations

import importlib

from tests.docs.pages import FENCE, ROOT, Command, commands_of
from tests.tiny_runs import command_line  # noqa: F401

PAGE = ROOT / "docs" / "quickstart.md"
TINY = (
    "model.num_layers=2",
    "model.num_attention_heads=1",
    "model.attention_head_dim=12",
    "model.ffn_dim=24",
    "model.freq_dim=16",
    # latents 16 x 2 x 8 x 8: 32 tokens in 4 tiles
    "data.toy.size=[8,64,64]",
    "data.toy.count=12",
    "data.batch_size=4",
    "data.val_fraction=0.25",
    "sparsity.sparsity=0.5",
    "optim.schedule.warmup_steps=1",
    "optim.schedule.total_steps=8",
    "callbacks.progress=null",
    "callbacks.samples.prompts=[a red circle moving left slowly]",
    "trainer.accelerator=cpu",
    "trainer.log_every_n_steps=1",
    "trainer.val_check_interval=2",
    "trainer.enable_progress_bar=false",
)
"""What a training of the page is told besides."""
SMALLER = {"sample": ("--steps", "2"), "score": ("--steps", "2", "--clips", "2"), "inspect": ("--layers", "0")}
"""Arguments of the other commands, of which the last ones count."""


def quickstart() -> list[Command]:
    """The commands of the page but the installation and trainings under other names, which only change a setting."""
    script = "\n".join(body for language, body in FENCE.findall(PAGE.read_text(encoding="utf-8")) if language == "bash")
    page_commands = [
        c for c in commands_of(script, PAGE.name) if c.words[0] == "vsa" or c.words[:2] == ("python", "-m")
    ]
    return [c for c in page_commands if not any(word.startswith("run=") for word in c.words)]


def test_the_commands_run(tmp_path, monkeypatch, command_line):  # noqa: F811
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    names = []
    for command in quickstart():
        if command.words[0] == "python":
            name = command.words[2]
            importlib.import_module(name).main([*command.words[3:], *SMALLER[name.rpartition(".")[2]]])
            continue
        name, *arguments = command.words[1:]
        if name == "train":
            # a resume goes on from step 2
            steps = 4 if "ckpt_path=last" in arguments else 2
            arguments += [*TINY, f"trainer.max_steps={steps}"]
        status, _, err = command_line(name, *arguments, *SMALLER.get(name, ()))
        assert status == 0, f"{command}: {err}"
        names.append(name)
    assert {"train", "sample", "report"} <= set(names)
    run = tmp_path / "outputs" / "quickstart" / "default"
    assert (run / "metrics.csv").is_file()
    assert list((run / "samples").rglob("*.mp4"))
    assert list(run.rglob("report.html"))
    # control: a command that cannot run is noticed
    assert command_line("sample", "outputs/quickstart/other", "--prompt", "x")[0] == 1


def test_an_installation_is_not_run():
    assert quickstart()
    assert not any("venv" in command.words or "pip" in command.words for command in quickstart())
    assert not any(command.words[0] == "make" for command in quickstart())
