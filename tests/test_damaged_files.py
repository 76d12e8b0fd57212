"""Whatever stands in a file that is read: a value, or one error that names the file, and never a hang."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.reports.fake_runs import write_run
from tests.tiny_runs import command_line, write_tiny_run  # noqa: F401 (fixtures)
from tests.training.test_replay import batch_of
from vsa.attention.sparge.tuned import FORMAT, HeadSettings, Tuned, read_tuned
from vsa.checkpoints.sampling_settings import read_sampling_part
from vsa.checkpoints.weight_files import WeightFiles
from vsa.checkpoints.weight_source import open_weights
from vsa.data.pretrained import weights_digest
from vsa.data.remote import RemoteError
from vsa.data.stream import open_index
from vsa.evaluation.comparison.captures import Capture, Captures, load_captures, save_captures
from vsa.pages.page import table_html
from vsa.reports import run_page
from vsa.reports.clips import run_clip_table
from vsa.reports.run_page import write_run_page
from vsa.reports.run_tables import cost_table, environment_table, faults_table, starts_table
from vsa.reports.runs import find_runs, read_run
from vsa.sweeps.points import Point
from vsa.sweeps.record import SweepRecord
from vsa.training.callbacks.nan_dump import read_batches, write_batches
from vsa.training.metrics_csv import MetricsCSV

pytestmark = pytest.mark.soak("damaged files of reports, sweeps, captures, dumps and exports")
LEAVES: tuple[Any, ...] = (None, 5, -1, "x", [], {}, [[]], True, float("inf"), 10**30, "\ud800")


class _HungError(BaseException):
    pass


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise _HungError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def contents(good: bytes) -> Iterator[bytes]:
    """Damaged contents of a file."""
    yield from (b"", b"\xff\xfe", b"\xff\xfe" + good, good + b"\0\0", good[: len(good) // 2])
    yield from (b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900, b"1" * 6000)
    yield from (b"[]", b"{}", b"null", b"5", b'"x"', b'{"a": 1, "a": 2}')


def with_leaves(good: bytes) -> Iterator[bytes]:
    """A JSON text with one of its values replaced or removed, or its top key removed."""
    for place, (path, value) in enumerate((p, v) for p in _paths(json.loads(good)) for v in (*LEAVES, ...)):
        # each place gets some of the values, and all of them come up
        if place % 5 == 0:
            whole = json.loads(good)
            node = whole
            for key in path[:-1]:
                node = node[key]
            if value is ...:
                del node[path[-1]]
            else:
                node[path[-1]] = value
            yield json.dumps(whole).encode()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from _paths(inner, (*path, key))


def others(path: Path) -> Iterator[None]:
    """What is no file, in the place of a file."""
    for make in (
        lambda: os.mkfifo(path),
        path.mkdir,
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.name),
        lambda: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 42),
    ):
        path.unlink(missing_ok=True)
        make()
        yield
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
    path.unlink(missing_ok=True)


def check(path: Path, read: Callable[[], Any], *, loosely: bool = False) -> int:
    """Try every damage; returns how many ended in an error."""
    good, errors = path.read_bytes(), 0
    is_json = path.suffix == ".json"

    def attempt(what: str) -> int:
        try:
            read()
        except (ValueError, OSError) as error:
            assert str(path.parent if loosely else path) in str(error), (what, error)  # noqa: PT017
            return 1
        except _HungError:
            pytest.fail(f"{path.name} hangs: {what}")
        except Exception as error:
            raise AssertionError(f"{path.name}, {what}: {type(error).__name__} {error}") from error
        return 0

    for content in (*contents(good), *(with_leaves(good) if is_json else ())):
        path.write_bytes(content)
        errors += attempt(str(content[:300]))
    for number, _ in enumerate(others(path)):
        errors += attempt(f"no file, {number}")
    path.write_bytes(good)
    read()
    return errors


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "a", prompts=("a red circle",), sample_losses={("s", 0.5): 0.25})


@pytest.mark.parametrize("name", ["run.json", "config.yaml", "metrics.csv", "validation.csv"])
def test_one_damaged_run_does_not_end_a_report(run: Path, name: str):
    write_run(run.with_name("good"))
    (run / "sweep.json").write_text("{}")

    def read() -> None:
        _, runs, missing = find_runs([run.parent])
        assert "good" in [one.name for one in runs]
        assert len(runs) + len(missing) >= 2
        for one in missing:
            raise ValueError(one.reason)
        one = next(one for one in runs if one.name == "a")
        if damaged := getattr(one, "damaged", ""):
            raise ValueError(damaged)

    assert check(run / name, read) >= 10


@pytest.mark.parametrize("name", ["run.json", "score.json", "samples.json"])
def test_what_decorates_a_page_is_left_out(run: Path, name: str, tmp_path: Path):
    (run / "score.json").write_text('{"clips": 48, "model": {"colour": 1.0}}')
    start = {"began": "2026-01-02", "how": "finished", "step": 0, "last_step": 40, "environment": {"cpu": "x"}}
    manifest = json.loads((run / "run.json").read_text()) | {"starts": [start]}
    (run / "run.json").write_text(json.dumps(manifest))

    def read() -> None:
        one = read_run(run)
        if name == "samples.json":
            run_clip_table(one, most_bytes=1e6)
        elif name == "score.json":
            run_page._score(one)
        else:
            tables = (starts_table(one), environment_table(one), cost_table(one), faults_table(one))
            assert "".join(map(table_html, filter(None, tables))) + "".join(run_page._careful(one))

    path = next(run.rglob(name))
    # no error at all
    assert check(path, read) == 0
    if name != "samples.json":
        path.write_text("[" * 100_000)
        text = write_run_page(read_run(run), out=tmp_path / "page").read_text()
        assert f"{name} is nested more than" in text


def test_an_alias_bomb_does_not_hang_a_report(run: Path):
    lines = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 12)]
    (run / "config.yaml").write_text("\n".join(["a0: &a0 [x]", *lines]))
    with pytest.raises(ValueError, match=r"config\.yaml has more than 100000 values"):
        read_run(run)


def test_the_record_of_a_sweep(tmp_path: Path):
    point = {"name": "a", "overrides": ["seed=1"], "settings": [], "status": "finished"}
    path = tmp_path / "sweep.json"
    path.write_text(json.dumps({"points": [point]}))

    def read() -> None:
        record = SweepRecord(tmp_path, sweep="s", command="c", settings=[])
        assert not record.finished(Point("a", ("seed=1",)))
        record.changed(Point("a", ("seed=1",)))

    assert check(path, read) > 30


def test_tuned_settings(tmp_path: Path):
    path = tmp_path / "tuned.json"
    shape = {"layers": 1, "heads": 1, "head_dim": 8, "q_tokens": 16, "kv_tokens": 8, "order": "raster"}
    Tuned(**shape, found={0: [HeadSettings(tau=0.5, theta=0.0)]}).write(path)
    assert FORMAT in path.read_text()
    assert check(path, lambda: read_tuned(str(path))) > 50


def with_metadata(path: Path, key: str) -> Iterator[bytes]:
    """The content of a safetensors file with damaged metadata."""
    tensors, good = load_file(path), path.read_bytes()
    length = int.from_bytes(good[:8], "little")
    metadata = json.loads(good[8 : 8 + length])["__metadata__"]
    other = path.with_name("other")
    for content in (*contents(metadata[key].encode()), *with_leaves(metadata[key].encode())):
        save_file(tensors, other, metadata | {key: content.decode("latin-1")})
        yield other.read_bytes()
    save_file(tensors, other, {"other": "x"})
    yield other.read_bytes()
    for name in tensors:
        for changed in (None, tensors[name].flatten()[:1], tensors[name][:0], tensors[name].bool()):
            kept = {key: tensor for key, tensor in tensors.items() if key != name}
            save_file(kept if changed is None else {**kept, name: changed}, other, metadata)
            yield other.read_bytes()
    yield (1 << 62).to_bytes(8, "little") + good[8:]
    yield (200_000).to_bytes(8, "little") + b"[" * 200_000
    other.unlink()


def check_tensors(path: Path, key: str, read: Callable[[], Any]) -> int:
    errors = check(path, read, loosely=True)
    good = path.read_bytes()
    for content in [*with_metadata(path, key)]:
        path.write_bytes(content)
        try:
            read()
        except ValueError as error:
            errors += 1
            assert str(path.parent) in str(error), error  # noqa: PT017
        except Exception as error:
            raise AssertionError(f"{path.name}, {content[8:600]!r}: {type(error).__name__} {error}") from error
    path.write_bytes(good)
    return errors


def test_the_batches_of_a_dump(tmp_path: Path):
    path = tmp_path / "batches-0.safetensors"
    write_batches(path, [batch_of(2), batch_of(3)], [torch.tensor(0.5)] * 2)
    assert check_tensors(path, "batches", lambda: read_batches(path)) > 60


def test_captures(tmp_path: Path):
    q, k, v = torch.randn(3, 1, 8, 2, 4)
    captures = Captures(items=[Capture(name="a", grid_thw=(2, 2, 2), q=q, k=k, v=v)], source="x")
    path = save_captures(captures, tmp_path / "captures.safetensors")
    assert check_tensors(path, "captures", lambda: load_captures(path)) > 40


def test_weights_in_parts(tmp_path: Path):
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    save_file({"a": torch.zeros(4, 2)}, path, {"vsa.rows": '{"a": [0, 4]}'})
    assert check_tensors(path, "vsa.rows", lambda: WeightFiles(tmp_path)) > 30
    assert check(path, lambda: weights_digest(tmp_path)) > 10


@pytest.mark.parametrize("name", ["config.json", "sparse_attention.json", "sampling.json"])
def test_a_folder_of_weights(name: str, tmp_path: Path, write_tiny_run, command_line):  # noqa: F811
    run, folder = write_tiny_run(tmp_path / "run"), tmp_path / "export"
    assert command_line("convert", str(run), str(folder), "--no-golden")[0] == 0

    def read() -> None:
        if name == "sampling.json":
            read_sampling_part(folder)
            return
        source = open_weights(folder)
        model = source.network()
        source.check(model, "required")

    assert check(folder / name, read, loosely=True) > 50
    values = json.loads((folder / name).read_text())
    for change in ({"num_layers": 10**9}, {"tile_thw": [10**9] * 3}, {"grids": [[10**9] * 3]}, {"in_channels": -5}):
        if change.keys() <= values.keys():
            (folder / name).write_text(json.dumps(values | change))
            with pytest.raises(ValueError, match=rf"{name}.*{next(iter(change))}"):
                read()


METRICS = "step,train/loss\n1,0.5\n2,0.25\n3,0.125\n"
VALIDATION = "step,at,sample,noise_level,loss\n2,current,a,0.5,0.25\n"


@pytest.mark.parametrize("name", ["metrics.csv", "validation.csv"])
@pytest.mark.parametrize("damage", ["no header", "not text", "zeros", "a folder", "a garbage cell", "a pipe"])
def test_a_damaged_table_is_set_aside_on_resume(name: str, damage: str, tmp_path: Path, caplog):
    caplog.set_level("INFO")
    for other, text in (("metrics.csv", METRICS), ("validation.csv", VALIDATION)):
        (tmp_path / other).write_text(text)
    path = tmp_path / name
    good = path.read_bytes()
    path.unlink()
    if damage == "a folder":
        path.mkdir()
    elif damage == "a pipe":
        os.mkfifo(path)
    else:
        header, _, rest = good.partition(b"\n")
        path.write_bytes(
            {
                "no header": rest,
                "not text": b"\xff\xfe" + good,
                "zeros": good.replace(b"0.25", b"\0\0\0\0"),
                "a garbage cell": header + b"\n" + rest.replace(b"0.25", b"gar", 1),
            }[damage]
        )
    logger = MetricsCSV(str(tmp_path))
    logger.load_state_dict({"step": 2})
    logger.open()
    aside = tmp_path / name.replace(".", "-damaged-1.")
    assert os.path.lexists(aside)
    assert f"it was moved to {aside.name}" in caplog.text
    assert str(path) in caplog.text
    logger.log_metrics({"train/loss": 0.125}, 3)
    logger.finalize("success")
    rows = (tmp_path / "metrics.csv").read_text().splitlines()
    # only the damaged file begins anew
    assert rows[1:] == ([] if name == "metrics.csv" else ["1,0.5", "2,0.25"]) + ["3,0.125"]


def test_half_a_row_is_left_out_and_the_rest_is_kept(tmp_path: Path):
    (tmp_path / "metrics.csv").write_text("step,train/loss,val/loss\n1,0.5,\n2\n2,0.25,\n3,0.")
    logger = MetricsCSV(str(tmp_path))
    logger.load_state_dict({"step": 2})
    logger.open()
    assert (tmp_path / "metrics.csv").read_text() == "step,train/loss,val/loss\n1,0.5,\n2,0.25,\n"
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]


def test_the_index_of_a_stream_is_read_with_a_bound_and_not_for_ever(tmp_path: Path, monkeypatch):
    import http.server
    import threading
    import time

    from vsa.data import remote

    monkeypatch.setattr(remote, "PAUSES", ())
    monkeypatch.setattr(remote, "PATIENCE", 0.3, raising=False)

    class Dripping(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):
                for _ in range(60):
                    self.wfile.write(b" ")
                    time.sleep(0.1)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        start = time.monotonic()
        with pytest.raises(ValueError, match=r"index.json cannot be read: .*bytes arrived in"):
            open_index(f"http://127.0.0.1:{server.server_port}/shards")
        assert time.monotonic() - start < 4
        server.shutdown()
    (tmp_path / "index.json").write_bytes(b" " * 100)
    with pytest.raises(RemoteError, match="more than 99 bytes"):
        remote.read_file(str(tmp_path / "index.json"), limit=99)
    assert remote.read_file(str(tmp_path / "index.json"), limit=100) == b" " * 100
