"""Processes that `srun` has started as the tasks of one step.

The first node of the list is read alone: task 0 runs there, and hears of all.
"""

import functools
import re
from collections.abc import Mapping

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.launchers import Announcement
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers import environment_numbers as numbers
from keras_conflux._extensions.launchers import first_host
from keras_conflux._extensions.launchers import mpi
from keras_conflux._extensions.launchers import torchrun

# Steps of Slurm's own, as of a batch script, have numbers from here on.
_FIRST_SPECIAL_STEP = 0xFFFFFF00
# The first name of a list such as `gpu[01-03,7],login1`.
_FIRST_NODE = re.compile(r"(?:[^,\[\]]|\[\d+[-,\d]*\])+")
_RANGES = re.compile(r"\[(\d+)[^\]]*\]")


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Returns the announcement of Slurm to the tasks of a step, if any.

    There is none outside of `srun`, as in a batch script, in a step with one
    task, in one of `mpirun`, and where a task has started `torchrun`.
    """
    step = numbers.integer(environ, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return None
    count_name = "SLURM_STEP_NUM_TASKS"
    if not environ.get(count_name):
        count_name = "SLURM_NTASKS"
    task = numbers.rank_and_count(environ, "SLURM_PROCID", count_name)
    if task is None or task[1] == 1 or torchrun.is_inner(environ):
        return None
    if _is_of_mpirun(environ, task[1]):
        return None
    find = functools.partial(_find, environ, *task)
    return Announcement("Slurm", count_name, task[1], find)


def first_node(nodes: str) -> str:
    """Returns the first name of a list of nodes, such as `gpu[01-03,7],a`."""
    found = _FIRST_NODE.match(nodes)
    if found is None or nodes[found.end() : found.end() + 1] not in ("", ","):
        raise ClusterError(
            "Expected SLURM_STEP_NODELIST to list nodes such as "
            f"'gpu[01-03,7],login1'. Got {nodes!r}. Start the program with "
            "`srun`, or give the addresses of all processes, in "
            "KERAS_DISTRIBUTION_JOB_ADDRESSES."
        )
    return _RANGES.sub(r"\1", found[0])


def _is_of_mpirun(environ: Mapping[str, str], count: int) -> bool:
    """Whether a step of Slurm runs the daemons of `mpirun`.

    `mpirun` starts a daemon per node as a step of Slurm, whose variables the
    processes inherit. `srun --mpi=pmi2` sets both, with equal numbers.
    """
    inner = mpi.announced(environ)
    if inner is None:
        return False
    return not (inner.count_from == mpi.PMI_SIZE and inner.count == count)


def _find(
    environ: Mapping[str, str], rank: int, count: int, seconds: float
) -> Cluster:
    if environ.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):
        raise ClusterError(
            "Slurm: expected task 0 to run on the first node of the step. Got "
            "SLURM_DISTRIBUTION='arbitrary'. Type `srun --distribution=block`."
        )
    first = first_node(environ.get("SLURM_STEP_NODELIST", ""))
    job = numbers.integer(environ, "SLURM_JOB_ID") or 0
    step = numbers.integer(environ, "SLURM_STEP_ID") or 0
    # 37 is odd, so that all steps of a job differ.
    port = first_host.first_port(environ, job + 37 * step)
    if environ.get("SLURM_STEP_NUM_NODES") == "1":
        hosts = ["localhost"] * count
    else:
        hosts = first_host.hosts_of_all(first, port, rank, count, seconds)
    if not _has_dealt_out_gpus(environ):
        first_host.take_part_of(hosts, rank)
    return first_host.cluster_of(hosts, port, rank, "Slurm")


def _has_dealt_out_gpus(environ: Mapping[str, str]) -> bool:
    """Whether each task sees GPUs of its own, as with `--gpus-per-task`."""
    binding = environ.get("SLURM_GPU_BIND", "")
    if binding:
        return "none" not in binding
    of_task = environ.get("SLURM_TRES_PER_TASK", "")
    return "SLURM_GPUS_PER_TASK" in environ or "gpu" in of_task
