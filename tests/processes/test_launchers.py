"""What real launchers tell, where they are installed, and what they train."""

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("print_cluster.py")
ROOT = pathlib.Path(__file__).parents[2]
MPIRUN = ["mpirun", "--oversubscribe", "-n", "3"]
if os.geteuid() == 0:
    MPIRUN.insert(1, "--allow-run-as-root")


def runs(*command):
    """Returns whether a command is there, and succeeds."""
    if shutil.which(command[0]) is None:
        return False
    try:
        result = subprocess.run(command, capture_output=True, timeout=10)
    except subprocess.TimeoutExpired:  # its controller does not answer
        return False
    return result.returncode == 0


with_slurm = pytest.mark.skipif(
    not runs("sinfo"), reason="needs a cluster with Slurm"
)
with_torchrun = pytest.mark.skipif(
    not runs("torchrun", "--help"), reason="needs PyTorch"
)
with_mpi = pytest.mark.skipif(
    not runs("mpirun", "--version"), reason="needs MPI"
)


def printed_by(*command, seconds=60):
    result = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def assert_agree(printed, source):
    found = [json.loads(line) for line in printed.splitlines()]
    assert sorted(each.pop("index") for each in found) == [0, 1, 2]
    assert all(each == found[0] for each in found)
    assert len(found[0]["addresses"]) == 3
    assert found[0]["source"] == source


def assert_trains(*launcher):
    """Trains the example: its batches are the same with both kinds of data."""
    script = ["examples/several_processes.py", "--epochs", "1"]
    printed = printed_by(*launcher, sys.executable, *script, seconds=300)
    found = re.findall(r"processes: 3, test accuracy: ([\d.]+)%", printed)
    assert len(found) == 2, printed
    assert float(found[0]) > 50  # by guessing, 10
    assert found[0] == found[1]


@with_slurm
def test_srun():
    printed = printed_by("srun", "--ntasks=3", sys.executable, SCRIPT)
    assert_agree(printed, "Slurm")


@with_slurm
@pytest.mark.long
def test_srun_trains():
    assert_trains("srun", "--ntasks=3", "--kill-on-bad-exit=1")


@with_mpi
def test_mpirun():
    pytest.importorskip("mpi4py")
    assert_agree(printed_by(*MPIRUN, sys.executable, SCRIPT), "MPI")


@with_mpi
@pytest.mark.long
def test_mpirun_trains():
    pytest.importorskip("mpi4py")
    assert_trains(*MPIRUN)


@with_torchrun
def test_torchrun():
    printed = printed_by("torchrun", "--nproc_per_node=3", SCRIPT)
    assert_agree(printed, "torchrun")


@with_torchrun
@pytest.mark.long
def test_torchrun_trains():
    assert_trains("torchrun", "--nproc_per_node=3", "--no-python")
