"""Processes that `srun` has started as the tasks of one step.

TensorFlow has a `SlurmClusterResolver`. It is not used here, as it calls
nvidia-smi and sets CUDA_VISIBLE_DEVICES, which `srun --gpus-per-task` does
better, and as it sorts the nodes by name, while Slurm numbers the tasks in its
own order.
"""

import dataclasses
from collections.abc import Mapping

from keras_conflux._cluster.cluster import Cluster
from keras_conflux._cluster.launchers import Announcement
from keras_conflux._common.errors import ClusterError
from keras_conflux._extensions.launchers import mpi
from keras_conflux._extensions.launchers import torchrun
from keras_conflux._extensions.launchers.node_lists import expand_counts
from keras_conflux._extensions.launchers.node_lists import expand_nodes
from keras_conflux._extensions.launchers.ports import first_port
from keras_conflux._extensions.launchers.variables import integer
from keras_conflux._extensions.launchers.variables import rank_and_count

# What Slurm itself runs has numbers from here on: the batch script, and the
# shell of `salloc`.
_FIRST_SPECIAL_STEP = 0xFFFFFF00


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a task runs."""

    node: int
    """The position of its node in the list of nodes."""
    local_rank: int
    """Which of the tasks of its node it is."""


def announced(environ: Mapping[str, str]) -> Announcement | None:
    """Returns what Slurm tells the tasks of a step.

    Args:
        environ: The environment variables.

    Returns:
        An announcement, or `None` outside of `srun`, as in a batch script,
        in a step with one task, in one that `mpirun` has made, and where a
        task has started `torchrun`.

    Raises:
        ClusterError: If only some of the variables are set.
    """
    step = integer(environ, "SLURM_STEP_ID")
    if step is None or step >= _FIRST_SPECIAL_STEP:
        return None
    count_name = "SLURM_STEP_NUM_TASKS"
    if not environ.get(count_name):
        count_name = "SLURM_NTASKS"
    task = rank_and_count(environ, "SLURM_PROCID", count_name)
    if task is None or task[1] == 1 or torchrun.is_inner(environ):
        return None
    if _is_of_mpirun(environ, task[1]):
        return None
    return Announcement(
        source="Slurm",
        count_from=count_name,
        count=task[1],
        find=lambda: _find(environ, *task),
    )


def _is_of_mpirun(environ: Mapping[str, str], count: int) -> bool:
    """Whether a step of Slurm is that of the daemons of `mpirun`.

    `mpirun` starts one daemon per node as a step of Slurm, and the processes
    inherit the variables of that step. `srun --mpi=pmi2` sets the variables
    of both, with equal numbers.
    """
    inner = mpi.announced(environ)
    if inner is None:
        return False
    is_by_slurm = inner.count_from == mpi.PMI_SIZE
    return not (is_by_slurm and inner.count == count)


def _find(environ: Mapping[str, str], rank: int, count: int) -> Cluster:
    nodes = expand_nodes(_required(environ, "SLURM_STEP_NODELIST"))
    tasks = expand_counts(_required(environ, "SLURM_STEP_TASKS_PER_NODE"))
    if len(nodes) != len(tasks) or sum(tasks) != count:
        raise ClusterError(
            f"Slurm: SLURM_STEP_NODELIST has {len(nodes)} nodes, "
            f"SLURM_STEP_TASKS_PER_NODE has {sum(tasks)} tasks on "
            f"{len(tasks)} nodes, and there are {count} tasks. Expected "
            "these to agree; start the program with one `srun`."
        )
    places = _places(environ.get("SLURM_DISTRIBUTION", ""), tasks)
    _check_own_place(environ, places[rank])
    first = _port(environ)
    addresses = [
        f"{nodes[place.node]}:{first + place.local_rank}" for place in places
    ]
    return Cluster(tuple(addresses), rank, "Slurm")


def _places(distribution: str, tasks: list[int]) -> list[_Place]:
    """Returns where each task runs.

    Args:
        distribution: How `srun --distribution` deals tasks out.
        tasks: The number of tasks of each node.

    Returns:
        One place per task, in the order of their ranks.

    Raises:
        ClusterError: If another way is asked for.
    """
    if distribution.startswith(("plane", "arbitrary")) and len(tasks) > 1:
        raise ClusterError(
            "Slurm: expected tasks to be dealt out to nodes in the way of "
            "`srun --distribution=block` or `cyclic`. Got "
            f"SLURM_DISTRIBUTION={distribution!r}. Type "
            "`srun --distribution=block`."
        )
    places = [
        _Place(node, local)
        for node, count in enumerate(tasks)
        for local in range(count)
    ]
    if distribution.startswith("cyclic"):  # one to each node, and again
        places.sort(key=lambda place: place.local_rank)
    return places


def _check_own_place(environ: Mapping[str, str], place: _Place) -> None:
    """Refuses tasks that are dealt out in a way that only Slurm knows."""
    node = integer(environ, "SLURM_NODEID")
    local = integer(environ, "SLURM_LOCALID")
    if node not in (None, place.node) or local not in (None, place.local_rank):
        raise ClusterError(
            f"Slurm: expected SLURM_NODEID={place.node} and SLURM_LOCALID="
            f"{place.local_rank} for this task, as tasks fill one node after "
            f"another. Got SLURM_NODEID={node} and SLURM_LOCALID={local}. "
            "Type `srun --distribution=block`."
        )


def _port(environ: Mapping[str, str]) -> int:
    """Returns the port of the first task of each node."""
    job = integer(environ, "SLURM_JOB_ID") or 0
    step = integer(environ, "SLURM_STEP_ID") or 0
    # 37 is odd, so that all steps of a job differ.
    return first_port(environ, job + 37 * step)


def _required(environ: Mapping[str, str], name: str) -> str:
    if not environ.get(name):
        raise ClusterError(
            f"Slurm: SLURM_STEP_ID is set, but {name} is not. Start the "
            "program with `srun`, or unset the variables of Slurm."
        )
    return environ[name]
