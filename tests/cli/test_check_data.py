"""`vsa check-data` and `vsa info`."""

from __future__ import annotations

from tests.data.conftest import write_dataset
from vsa.data.shards import LatentReader


def test_a_whole_data_set_and_one_with_damaged_bytes(command_line, tmp_path):
    root = write_dataset(tmp_path / "shards")
    status, out, err = command_line("check-data", str(root))
    assert (status, err) == (0, "")
    assert "32 samples with 63 captions" in out
    assert "haar-4x8x8-c16" in out
    span = next(iter(LatentReader(root).index.samples.values())).latent
    victim = root / span.shard
    content = bytearray(victim.read_bytes())
    content[span.offset + span.size - 1] ^= 1
    victim.write_bytes(content)
    status, out, err = command_line("check-data", str(root))
    assert (status, err) == (1, f"error: 2 problems with the data set in {root}\n")
    assert f"shard {victim} is damaged: its digest differs from the index" in out
    assert "the bytes are damaged" in out


def test_a_folder_without_an_index_is_one_line(command_line, tmp_path):
    status, _, err = command_line("check-data", str(tmp_path))
    assert status == 1
    assert "no index.json" in err


def test_info_names_the_backends_and_why_one_does_not_run(command_line):
    status, out, _ = command_line("info")
    assert status == 0
    lines = [line for line in out.splitlines() if line.startswith("backend ")]
    assert lines[0].endswith("reference on cpu: runs")
    assert "gather on cpu: runs, the automatic choice" in lines[1]
    assert "triton on cpu" in lines[2]
