"""The batch script of docs/cluster.md, walked without SLURM: its variables are set by hand, and `srun` starts tasks."""

from __future__ import annotations

import os
import random
import shlex
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.limits import HANGS
from tests.tiny_runs import TINY_OVERRIDES

PAGE = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
SCRIPT = "#!/bin/bash" + PAGE.partition("#!/bin/bash")[2].partition("```")[0]
RUN = "experiment=finetune_wan_1_3b data.root=SHARDS"

# two tasks, on one node or on one each, as `srun` numbers them; one that fails ends the other
SRUN = """#!/bin/bash
[ "$1" = --kill-on-bad-exit=1 ] || exit 2
shift
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_NODEID=$((rank / SLURM_NTASKS_PER_NODE)) SLURM_LOCALID=$((rank % SLURM_NTASKS_PER_NODE)) \\
    "$@" 2>"err-$rank" &
  tasks[rank]=$!
done
for task in "${tasks[@]}"; do
  wait -n
  status=$?
  echo "$status" >>statuses
  [ "$status" = 0 ] || kill "${tasks[@]}" 2>/dev/null
done
exit "$status"
"""


def unclaimed_port() -> int:
    """A free port below those that the system gives to others, who could have taken it before a task listens there."""
    while True:
        with socket.socket() as listener, suppress(OSError):
            listener.bind(("127.0.0.1", random.randrange(20_000, 30_000)))
            return listener.getsockname()[1]


def test_bash_reads_it_and_it_takes_any_number_of_nodes():
    assert subprocess.run(["bash", "-n"], input=SCRIPT, text=True, check=False).returncode == 0
    assert "trainer.devices=$SLURM_NTASKS_PER_NODE trainer.num_nodes=$SLURM_NNODES" in SCRIPT
    assert RUN in SCRIPT


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "extra"), [(1, ()), (2, ()), (2, ("data.batch_size=3",))])
def test_two_tasks_train(tmp_path: Path, nodes: int, extra: tuple[str, ...]):
    settings = (*TINY_OVERRIDES, "trainer=fsdp", "trainer.max_steps=2", f"output_dir={tmp_path}/outputs", *extra)
    for name, text in (("srun", SRUN), ("job", SCRIPT.replace(RUN, shlex.join(settings)))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    port = unclaimed_port()
    # of a launcher in this process, from which Lightning would take the rank
    environment = {name: value for name, value in os.environ.items() if not name.endswith(("RANK", "WORLD_SIZE"))}
    environment |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    environment |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": str(2 // nodes), "SLURM_NNODES": str(nodes)}
    environment |= {"SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "wan-sparse", "SLURM_JOB_NODELIST": "localhost"}
    result = subprocess.run([tmp_path / "job"], cwd=tmp_path, env=environment, timeout=HANGS, check=False)
    errors = [(tmp_path / f"err-{rank}").read_text() for rank in range(2)]
    statuses = (tmp_path / "statuses").read_text().split()
    assert len(statuses) == 2
    assert statuses[1] == str(result.returncode)
    if extra:
        # the first that fails ends the other, which may be as far as its own failure
        assert statuses[0] == "1"
        assert statuses[1] in ("1", "143")
        assert "".join(errors).count("error: data.batch_size=3 must be a multiple of the 2 micro-batches") == 1
    else:
        assert statuses == ["0", "0"], errors
        assert (tmp_path / "outputs" / "pretrain" / "default" / "checkpoints" / "step-00000002" / "state.json").exists()
