"""Rows about settings that would run code or delete other files: the commands end with one line and touch nothing.

Every hostile value creates a file `proof` if it is executed or imported.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.data.conftest import write_dataset
from tests.forged_samples import forge
from tests.soak.hostile import FILES, KEYS, PACKAGE, TARGETS, arm, grammar, hydra_nodes, payloads
from tests.tiny_runs import TINY_OVERRIDES, TinyTraining, command_line  # noqa: F401 (a fixture)
from tests.training.test_places import contents
from vsa.checkpoints.run_checkpoint import resolve_checkpoint, write_checkpoint
from vsa.config import check_targets
from vsa.files import file_digest


def drawn(cases: Sequence[Any], attempt: int) -> Any:
    """The case of a try: each comes up once in as many tries, in an order that is mixed."""
    return random.Random(0).sample(cases, len(cases))[attempt % len(cases)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyTraining]:
    """A run `precious` beside other files; no test may change a byte of them."""
    with pytest.MonkeyPatch.context() as patch:
        training = TinyTraining(tmp_path_factory.mktemp("runs") / "outputs", patch)
        training("run=precious", "trainer.max_steps=2")
        mine = training.output.parent / "mine"
        (mine / "photos").mkdir(parents=True)
        (mine / "photos" / "one.jpg").write_bytes(b"mine")
        (mine.parent / "link").symlink_to(training.folder("precious"))
        yield training


@pytest.fixture
def proof(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Path of the proof, in the working directory of the test, with the hostile package on the path."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "path"))
    monkeypatch.delitem(sys.modules, PACKAGE, raising=False)
    return arm(tmp_path)


@pytest.fixture
def refused(command_line, runs):  # noqa: F811
    """`refused(command, *words)`: it ends with status 1 and one line, which is returned, and changes no file."""

    def run(command: str, *words: str) -> str:
        folders = (Path.cwd(), runs.output.parent)
        before = [contents(folder) for folder in folders if folder != Path(__file__).parents[2]]
        status, out, err = command_line(command, *words)
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert (status, len(lines)) == (1, 1), out + err
        assert "Traceback" not in err
        assert [contents(folder) for folder in folders if folder != Path(__file__).parents[2]] == before
        return lines[0]

    return run


def words(runs: TinyTraining, *more: str) -> list[str]:
    return [*TINY_OVERRIDES, f"output_dir={runs.output}", *more]


OVERWRITES = (
    *("run=", "run=.", "run=..", "run=../../mine", "name=..", "run_dir=PARENT/mine", "run_dir=PARENT/outputs"),
    *("run_dir=PARENT/link", "run_dir=PARENT", "optim.lr=-1"),
)


@pytest.mark.soak("overwrite=true beside what is not its run", attempts=len(OVERWRITES), short=1)
def test_overwriting_touches_nothing_else(attempt, runs, refused, proof):
    setting = drawn(OVERWRITES, attempt).replace("PARENT", str(runs.output.parent))
    refused("train.py", *words(runs, "run=precious", "overwrite=true", setting))


SETTINGS = (
    *("optim.lr=-1", "model.num_layers=two", "sparsity.sparsity=2", "data.batch_size=0", "nope=3", "model=nope"),
    *("data.root=nowhere", "init_from=nowhere", "trainer.precision=99", "trainer.max_steps=0", "seed=x"),
    *("attention.tile_thw=[0,2,2]", "model.text_dim=32", f"callbacks.x._target_={PACKAGE}.run"),
)
STARTS = [(how, setting) for how in ("", "overwrite=true", "ckpt_path=last") for setting in SETTINGS]
# this one is not refused, because the run already has all of its steps
STARTS.remove(("ckpt_path=last", "trainer.max_steps=0"))
STARTS += [("", "trainer.max_steps=9"), ("ckpt_path=nowhere", "seed=0"), ("ckpt_path=last", "seed=1")]


@pytest.mark.soak("refused starts in the folder of a run", attempts=len(STARTS), short=2)
def test_a_refused_start_changes_no_byte(attempt, runs, refused, proof):
    chosen = filter(None, drawn(STARTS, attempt))
    refused("train.py", *words(runs, "run=precious", "trainer.max_steps=9", *chosen))


def flags(node: Mapping[str, Any]) -> list[str]:
    # Hydra uses launchers and sweepers only for several runs
    return ["-m"] if {"launcher", "sweeper", "sweep"} & node.keys() else []


def in_file(content: bytes) -> list[str]:
    """Words that choose an experiment with this content."""
    path = Path("configs") / "experiment" / "evil.yaml"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return ["--config-dir", str(path.parents[1]), "experiment=evil"]


NODES = tuple(hydra_nodes(Path("proof")))


@pytest.mark.soak("Hydra's own nodes in files", attempts=len(NODES), short=2)
def test_a_node_of_hydra_in_a_file(attempt, runs, refused, proof):
    node = hydra_nodes(proof)[drawn(NODES, attempt)]
    text = "# @package _global_\n" + yaml.safe_dump({"hydra": node})
    refused("train.py", *flags(node), *words(runs, "run=a"), *in_file(text.encode()))


@pytest.mark.soak("Hydra's own nodes on the command line", attempts=len(NODES), short=2)
def test_a_node_of_hydra_on_the_command_line(attempt, runs, refused, proof):
    node = hydra_nodes(proof)[drawn(NODES, attempt)]
    settings = [
        # ++ also adds keys that the config of a launcher lacks
        f"++hydra.{top}.{key}={grammar(value)}" if isinstance(inner, Mapping) else f"++hydra.{top}={grammar(inner)}"
        for top, inner in node.items()
        for key, value in (inner.items() if isinstance(inner, Mapping) else [("", inner)])
    ]
    refused("train.py", *flags(node), *words(runs, "run=a"), *settings)


def with_config(runs: TinyTraining, target: Path, config: Mapping[str, Any]) -> Path:
    """A complete checkpoint with the tensors of the run and another config."""
    checkpoint = runs.last("precious")
    state = {name: value for name, value in checkpoint.state.items() if name not in ("schema", "files")}
    groups = {name: checkpoint.tensors(name) for name in checkpoint.groups}
    return write_checkpoint(target, groups, {**state, "config": config})


@pytest.mark.soak("Hydra's own nodes in checkpoints", attempts=len(NODES), short=0)
def test_a_node_of_hydra_in_a_checkpoint_is_data(attempt, runs, command_line, proof, tmp_path):  # noqa: F811
    config = {**runs.last("precious").state["config"], "hydra": hydra_nodes(proof)[drawn(NODES, attempt)]}
    checkpoint = with_config(runs, tmp_path / "evil", config)
    own = (f"run_dir={tmp_path / 'run'}", f"ckpt_path={checkpoint}", "trainer.max_steps=3")
    status, out, err = command_line("train.py", *words(runs, *own))
    assert (status, proof.exists()) == (0, False), out + err


@pytest.mark.soak("hostile _target_ values")
@pytest.mark.parametrize("target", TARGETS, ids=repr)
def test_a_class_of_another_package_is_not_imported(target, proof):
    evil = {"_target_": target}
    for place in (
        {"model": evil},
        {"callbacks": {"ema": {"_target_": "vsa.training.callbacks.ema.EMA", "decay": evil}}},
        {"data": {"sources": [[evil]]}},
        {"trainer": {"_target_": "lightning.pytorch.Trainer", "plugins": {"x": [{"y": evil}]}}},
    ):
        with pytest.raises(ValueError, match="_target_") as caught:
            check_targets(place)
        assert "\n" not in str(caught.value)
    assert not proof.exists()


@pytest.mark.soak("hostile classes by key of the config", attempts=len(KEYS), short=1)
def test_a_class_of_another_package_below_every_key(attempt, runs, refused, proof):
    refused("train.py", *words(runs, "run=a"), f"++{drawn(KEYS, attempt)}._target_={PACKAGE}.run")


@pytest.mark.soak("hostile experiment files", attempts=len(FILES), short=2)
def test_a_file_that_is_no_settings(attempt, runs, refused, proof):
    refused("train.py", *words(runs, "run=a"), *in_file(FILES[drawn([*FILES], attempt)]))


BUILT = ("model", "attention", "sparsity", "data", "data.codec", "data.text_encoder", "task", "task.objective")
CONFIGS = [
    (command, node)
    for command in ("sample", "convert", "evaluate")
    for node in (*BUILT, "task.objective.shift", "denoising")
]


@pytest.mark.soak("hostile classes in checkpoints", attempts=len(CONFIGS), short=0)
def test_a_class_of_another_package_in_a_checkpoint(attempt, runs, refused, proof, tmp_path):
    """It is refused by its key, whether the command would build it or not."""
    command, node = drawn(CONFIGS, attempt)
    config = inner = yaml.safe_load(yaml.safe_dump(runs.last("precious").state["config"]))
    *above, last = node.split(".")
    for name in above:
        inner = inner[name]
    inner[last] = {**inner.get(last, {}), "_target_": f"{PACKAGE}.run"}
    with_config(runs, tmp_path / "evil" / "checkpoints", config)
    out = str(tmp_path / "out")
    options = [out, "--to", "run"] if command == "convert" else ["--prompt", "x", "--steps", "1", "--out", out]
    line = refused(command, str(tmp_path / "evil"), *options)
    assert f"{node}._target_={PACKAGE}.run is not allowed" in line


PAYLOADS = tuple(payloads(Path("proof")))
ROOTS = (
    "pipe:touch proof",
    "file:///etc/passwd",
    "hf://x/y",
    "s3://x/y",
    "https://127.0.0.1:9/x",
    "gs://x/y",
    "::touch",
)
PLACES = [(place, name) for place in ("ckpt_path", "init_from", "tensors", "sample", "latents") for name in PAYLOADS]
PLACES += [("root", root) for root in ROOTS]


@pytest.mark.soak("pickles in place of weights and data", attempts=len(PLACES), short=2)
def test_a_pickle_is_not_loaded(attempt, runs, refused, proof, tmp_path):
    place, name = drawn(PLACES, attempt)
    payload, file = payloads(proof).get(name, b""), tmp_path / "x" / name
    settings, folder = words(runs, f"run_dir={tmp_path / 'run'}", "trainer.max_steps=4"), "data=folder"
    toy = [word for word in settings if not word.startswith(("data=", "data.toy"))]
    if place == "root":
        refused("train.py", *toy, folder, f"data.root='{name}'")
    elif place == "latents":
        root = write_dataset(tmp_path / "set", videos=8, images=0)
        for number in range(8):
            forge(root, f"video-{number:03d}", "latents", payload)
        small = ("data.text_encoder.dim=8", "data.text_encoder.max_tokens=5", "model.text_dim=8", "data.num_workers=0")
        refused("train.py", *toy, folder, f"data.root={root}", *small)
    elif place == "tensors":
        checkpoint = with_weights(resolve_checkpoint("last", runs.folder("precious")).path, file.parent, payload)
        refused("train.py", *settings, f"ckpt_path={checkpoint}")
    else:
        file.parent.mkdir()
        file.write_bytes(payload)
        given = ("sample", str(file), "--prompt", "x") if place == "sample" else ("train.py", *settings)
        refused(*given, *([] if place == "sample" else [f"{place}={file}"]))


def with_weights(source: Path, target: Path, payload: bytes) -> Path:
    """A copy of a checkpoint with the payload as weights and with updated digests."""
    files = {path.relative_to(source): path.read_bytes() for path in source.rglob("*") if path.is_file()}
    (weights,) = (path for path in files if path.name == "model.safetensors")
    renewed = {file_digest(source / weights): hashlib.sha256(payload).hexdigest()}
    files[weights] = payload
    while renewed:
        old, new = renewed.popitem()
        for path, content in files.items():
            if path != weights and old.encode() in content:
                files[path] = content.replace(old.encode(), new.encode())
                renewed[hashlib.sha256(content).hexdigest()] = hashlib.sha256(files[path]).hexdigest()
    for path, content in files.items():
        (target / path).parent.mkdir(parents=True, exist_ok=True)
        (target / path).write_bytes(content)
    return target
