"""A sweep from the command line: what it trains, what it leaves out, and how it goes on."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from omegaconf import OmegaConf

import vsa.cli
import vsa.sweeps.job_queue as queue_module
import vsa.sweeps.sweep_run as sweep_run_module
import vsa.sweeps.sweeper as sweeper_module
from tests.limits import HANGS
from tests.tiny_runs import TINY_OVERRIDES
from vsa.config import Sweep
from vsa.sweeps.job_queue import Job
from vsa.sweeps.lifeline import end_with_sweep
from vsa.sweeps.points import Point
from vsa.sweeps.sweeper import PointSweeper
from vsa.training.modules.pretrain import PretrainModule

ROOT = Path(__file__).parents[2]
# `attention` of the sweep: a whole node cannot be overridden with a key of another method
TINY = [o.replace("attention.tile_thw", "tile_thw") for o in TINY_OVERRIDES]


class Forked:
    """Stands for `subprocess.Popen`: a run that has its imports already, the same in everything else."""

    def __init__(self, command: list[str], *, env: dict[str, str], stdout: Any, **_: Any):
        assert [*command[:3], command[4]] == [sys.executable, "-m", "vsa.cli", "train"]
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                os.dup2(stdout.fileno(), 1)
                os.dup2(stdout.fileno(), 2)
                sys.stdout = sys.stderr = os.fdopen(os.dup(1), "w", buffering=1)
                os.environ.update(env)
                for number in (signal.SIGINT, signal.SIGTERM):
                    signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
                words = end_with_sweep(command[3:])
                GlobalHydra.instance().clear()
                sys.argv = ["vsa", *words]
                vsa.cli.main(words)
                code = 0
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self) -> None:
        while self.poll() is None:
            time.sleep(0.01)


@pytest.fixture
def forked(monkeypatch) -> None:
    monkeypatch.setattr(queue_module, "Popen", Forked)


def own_sweep(folder: Path, text: str) -> list[str]:
    (folder / "configs" / "sweep").mkdir(parents=True, exist_ok=True)
    (folder / "configs" / "sweep" / "mine.yaml").write_text(text)
    return [f"--config-dir={folder / 'configs'}"]


def record(folder: Path) -> dict[str, dict[str, Any]]:
    return {point["name"]: point for point in json.loads((folder / "sweep.json").read_text())["points"]}


def files(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(p): (p.read_bytes(), p.stat().st_mtime_ns) for p in sorted(folder.rglob("*")) if p.is_file()}


def wait_for(condition: Callable[[], Any], seconds: float = HANGS) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


POINTS = """
variants:
  f: [attention=staged, attention.stages=f]
  many: [sparsity.sparsity=null, sparsity.topk=99]
  taken: [sparsity.sparsity=0.25]
"""


@pytest.mark.soak("killed sweeps and killed runs of sweeps", attempts=8, short=0)
def test_a_sweep_that_is_killed_goes_on_with_what_is_missing(attempt, command_line, forked, tmp_path, monkeypatch):
    # the sweep, or a run of it
    sweep_dies, stop = attempt % 2 == 0, 2 + attempt // 2 % 4
    words = [*own_sweep(tmp_path, POINTS), *TINY, "trainer.max_steps=6", f"output_dir={tmp_path / 'out'}"]
    words += ["sweep.cores=1", "sweep.name=own", "sweep.control=false", "trainer.val_check_interval=3"]
    folder = tmp_path / "out" / "pretrain" / "own"
    # files of something else, which the run meets when it starts
    (folder / "taken").mkdir(parents=True)
    (folder / "taken" / "notes").write_text("mine")

    step = PretrainModule.training_step

    def stands_still(self, batch, batch_idx):
        # until the sweep is killed: on no machine is the run at its end before
        return step(self, batch, batch_idx) if batch_idx < stop else signal.pause()

    parent = os.fork()
    if parent == 0:
        monkeypatch.setattr(PretrainModule, "training_step", stands_still)
        status, _, _ = command_line("train.py", "-m", "sweep=mine", *words)
        os._exit(status)
    wait_for((folder / "f" / "checkpoints" / f"step-{stop // 2 * 2:08d}").exists)
    run = json.loads((folder / ".f.lock").read_text())["pid"]
    os.kill(parent if sweep_dies else run, signal.SIGKILL)
    os.waitpid(parent, 0)
    before = record(folder)
    assert [before[name]["status"] for name in ("f", "many")] == ["running" if sweep_dies else "failed", "refused"]
    assert before["many"]["reason"] == "topk=99 is above the number of tiles, 8"

    status, out, err = command_line("sweep", "mine", *words)
    assert status == 1, err
    assert "\nckpt_path: last\n" in (folder / "f" / "config.yaml").read_text()
    after = record(folder)
    assert [after[name]["status"] for name in ("f", "many", "taken")] == ["finished", "refused", "failed"]
    assert re.match("run folder .*taken holds files of something else", after["taken"]["reason"])
    assert after["f"]["overrides"] == ["sparsity.sparsity=0.5", "attention=staged", "attention.stages=f"]
    assert f"1 of 3 runs finished in {folder}, next: vsa report {folder}" in out
    assert err.splitlines()[-1] == "error: 1 of 3 runs failed, the same command tries them again"
    assert not (folder / "many").exists()

    # nothing of the finished run is touched again
    content = files(folder / "f") | {"log": ((folder / "f.log").read_bytes(), 0)}
    (folder / "taken" / "notes").unlink()
    status, out, _ = command_line("sweep", "mine", *words)
    assert status == 0
    assert "2 of 3 runs finished" in out
    assert files(folder / "f") | {"log": ((folder / "f.log").read_bytes(), 0)} == content
    assert record(folder)["taken"]["status"] == "finished"

    # other settings are other runs
    other_words = [*words, "optim.lr=0.02"]
    status, _, err = command_line("sweep", "mine", *other_words)
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: {folder} holds runs of other settings at f, taken: give another sweep.name")
    assert files(folder / "f") | {"log": ((folder / "f.log").read_bytes(), 0)} == content

    # nor are runs moved that the new ones are to read
    status, _, err = command_line("sweep", "mine", *words, f"init_from={folder / 'f'}", "overwrite=true")
    assert (status, err.count("\n")) == (1, 1)
    assert err.startswith(f"error: overwrite=true cannot set {folder / 'f'} aside: the run is to read {folder / 'f'}/")
    assert files(folder / "f") | {"log": ((folder / "f.log").read_bytes(), 0)} == content


TRAINING_FREE = """
variants:
  free: [attention=sparge, attention.q_tokens=8, attention.kv_tokens=4]
  windows: [attention=neighborhood, "attention.tile_thw=[1,2,2]"]
"""


def test_a_method_without_gradients_is_refused_before_any_run(command_line, forked, tmp_path):
    words = [*own_sweep(tmp_path, TRAINING_FREE), *TINY, "trainer.max_steps=1", f"output_dir={tmp_path / 'out'}"]
    status, out, err = command_line("sweep", "mine", *words, "sweep.cores=1", "sweep.control=false")
    assert status == 0, err
    folder = tmp_path / "out" / "pretrain" / "mine"
    points = record(folder)
    assert {name: point["status"] for name, point in points.items()} == {"free": "refused", "windows": "finished"}
    reason = "attention=sparge is training-free: its mask is a constant to the gradient; "
    assert points["free"]["reason"] == f"{reason}set attention.allow_training=true to train with it"
    assert f"1 of 2 runs finished in {folder}" in out
    assert not (folder / "free").exists()
    assert command_line("report", str(folder))[0] == 0
    assert reason.removesuffix("; ") in (folder / "report.html").read_text()


METHODS = """
variants:
  sparse: [attention=video_sparse]
  windows: [attention=neighborhood]
  local: [attention=staged, attention.stages=l, "sparsity.dense_layers=[0]"]
axes:
  sparsity.sparsity: [0.25, 0.75]
"""


def test_sparsity_of_a_sweep_skips_points_without_tiles(command_line, tmp_path, monkeypatch):
    calls: list[tuple[list[str], list[Point]]] = []
    run = sweep_run_module.SweepRun
    monkeypatch.setattr(run, "train", lambda self, points, *_: calls.append((self._settings, points)))
    monkeypatch.setattr(run, "end", lambda self: None)
    words = [*own_sweep(tmp_path, METHODS), *TINY, f"output_dir={tmp_path}", "sparsity=constant_80"]
    assert command_line("sweep", "mine", *words)[0] == 0
    ((settings, points),) = calls
    assert "trainer.max_steps=4" in settings
    assert not [text for text in settings if text.startswith("sparsity")]
    shared = ("sparsity.sparsity=0.5", "sparsity=constant_80")
    assert points == [
        *(
            Point(f"sparse-sparsity{share}", (*shared, "attention=video_sparse", f"sparsity.sparsity={share}"))
            for share in (0.25, 0.75)
        ),
        Point("windows", ("attention=neighborhood",)),
        Point("local", ("attention=staged", "attention.stages=l")),
        Point("dense", ("attention=full",), control=True),
    ]


REFUSED = [
    (["nosuch"], "Could not find 'sweep/nosuch'"),
    (["topk", "sweep.lr=0"], "sweep.lr=0: expected an integer of at least 1, or null, got 0"),
    (
        ["topk", "trainer.max_steps=oops"],
        "trainer.max_steps=oops: expected an integer from -1 to 1000000000000, got 'oops'",
    ),
    (
        ["topk", "sweep.lr=2", "sweep.lr_seed=0"],
        "sweep.lr_seed=0: expected a seed that is in no comparison",
    ),
    (["topk", "sweep.seeds=[]"], "sweep.seeds=[]: no run; give a seed, or null for that of the config"),
]
ALSO_REFUSED = [
    (["topk", "sweep.sedes=[1]"], "sweep.sedes=[1]: unknown setting, did you mean sweep.seeds?"),
    (["topk", "run=a"], "run=a: the runs of a sweep are named after its points"),
    (["topk", "sweep.devices=3"], "sweep.devices=3: there is no GPU for trainer.accelerator=cpu, expected null"),
    (["topk", "sweep.name=a/b"], "sweep.name=a/b is not a name"),
]


@pytest.mark.parametrize(
    ("words", "message"), [*REFUSED, *(pytest.param(*row, marks=pytest.mark.slow) for row in ALSO_REFUSED)]
)
def test_a_sweep_that_cannot_be_is_one_line_and_leaves_nothing(command_line, tmp_path, words, message):
    status, _, err = command_line("sweep", *words, "trainer.accelerator=cpu", f"output_dir={tmp_path / 'out'}")
    assert status == 1
    (line,) = (line for line in err.splitlines() if "Warning" not in line)
    assert line.startswith("error: ")
    assert message in line
    assert list(tmp_path.iterdir()) == []


FEW = ("sweep", "topk", "sweep.control=false", "sweep.axes={sparsity.sparsity:[0.5]}")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("train", "flop_budget=1"), "error: flop_budget=1 is below the "),
        ((*FEW, "sample_token_budget=1"), "error: sample_token_budget=1 is below the 2.05e+03 tokens of one step"),
        # a sweep of good settings renders once, after its checks
        (FEW, "error: rendering"),
        ((*FEW[:3], "sweep.axes={sparsity.sparsity:[0.5,0.75]}", "trainer.max_steps=10"), "error: rendering"),
        (("train", "experiment=quickstart", "dry_run=true"), "the run can start"),
        (("train",), "error: sparsity=0.875 leaves less than one of 4 tiles"),
        pytest.param((*FEW, "flop_budget=1"), "error: flop_budget=1 is below the ", marks=pytest.mark.slow),
        pytest.param(("sweep", "race", "flop_budget=1"), "error: flop_budget=1 is below", marks=pytest.mark.slow),
    ],
)
def test_nothing_is_rendered_before_a_run_is_checked(command_line, tmp_path, monkeypatch, caplog, words, message):
    caplog.set_level("INFO")

    def render(*_: Any) -> None:
        raise ValueError("rendering")

    monkeypatch.setattr("vsa.data.datamodule.prepare_toy_shards", render)
    places = (f"data.root={tmp_path}/s", f"data.videos={tmp_path}/v", f"output_dir={tmp_path}/o")
    status, _, err = command_line(*words, "data.stats=train", "trainer.accelerator=cpu", *places)
    assert status == (0 if "dry_run=true" in words else 1)
    assert message in err + caplog.text
    assert f"{tmp_path}/s is not there yet: 1024 toy clips are rendered and encoded before training" in caplog.text
    no_budget = "no budget was given: each run trains trainer.max_steps=10, whatever FLOPs a step takes; "
    assert (no_budget in caplog.text) == ("trainer.max_steps=10" in words)
    assert list(tmp_path.iterdir()) == []


def test_one_run_takes_no_sweep(command_line, tmp_path):
    status, _, err = command_line("train", "sweep=topk", f"output_dir={tmp_path}")
    assert status == 1
    assert "a sweep is more than one run: vsa sweep NAME, or vsa train -m sweep=NAME" in err


@pytest.mark.parametrize("plugin", ["hydra/sweeper=optuna", "hydra/launcher=submitit_slurm"])
def test_a_plugin_that_is_not_installed_is_named_with_its_extra(command_line, tmp_path, plugin):
    if find_spec("hydra_plugins") is not None:
        pytest.skip("plugins are installed")
    status, _, err = command_line("train", "-m", plugin, "optim.lr=0.1,0.2", f"output_dir={tmp_path}")
    assert (status, err) == (1, f"error: {plugin} needs a package: pip install 'vsa-train[sweep]'\n")


class Cluster(Launcher):
    """Stands for a launcher of a cluster; the second job fails."""

    def setup(self, **_: Any) -> None:
        pass

    def launch(self, job_overrides: Any, initial_job_idx: int) -> Any:
        self.given = job_overrides
        results = []
        for reason in ("", "no room"):
            results.append(JobReturn(status=JobStatus.COMPLETED))
            results[-1].return_value = reason
        return results


def test_the_launcher_of_a_cluster_takes_the_place_of_the_queue(tmp_path):
    jobs = [Job(name, (), tmp_path, settings=[f"run={name}"]) for name in "ab"]
    events, cluster = [], Cluster()
    sweep_run_module._run_elsewhere(jobs, cluster, lambda job: events.append((job.name, job.status)))
    assert cluster.given == [["run=a"], ["run=b"]]
    assert events == [("a", "running"), ("b", "running"), ("a", "finished"), ("b", "failed")]
    assert (jobs[0].reason, jobs[1].reason) == (None, "no room")


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        (lambda: 1.0, ""),
        (lambda: sys.exit(1), "1"),
        (lambda: {}["key"], "KeyError: 'key'"),
    ],
)
def test_a_job_of_a_cluster_says_why_it_failed(monkeypatch, ends, said):
    monkeypatch.setattr(sweeper_module, "run", lambda cfg: ends())
    assert sweeper_module.train_elsewhere(OmegaConf.create()) == said


def test_a_job_of_a_cluster_that_is_stopped_is_no_failure(monkeypatch):
    monkeypatch.setattr(sweeper_module, "run", lambda cfg: sys.exit(143))
    with pytest.raises(SystemExit):
        sweeper_module.train_elsewhere(OmegaConf.create())


@pytest.mark.slow
def test_the_jobs_of_a_multirun_can_be_given_to_the_queue(command_line, forked, tmp_path):
    words = [*TINY, f"output_dir={tmp_path}", "sparsity.sparsity=0.5,0.75", "hydra/launcher=queue"]
    status, _, err = command_line("train.py", "-m", *(o for o in words if o != "sparsity.sparsity=0.5"))
    assert status == 0, err
    points = record(tmp_path / "pretrain" / "search")
    assert {name: point["status"] for name, point in points.items()} == {"trial-0": "finished", "trial-1": "finished"}
    assert "++sparsity.sparsity=0.75" in points["trial-1"]["overrides"]


RATES = """
variants:
  sparse: []
"""


class Looking:
    """Stands for the terminal's table."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def add(self, jobs: Any) -> None: ...

    def changed(self, job: Any) -> None: ...


def test_a_seed_that_is_given_twice_is_refused(tmp_path):
    """Two runs would share a folder, and the comparison would count one of them twice."""
    message = rf"^sweep\.seeds=\[1, 2, 1\]: two runs would write to one folder, {tmp_path}/POINT-seed1$"
    sweep = Sweep(name="mine", seeds=[1, 2, 1])
    with pytest.raises(ValueError, match=message):
        sweep_run_module.SweepRun(PointSweeper(), sweep, tmp_path, [], seed=0, overwrite=False)
    assert list(tmp_path.iterdir()) == []


def test_seeds_use_the_best_learning_rate_first_seeds_first(tmp_path, monkeypatch):
    losses = {"a-lr0.05": 3.0, "a-lr0.1": 1.0, "a-lr0.2": 2.0, "b-lr0.05": 1.0, "b-lr0.1": 2.0, "b-lr0.2": math.nan}
    losses |= {f"c-lr{rate}": math.inf for rate in (0.05, 0.1, 0.2)}
    queue: list[Point] = []
    sweep = Sweep(name="mine", lr=3, seeds=[4, 7])
    run = sweep_run_module.SweepRun(PointSweeper(), sweep, tmp_path, [], seed=0, overwrite=False)
    points, watch = [Point(name, ()) for name in "abc"], Looking()
    monkeypatch.setattr(run, "_check", lambda points: ({point.name: 0.1 for point in points}, []))
    monkeypatch.setattr(run, "_queue", lambda points, where, watch: queue.extend(points))
    monkeypatch.setattr(run._record, "finished", lambda point: point.name != "b-lr0.2")
    monkeypatch.setattr(sweep_run_module, "final_loss", lambda folder: losses[folder.name])
    run.train(points, [], watch)
    assert {point.name for point in queue[:9]} == set(losses)
    assert {point.overrides[-2:] for point in queue[9:]} == {
        (f"optim.lr={rate}", f"seed={seed}") for rate in (0.1, 0.05) for seed in (4, 7)
    }
    assert [point.name for point in queue[9:]] == ["a-seed4", "b-seed4", "a-seed7", "b-seed7"]
    assert [point.overrides[-2] for point in queue[9:]] == ["optim.lr=0.1", "optim.lr=0.05"] * 2
    assert watch.said == [
        "a: optim.lr=0.1 is the best of 3 (loss 1)",
        "b: optim.lr=0.05 is the best of 2 (loss 1)",
    ]
    records = record(tmp_path)
    assert {name: (point["status"], point["reason"]) for name, point in records.items()} == {
        f"c-seed{seed}": ("failed", "none of its learning rates has a validation loss") for seed in (4, 7)
    }


@pytest.mark.slow
def test_every_point_is_trained_at_the_best_of_its_learning_rates(command_line, forked, tmp_path):
    words = [*own_sweep(tmp_path, RATES), *TINY, "trainer.max_steps=6", f"output_dir={tmp_path}", "sweep.lr_factor=50"]
    words += ["sweep.lr=3", "sweep.seeds=[0,1]", "optim.lr=0.004", "trainer.val_check_interval=3"]
    status, out, err = command_line("sweep", "mine", *words)
    assert status == 0, err
    points = record(tmp_path / "pretrain" / "mine")
    names = [f"{v}-{end}" for v in ("sparse", "dense") for end in ("lr8e-05", "lr0.004", "lr0.2", "seed0", "seed1")]
    assert set(points) == set(names)
    for variant in ("sparse", "dense"):
        (rate,) = re.findall(rf"{variant}: optim\.lr=(\S+) is the best of 3", out)
        assert {points[f"{variant}-seed{s}"]["overrides"][-2] for s in (0, 1)} == {f"optim.lr={rate}"}
        assert {points[f"{variant}-lr{r}"]["overrides"][-2] for r in ("8e-05", "0.004", "0.2")} == {"seed=2"}


@pytest.mark.slow
def test_the_stages_of_the_quickstart_at_equal_flops(tmp_path):
    own = [o for o in TINY if not o.startswith(("optim.schedule", "trainer.max_steps", "optim.lr"))]
    words = [*own, "optim.schedule.warmup_steps=2", "flop_budget=3e9", f"output_dir={tmp_path}", "sweep.cores=1"]
    command = [sys.executable, "train.py", "-m", "sweep=stages", "experiment=quickstart", *words]
    folder = tmp_path / "quickstart" / "stages"
    options: Any = {"cwd": ROOT, "env": {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}}

    def finished(count: int) -> Callable[[], bool]:
        path = folder / "sweep.json"
        return lambda: path.exists() and path.read_text().count('"finished"') >= count

    def running() -> bool:
        return '"running"' in (folder / "sweep.json").read_text()

    first = subprocess.Popen(command, start_new_session=True, **options)
    wait_for(finished(1))
    wait_for(running)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    first_files = {n: files(folder / n) for n, point in record(folder).items() if point["status"] == "finished"}
    second = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **options)
    wait_for(finished(len(first_files) + 1))
    wait_for(running)
    second.send_signal(signal.SIGINT)
    out, _ = second.communicate(timeout=HANGS)
    assert second.returncode == 130
    last = out.splitlines()[-1]
    assert re.match(r"SIGINT: stopped with \d of 8 runs to go, the same command continues: python train.py -m ", last)
    assert "stopped" in {point["status"] for point in record(folder).values()}
    third = subprocess.run(command, capture_output=True, text=True, **options)
    assert third.returncode == 0, third.stderr
    points = record(folder)
    assert {name: point["status"] for name, point in points.items()} == dict.fromkeys(points, "finished")
    assert [name for name, point in points.items() if point["control"]] == ["dense"]
    assert set(points) == {"l", "f", "c_l", "c_f", "c_f_l", "c_f_l_e", "c_fl", "dense"}
    assert {name: files(folder / name) for name in first_files} == first_files
    tables = {name: (folder / name / "metrics.csv").read_text().splitlines() for name in points}
    totals = [
        float(dict(zip(r[0].split(","), r[-1].split(","), strict=True))["throughput/flops_total"])
        for r in tables.values()
    ]
    assert totals == pytest.approx([3e9] * 8, rel=0.05)


WINDOWS = """
axes:
  attention.stride_thw: [[1, 2, 2], [1, 1, 9]]
"""


@pytest.mark.slow
def test_a_stride_that_does_not_fit_is_refused_at_its_point(command_line, forked, tmp_path):
    words = [*own_sweep(tmp_path, WINDOWS), *TINY, "trainer.max_steps=2", f"output_dir={tmp_path / 'out'}"]
    words += ["attention=neighborhood", "attention.window_thw=[2,4,4]", "attention.tile_thw=[1,2,2]"]
    words += ["sweep.cores=1", "sweep.control=false"]
    assert command_line("sweep", "mine", *words)[0] == 0
    points = record(tmp_path / "out" / "pretrain" / "mine")
    assert {name: point["status"] for name, point in points.items()} == {
        "stride_thw1x2x2": "finished",
        "stride_thw1x1x9": "refused",
    }
    assert points["stride_thw1x1x9"]["reason"].startswith("stride of width must be at most its window 4, got 9")
