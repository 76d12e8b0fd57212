"""Rows about runs that are killed, stopped and resumed, which must be bitwise equal to an uninterrupted run."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from scripts.soak import tiny
from scripts.soak.rows import Attempts, Row
from vsa.checkpoints.run_checkpoint import list_checkpoints, resolve_checkpoint
from vsa.data.codecs import HaarCodec
from vsa.data.datamodule import LatentDataModule
from vsa.data.text import HashedNgramEncoder

ACCUMULATED = "trainer.accumulate_grad_batches=2"
ANNEALED = ("sparsity=linear", "sparsity.topk=2", "sparsity.dense_steps=3", "sparsity.total_steps=20")
DENSE = ("attention=full", "start=dense", "run=dense", "trainer.max_steps=6")
FINETUNE = ("task=finetune", "start=dense", *ANNEALED, "name=pretrain")
DISTILL = (
    *("task=distill", "start=dense", "name=pretrain", "task.generator_every=5", "task.objective.guidance=2.5"),
    *("optim.betas=[0.0,0.99]", "callbacks.ema.decay=0.5", *ANNEALED),
)
KILLED: tuple[tuple[str, ...], ...] = (
    ("data.num_workers=0",),
    ("data.num_workers=1",),
    ("data.num_workers=2",),
    (*tiny.TWO_RANKS,),
    ("data.num_workers=1", ACCUMULATED),
    ("trainer=ddp", "trainer.devices=2", "data.num_workers=1"),
    ("data.num_workers=2", "trainer.val_check_interval=5"),
    ANNEALED,
    (*tiny.TWO_RANKS, ACCUMULATED),
    ("data.num_workers=0", "task.grad_clip=0.01"),
)
"""Settings of the killed runs, used in turn."""


def settings_of(folder: Path, *overrides: str) -> list[str]:
    """Settings of a run, without the fixed sparsity if it has dense attention or a schedule of the top-k."""
    words = tiny.words(folder, *overrides)
    other = {ANNEALED[0], DENSE[0]} & set(words)
    return [word for word in words if not (other and word.startswith("sparsity.sparsity="))]


def begin(folder: Path, words: Sequence[str]) -> tiny.Ranks:
    """Start a run on the number of ranks in its settings."""
    if "trainer.devices=2" in words:
        return tiny.start_ranks(words, folder=folder)
    return tiny.Ranks(ranks=(tiny.start(words, folder=folder),), store=None)


def ended(job: tiny.Ranks, seconds: float = 120) -> list[int | None]:
    """The exit status of each rank; None for ranks that hang, which are killed."""
    end = time.monotonic() + seconds
    statuses: list[int | None] = []
    for rank in job.ranks:
        try:
            statuses.append(rank.wait(max(0.01, end - time.monotonic())))
        except TimeoutError:
            rank.kill()
            statuses.append(None)
    return statuses


def finished(folder: Path, words: Sequence[str]) -> str | None:
    """Run to the end; returns the failure, or None."""
    job = begin(folder, words)
    statuses = ended(job)
    return None if not any(statuses) and None not in statuses else f"status {statuses}: {job.ranks[0].output()[-300:]}"


def killed(folder: Path, words: Sequence[str], run: Path, step: int, rng: random.Random) -> bool:
    """Kill all ranks some milliseconds after a step; returns False if the run had ended before."""
    job = begin(folder, words)
    first = job.ranks[0]
    tiny.wait_for(lambda: run.is_dir() or first.poll() is not None)
    tiny.wait_for(lambda: reached(run, step) or first.poll() is not None)
    time.sleep(rng.uniform(0, 0.08))
    for rank in job.ranks:
        rank.send_signal(signal.SIGKILL)
    return all(status == -signal.SIGKILL for status in ended(job))


def reached(run: Path, step: int) -> bool:
    """Whether metrics.csv has reached a step; always true for step 0."""
    if step == 0:
        return True
    try:
        # the last line may be incomplete
        lines = (run / "metrics.csv").read_text().splitlines()[1:]
    except OSError:
        return False
    return len(lines) >= step


def step_of(run: Path) -> int:
    checkpoints = list_checkpoints(run / "checkpoints")
    return resolve_checkpoint("last", run).step if checkpoints else 0


def _kill_row(folder: Path, tries: int, seed: int, kinds: Sequence[Sequence[str]]) -> Attempts:
    rng = random.Random(seed)
    straight: dict[tuple[str, ...], str] = {}
    kills = 0
    for number in range(tries):
        kind = tuple(kinds[number % len(kinds)])
        if kind not in straight:
            name = f"straight{len(straight)}"
            assert finished(folder, settings_of(folder, *kind, f"run={name}")) is None, (folder / "log-0").read_text()
            straight[kind] = tiny.digest_of_run(tiny.run_folder(folder, name))
        name, failure = f"killed{number}", None
        run, words = tiny.run_folder(folder, name), settings_of(folder, *kind, f"run={name}")
        # two of three choices are ends of an epoch of 9 steps, where the loader restarts
        steps = [rng.choice((rng.randint(0, tiny.STEPS - 2), 8, 17)) for _ in range(1 + number % 2)]
        for step in sorted(steps):
            # a run that was killed before its first checkpoint starts again
            goes_on = [] if not step_of(run) else ["ckpt_path=last"]
            kills += killed(folder, [*words, *goes_on], run, step, rng)
        goes_on = [] if not step_of(run) else ["ckpt_path=last"]
        failure = finished(folder, [*words, *goes_on])
        if failure is None and tiny.digest_of_run(run) != straight[kind]:
            failure = "it ended with other weights or losses than the run that was not killed"
        yield f"{' '.join(kind)} killed at {steps}", failure
    return (f"{kills} kills landed in a running process",)


def kills(folder: Path, tries: int, seed: int) -> Attempts:
    """kill -9 of all ranks at a random moment, once or twice."""
    return _kill_row(folder, tries, seed, KILLED)


def _with_teacher(folder: Path) -> str:
    assert finished(folder, settings_of(folder, *DENSE)) is None
    return f"init_from={tiny.run_folder(folder, 'dense')}"


def kills_of_finetunes(folder: Path, tries: int, seed: int) -> Attempts:
    """The same for a finetune from dense weights with an annealed top-k."""
    teacher = _with_teacher(folder)
    kinds = [(*FINETUNE, teacher), (*FINETUNE, teacher, "data.num_workers=1", ACCUMULATED)]
    return _kill_row(folder, tries, seed, kinds)


def kills_of_distillations(folder: Path, tries: int, seed: int) -> Attempts:
    """The same for a distillation of three networks with five critic steps per generator step."""
    teacher = _with_teacher(folder)
    kinds = [(*DISTILL, teacher), (*DISTILL, teacher, "data.num_workers=2"), (*DISTILL, teacher, *tiny.TWO_RANKS)]
    return _kill_row(folder, tries, seed, kinds)


def stopped(folder: Path, words: Sequence[str], run: Path, step: int) -> int:
    """Send SIGTERM after a step; returns the saved step, 0 if the run had ended before."""
    process = tiny.start(words, folder=folder)
    tiny.wait_for(lambda: reached(run, step) or process.poll() is not None)
    process.send_signal(signal.SIGTERM)
    return step_of(run) if process.wait() == 128 + signal.SIGTERM else 0


def annealed_topk(step: int) -> int:
    """K of `ANNEALED` on 8 tiles: all tiles for 3 steps, then linearly down to 2 in 20 steps, rounded up."""
    remaining_steps = 20 - min(max(step - 3, 0), 20)
    return 2 + -(-6 * remaining_steps // 20)


def annealed(folder: Path, tries: int, seed: int) -> Attempts:
    """Stop a run with a schedule of the top-k: every step has the K of the formula, and the result is bitwise equal."""
    rng = random.Random(seed)
    words = settings_of(folder, *ANNEALED, "run=straight")
    assert finished(folder, words) is None
    expected = tiny.digest_of_run(tiny.run_folder(folder, "straight"))
    for number in range(tries):
        name, step = f"cut{number}", rng.randint(1, tiny.STEPS - 3)
        words, run = settings_of(folder, *ANNEALED, f"run={name}"), tiny.run_folder(folder, name)
        saved = stopped(folder, words, run, step)
        failure = finished(folder, [*words, "ckpt_path=last"])
        if failure is None:
            topk_by_step = {at: int(row["sparsity/topk"]) for at, row in tiny.metrics(run).items()}
            wrong = {at: k for at, k in topk_by_step.items() if k != annealed_topk(at - 1)}
            failure = f"K at steps {wrong}" if wrong or len(topk_by_step) != tiny.STEPS else None
        if failure is None and tiny.digest_of_run(run) != expected:
            failure = "other weights or losses"
        yield f"cut at {saved}", failure


def orders(folder: Path, tries: int, seed: int) -> Attempts:
    """A resumed loader has the same further samples and noise seeds as an uninterrupted one, for any worker count."""
    rng = random.Random(seed)
    root = tiny.write_shards(folder / "shards")

    def order(start: int, workers: int) -> list[tuple[int, tuple[str, ...], tuple[int, ...]]]:
        data = LatentDataModule(
            root=str(root),
            codec=HaarCodec(),
            text_encoder=HashedNgramEncoder(),
            batch_size=tiny.BATCH,
            num_workers=workers,
            val_fraction=0.1,
        )
        data.prepare_data()
        data.setup("fit")
        data.start_step = start
        batches = zip(range(tiny.STEPS - start), data.train_dataloader(), strict=False)
        return [(batch.step, batch.sample_ids, tuple(batch.seeds.tolist())) for _, batch in batches]

    whole = order(0, 0)
    epoch = [sample for _, samples, _ in whole[:9] for sample in samples]
    assert len(set(epoch)) == len(epoch) == 36
    # ends of epochs and other steps
    cuts = [9, 18, 8, 10, *rng.sample([1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 14, 15, 16, 17, 19, 20, 21, 22, 23], 19)]
    for number in range(tries):
        cut, workers = cuts[number % len(cuts)], number % 3
        rest = order(cut, workers)
        yield f"cut at {cut}, {workers} workers", None if rest == whole[cut:] else f"{rest[:1]}, {whole[cut]}"


def workers_changed(folder: Path, tries: int, seed: int) -> Attempts:
    """Resume with another number of workers."""
    rng = random.Random(seed)
    assert finished(folder, settings_of(folder, "run=straight")) is None
    expected = tiny.digest_of_run(tiny.run_folder(folder, "straight"))
    for number in range(tries):
        name, before, after = f"cut{number}", number % 3, (number + 1 + number // 3 % 2) % 3
        words, run = settings_of(folder, f"run={name}"), tiny.run_folder(folder, name)
        words = [word for word in words if not word.startswith("data.num_workers=")]
        saved = stopped(folder, [*words, f"data.num_workers={before}"], run, rng.randint(1, tiny.STEPS - 3))
        failure = finished(folder, [*words, f"data.num_workers={after}", "ckpt_path=last"])
        if failure is None and tiny.digest_of_run(run) != expected:
            failure = "other weights or losses"
        yield f"{before} workers, cut at {saved}, {after} workers", failure


def ranks_changed(folder: Path, tries: int, seed: int) -> Attempts:
    """Resume on one process after two, and on two after one: the same samples, equal up to the order of sums."""
    rng = random.Random(seed)
    # the large eps prevents Adam from amplifying the rounding of gradients near zero to whole steps
    common = ("optim.eps=0.01", "callbacks.checkpoint.every_n_steps=1")
    assert finished(folder, settings_of(folder, *common, "run=straight")) is None
    straight = tiny.run_folder(folder, "straight")
    for number in range(tries):
        kinds = ((), tiny.TWO_RANKS) if number % 2 == 0 else (tiny.TWO_RANKS, ())
        name, cut = f"cut{number}", rng.randint(2, tiny.STEPS - 3)
        run = tiny.run_folder(folder, name)
        killed(folder, settings_of(folder, *common, *kinds[0], f"run={name}"), run, cut, rng)
        failure = finished(folder, settings_of(folder, *common, *kinds[1], f"run={name}", "ckpt_path=last"))
        if failure is None:
            rows, others = tiny.metrics(straight), tiny.metrics(run)
            losses = [abs(float(rows[at]["train/loss"]) - float(others[at]["train/loss"])) for at in rows]
            gap = max(_largest_difference(straight, run), *losses)
            # a different sample in a batch would change the losses by 1e-2
            failure = None if set(rows) == set(others) and gap < 2e-4 else f"they differ by {gap:.1e}"
        yield f"{len(kinds[0]) // 2 + 1} ranks, cut at {cut}", failure


def _largest_difference(one: Path, other: Path) -> float:
    a, b = (resolve_checkpoint("last", run).tensors("model") for run in (one, other))
    assert set(a) == set(b)
    return max((a[name] - b[name]).abs().max().item() for name in a)


def few_samples(folder: Path, tries: int, seed: int) -> Attempts:
    """Train on 1 to 30 samples with more ranks and workers than shards: it works, or ends with one line."""
    rng = random.Random(seed)
    for number in range(tries):
        count, workers, batch = rng.choice((1, 2, 3, 5, 7, 30)), rng.randint(0, 3), rng.choice((2, 4, 6))
        root = tiny.write_shards(folder / f"few{number}", count=count, per_shard=rng.choice((1, 30)))
        settings = (f"data.num_workers={workers}", f"data.batch_size={batch}", "trainer.max_steps=4")
        ranks = tiny.TWO_RANKS if number % 2 else ()
        words = settings_of(folder, *settings, *ranks, f"data.root={root}", f"run=few{number}")
        job = begin(folder, words)
        statuses = ended(job, 60)
        run = tiny.run_folder(folder, f"few{number}")
        trained = not any(statuses) and None not in statuses and step_of(run) == 4
        # the launcher may end the other rank
        refused = None not in statuses and all(statuses) and len(job.ranks[0].error_lines()) == 1
        failure = None if trained or refused else f"statuses {statuses}: {job.ranks[0].output()[-300:]}"
        yield f"{count} samples, {workers} workers, batches of {batch}, {len(job.ranks)} ranks", failure


def memory(folder: Path, tries: int, seed: int) -> Attempts:
    """Memory and descriptors do not grow after the first quarter of a run with saves and validation."""
    # the short form has too few steps for a bound on memory, but descriptors are compared in both forms
    notes, full = list[str](), tries > 1
    steps = 400 if full else 40
    for number in range(tries):
        name, workers = f"long{number}", 2 * (number % 2)
        settings = (f"trainer.max_steps={steps}", f"data.num_workers={workers}", "trainer.val_check_interval=50")
        words = settings_of(folder, *settings, f"run={name}", "callbacks.checkpoint.every_n_steps=20")
        run = tiny.run_folder(folder, name)
        process = tiny.start(words, folder=folder)
        sizes = [size for step in (steps // 4 + 5, steps - 5) if (size := _size_at(process, run, step))]
        status = process.wait()
        failure = f"status {status}: {process.output()[-300:]}" if status or len(sizes) < 2 else None
        if failure is None:
            (before, opened), (after, open_then) = sizes
            note = f"{workers} workers: {before} to {after} kB ({after / before - 1:+.2%}), {opened} to {open_then} fds"
            notes.append(note)
            # allows for files that are currently written
            grew = open_then > opened + 2 or (full and after > 1.01 * before)
            failure = note if grew else None
        yield f"{steps} steps, {workers} workers", failure
    return tuple(notes)


def _size_at(process: tiny.Started, run: Path, step: int) -> tuple[int, int] | None:
    """Resident memory in kB and open descriptors after a step, None if the process had ended."""
    tiny.wait_for(lambda: reached(run, step) or process.poll() is not None, seconds=300)
    if process.poll() is not None:
        return None
    process.send_signal(signal.SIGSTOP)
    size = _resident(process.pid), len(os.listdir(f"/proc/{process.pid}/fd"))
    process.send_signal(signal.SIGCONT)
    return size


def _resident(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


# one thread, so that sums keep their order
torch.set_num_threads(1)

ROWS = (
    Row(name="kill -9 of a pretraining, resumed bit for bit", tries=20, short_tries=1, run=kills, seconds=1800),
    Row(name="kill -9 of a finetune from dense weights", tries=6, short_tries=0, run=kills_of_finetunes),
    Row(name="kill -9 of a distillation", tries=10, short_tries=1, run=kills_of_distillations),
    Row(name="annealed top-k across a resume", tries=10, short_tries=1, run=annealed),
    Row(name="order of samples across a resume", tries=20, short_tries=6, run=orders),
    Row(name="other number of workers on a resume", tries=10, short_tries=0, run=workers_changed),
    Row(name="other number of ranks on a resume", tries=6, short_tries=0, run=ranks_changed),
    Row(name="1 to 30 samples on ranks and workers", tries=12, short_tries=1, run=few_samples),
    Row(name="memory and descriptors over 400 steps", tries=2, short_tries=1, run=memory),
)
