"""What README and docs name exists, and what they and the experiments say to run parses and fits together."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import torch
import typer
from omegaconf import OmegaConf

from vsa.checkpoints.wan_config import transformer_config
from vsa.cli import app
from vsa.config import Sweep, check_settings, model_factory
from vsa.sweeps.points import variants_of

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
TEXT = "\n".join(PAGES.values())
LINES = [
    line.split("#")[0].strip()
    for block in re.findall(r"^ *```bash\n(.*?)```", TEXT, re.S | re.M)
    for line in block.replace("\\\n", "").splitlines()
    if line.split("#")[0].strip()
]
VARIABLES = dict(re.findall(r"^(\w+)=(\S+)$", "\n".join(LINES), re.M))
COMMANDS = [re.sub(r"^([A-Z_]+=\S+ )+|\$(\w+)", lambda m: (m[2] and VARIABLES[m[2]]) or "", line) for line in LINES]
SCRIPTS = [c for c in COMMANDS if c.startswith(("python scripts/", "python -m benchmarks."))]
OURS = [c for c in COMMANDS if re.match("vsa (?!train |sweep )", c)]
# launchers are extras, and lists of values make points of their own
SWEEPS = [c for c in COMMANDS if re.match(r"vsa sweep (?!.*(?:hydra/|\],\[))", c)]
EXPERIMENTS = sorted((ROOT / "configs" / "experiment").glob("*.yaml"))


def header_commands(path: Path) -> list[str]:
    """The commands behind `# Command:` of an experiment, without the remarks beside and between them."""
    text = path.read_text(encoding="utf-8").partition("# Command:")[2]
    text = re.split(r"^# \w+:", text, maxsplit=1, flags=re.M)[0]
    lines = [line.strip("# ") for line in re.sub(r"\\\n# +", "", text).splitlines()]
    return [re.split(" {3,}", line)[0] for line in lines if re.match("(python|torchrun|vsa) ", line)]


START = re.compile(r"(?:^vsa train|.* train\.py) ")
TRAININGS = [
    c
    for c in (
        *COMMANDS,
        *re.findall(r"`(vsa train [^`]+)`", TEXT),
        *(c for path in EXPERIMENTS for c in header_commands(path)),
    )
    if START.match(c) and not re.search(" -m | --cfg ", c)
]


def settings_of(command: str) -> list[str]:
    """What a training command sets."""
    return shlex.split(START.sub("", command))


def test_paths_and_links_exist():
    for page, text in PAGES.items():
        links = [link for link in re.findall(r"\]\(([^)]+)\)", text) if not link.startswith("http")]
        assert page.name != "README.md" or len(links) >= 3
        for link in links:
            path, _, heading = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), (page.name, link)
            if heading and target.suffix == ".md":
                titles = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.M)
                slugs = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
                assert heading in slugs, (page.name, link)
    cells = re.findall(r"`((?:vsa|kernels|configs|scripts|tests|benchmarks)/[\w/.]*)`", README)
    assert len(cells) >= 8
    for path in cells:
        assert (ROOT / path).exists(), path


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 120


def test_the_python_of_the_readme_runs(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    assert len(code.splitlines()) <= 12
    names: dict = {}
    exec(code, names)
    index = names["result"].index
    assert (names["result"].out.shape, int(index.kv_num_blocks.max())) == ((1, 2048, 4, 64), 4)
    assert names["q"].grad.abs().sum() > 0
    assert "torch.Size([1, 2048, 4, 64])" in capsys.readouterr().out


def test_make_targets_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = set(re.findall(r"`make ([a-z-]+)`", README))
    assert {"demo", "test", "compare"} <= named
    assert named <= targets


@pytest.mark.parametrize("command", SCRIPTS)
def test_script_commands_parse(command):
    words = shlex.split(command)[1:]
    name, arguments = (words[1], words[2:]) if words[0] == "-m" else (words[0][:-3].replace("/", "."), words[1:])
    module = importlib.import_module(name)
    # paths are not looked at; a value that does not parse exits
    module.parse_args(arguments)
    # control
    with pytest.raises((SystemExit, ValueError)):
        module.parse_args([*arguments, "--no-such-option"])


@pytest.mark.parametrize("command", OURS)
def test_our_commands_parse(command):
    name, *arguments = shlex.split(command)[1:]
    group = typer.main.get_command(app)
    parser = group.get_command(group.make_context("vsa", ["x"]), name)
    parser.make_context(name, list(arguments))
    # control
    with pytest.raises(Exception, match="--no-such-option"):
        parser.make_context(name, [*arguments, "--no-such-option"])


@pytest.mark.parametrize("command", TRAININGS)
def test_training_commands_fit_the_ranks_they_start(command):
    from hydra import compose, initialize_config_dir

    launcher, overrides = shlex.split(command.partition(" train.py ")[0]), settings_of(command)
    launcher = launcher if launcher[0] == "torchrun" else ["vsa"]
    started = {name: int(n) for name, n in zip(launcher[1::2], launcher[2::2], strict=True)}
    nodes, ranks = started.get("--nnodes", 1), started.get("--nnodes", 1) * started.get("--nproc-per-node", 1)
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=overrides)
    job = next((job for job in ("finetune", "distill") if f"experiment={job}" in command), "pretrain")
    assert cfg.task._target_ == f"vsa.training.modules.{job}.{job.title()}Module"
    trainer = cfg.trainer
    if launcher[0] == "torchrun":
        # lightning refuses its world otherwise
        assert trainer.num_nodes == nodes
    elif trainer.devices != "auto":
        ranks = trainer.devices
    assert cfg.data.batch_size % (trainer.accumulate_grad_batches * ranks) == 0
    assert trainer.val_check_interval % trainer.accumulate_grad_batches == 0


@pytest.mark.parametrize("command", SWEEPS)
def test_sweeps_have_points_that_compose(command):
    from hydra import compose, initialize_config_dir

    name, *overrides = shlex.split(command)[2:]
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        cfg = compose("train", overrides=[f"sweep={name}", *overrides])
        check_settings(cfg)
        points = variants_of(Sweep(**{"name": name, **OmegaConf.to_container(cfg.sweep)}), {})
        assert len(points) > 1
        for point in points:
            check_settings(compose("train", overrides=[*overrides, *point.overrides]))
        # control
        with pytest.raises(Exception, match="no-such-sweep"):
            compose("train", overrides=["sweep=no-such-sweep", *overrides])


def test_the_model_of_the_own_videos_command_can_be_exported():
    from hydra import compose, initialize_config_dir

    (command,) = (c for c in COMMANDS if c.startswith("vsa train data=folder "))
    exportable = {}
    for name, overrides in {
        "own videos": settings_of(command),
        "toy": ["experiment=quickstart"],
    }.items():
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            cfg = compose("train", overrides=overrides)
        with torch.device("meta"):
            model = model_factory(cfg)()
        try:
            exportable[name] = transformer_config(model)["_class_name"]
        except ValueError as error:
            exportable[name] = str(error)
    assert exportable["own videos"] == "WanTransformer3DModel"
    # the toy's models place shapes on a small grid, and their recorded losses belong to it
    assert exportable["toy"].endswith("it needs model.absolute_positions=false")


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_experiment_says_how_to_run_it(path):
    assert any(
        START.match(command) and f"experiment={path.stem}" in settings_of(command) for command in header_commands(path)
    )


def test_there_are_commands_to_check():
    assert SCRIPTS
    assert len(SWEEPS) >= 2
    assert {command.split()[1] for command in OURS} >= {
        *("encode", "sample", "evaluate", "verify-export", "latents", "convert", "merge"),
    }
    for words in (
        "experiment=quickstart",
        "data=folder",
        "torchrun.*experiment=finetune",
        "torchrun.*experiment=distill",
    ):
        assert any(re.search(words, command) for command in TRAININGS), words
    assert VARIABLES["W"].startswith("Wan-AI/")
