"""Row about files that would run code if they were unpickled, in all places that read weights or data."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

from scripts.soak import tiny
from scripts.soak.hostile import arm, payloads
from scripts.soak.refusals import drawn, refusal_failure
from scripts.soak.rows import Attempts
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.data.index import INDEX_NAME, DatasetIndex
from vsa.files import file_digest

ROOTS = (
    "pipe:touch proof",
    "file:///etc/passwd",
    "hf://x/y",
    "s3://x/y",
    "https://127.0.0.1:9/x",
    "gs://x/y",
    "::touch",
)


def unpickle(folder: Path, tries: int, seed: int) -> Attempts:
    """13 payloads as checkpoints, weights and tensors with correct digests, 6 as latents, and 7 data roots."""
    proof = arm(folder)
    assert tiny.start(tiny.words(folder, "trainer.max_steps=3"), folder=folder).wait() == 0
    payloads_by_name = payloads(proof)
    cases = [(place, name) for place in ("ckpt_path", "init_from", "tensors", "sample") for name in payloads_by_name]
    # in the order of the payloads, whose last six include an object array, an archive and a script
    cases += [("latents", name) for name in [*payloads_by_name][-6:]] + [("root", root) for root in ROOTS]
    for number, (place, name) in enumerate(drawn(cases, tries, seed)):
        own = folder / f"case{number}"
        own.mkdir()
        yield f"{place} {name}", _failure(place, name, payloads_by_name.get(name, b""), own, folder, proof)
        proof.unlink(missing_ok=True)


def _failure(place: str, name: str, payload: bytes, own: Path, folder: Path, proof: Path) -> str | None:
    words = tiny.words(folder, f"run_dir={own / 'run'}", "trainer.max_steps=4")
    file = own / name
    if place in ("ckpt_path", "init_from", "sample"):
        file.write_bytes(payload)
    if place == "sample":
        process = tiny.start([str(file), "--prompt", "x"], folder=own, script="sample")
    elif place == "root":
        process = tiny.start([*words, f"data.root='{name}'"], folder=own)
    elif place == "latents":
        process = tiny.start(
            [*words, f"data.root={_as_latents(folder / 'shards', own / 'shards', payload)}"], folder=own
        )
    elif place == "tensors":
        checkpoint = _as_tensors(resolve_checkpoint("last", tiny.run_folder(folder)).path, own / "checkpoint", payload)
        process = tiny.start([*words, f"ckpt_path={checkpoint}"], folder=own)
    else:
        process = tiny.start([*words, f"{place}={file}"], folder=own)
    failure = refusal_failure(process)
    return "it was executed" if proof.exists() or (own / "proof").exists() else failure


def _as_tensors(source: Path, target: Path, payload: bytes) -> Path:
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


def _as_latents(source: Path, target: Path, payload: bytes) -> Path:
    """A copy of a data set with the payload as the latents of every sample and with updated digests."""
    target.mkdir()
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    index = DatasetIndex.load(target / INDEX_NAME)
    shard = next(iter(index.samples.values())).latent.shard
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo("random-0000.latent.safetensors")
        member.size = len(payload)
        tar.addfile(member, io.BytesIO(payload))
    (target / shard).write_bytes(buffer.getvalue())
    span = replace(
        next(iter(index.samples.values())).latent,
        offset=512,
        size=len(payload),
        sha256=hashlib.sha256(payload).hexdigest(),
    )
    entry = replace(index.shards[shard], bytes=len(buffer.getvalue()), sha256=file_digest(target / shard))
    samples = {name: replace(sample, latent=span) for name, sample in index.samples.items()}
    changed = replace(index, shards={**index.shards, shard: entry}, samples=samples)
    (target / INDEX_NAME).write_text(changed.to_json())
    return target
