"""Runs on shards in a bucket and on the hub, as a user starts them."""

from __future__ import annotations

import threading

import lightning as L

from tests.clouds.servers import SECRET
from tests.data.test_streaming import all_ids
from tests.training.test_streaming import VIDEOS, Seen
from vsa.data import remote


def test_a_run_goes_on_past_a_killed_server(cloud, train, training, monkeypatch):
    monkeypatch.setattr(remote, "PAUSES", (0.1, 0.6, 2.0))

    class Outage(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 3:
                cloud.wire.stop()
                threading.Timer(0.4, cloud.wire.start).start()

    callback, request_count = Seen(), cloud.wire.asked
    train(cloud.url, "trainer.max_steps=14", "trainer.val_check_interval=7", callbacks=(callback, Outage()))
    names = {name for ids in callback.ids.values() for name in ids}
    assert names == {name for name in all_ids(cloud.folder) if name < "video-040"}
    assert training.last().state["bad_samples"]["samples"] == {}
    assert float(training.metrics()[14]["val/loss"]) > 0
    assert cloud.wire.asked > request_count


def test_what_cannot_be_read_ends_a_command_in_one_line(cloud, command_line, tmp_path):
    def start(folder: str) -> str:
        urls = [f"data.{key}={folder}/{VIDEOS}-0000{i}.tar" for i, key in enumerate(("urls", "val_urls"))]
        run = ("callbacks.progress=null", "trainer.accelerator=cpu", f"output_dir={tmp_path}/runs")
        status, out, err = command_line("train.py", "data=stream", *urls, *run)
        assert status == 1
        lines = [line for line in err.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert "Traceback" not in out + err
        assert SECRET not in out + err
        return lines[0]

    assert f"error: {cloud.elsewhere}/index.json cannot be read: HTTP status 404: " in start(cloud.elsewhere)
    assert f"error: {cloud.url}/nowhere/index.json cannot be read: FileNotFoundError" in start(f"{cloud.url}/nowhere")
    cloud.refuse()
    assert f"error: {cloud.url}/index.json cannot be read: HTTP status 40" in start(cloud.url)
