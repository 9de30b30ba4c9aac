"""What real launchers tell, where they are installed."""

import json
import pathlib
import shutil
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).with_name("print_cluster.py")


def runs(*command):
    """Returns whether a command is there, and succeeds."""
    if shutil.which(command[0]) is None:
        return False
    result = subprocess.run(command, capture_output=True, timeout=30)
    return result.returncode == 0


def clusters(*launcher):
    """Returns what each process has found."""
    result = subprocess.run(
        [*launcher, sys.executable, SCRIPT],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def assert_agree(found, count):
    assert sorted(each.pop("index") for each in found) == list(range(count))
    assert all(each == found[0] for each in found)
    assert len(found[0]["addresses"]) == count


@pytest.mark.skipif(not runs("sinfo"), reason="needs a cluster with Slurm")
def test_srun():
    found = clusters("srun", "--ntasks=3")
    assert found[0]["source"] == "Slurm"
    assert_agree(found, 3)


@pytest.mark.skipif(not runs("mpirun", "--version"), reason="needs MPI")
def test_mpirun():
    pytest.importorskip("mpi4py")
    found = clusters("mpirun", "--oversubscribe", "-n", "3")
    assert found[0]["source"] == "MPI"
    assert_agree(found, 3)
