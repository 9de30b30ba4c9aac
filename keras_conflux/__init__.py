"""Keras 3 models on several devices, with the result of one."""

from keras_conflux import _supported as _supported
from keras_conflux._cluster.agreement import barrier
from keras_conflux._cluster.processes import initialize
from keras_conflux._cluster.processes import process_count
from keras_conflux._cluster.processes import process_index
from keras_conflux._common import notices as _notices
from keras_conflux._common.errors import ClusterError
from keras_conflux._common.errors import ConfluxError
from keras_conflux._common.errors import ConfluxWarning
from keras_conflux._common.errors import DeviceError
from keras_conflux._common.errors import ProcessError
from keras_conflux._common.errors import ReplicaMismatchError
from keras_conflux._common.errors import StepTimeoutError
from keras_conflux._common.errors import StrategyError
from keras_conflux._compat import patching as _patching
from keras_conflux._custom_loops.collectives import allgather
from keras_conflux._custom_loops.collectives import allreduce
from keras_conflux._custom_loops.collectives import broadcast
from keras_conflux._custom_loops.collectives import reduce
from keras_conflux._custom_loops.prefetcher import prefetch
from keras_conflux._custom_loops.splitting import distribute
from keras_conflux._custom_loops.splitting import shard
from keras_conflux._custom_loops.splitting import split
from keras_conflux._custom_loops.spmd import Replica
from keras_conflux._custom_loops.spmd import replica
from keras_conflux._custom_loops.spmd import withdevices
from keras_conflux._data.transfer import device_of
from keras_conflux._data.transfer import to_cpu
from keras_conflux._data.transfer import to_device
from keras_conflux._devices.device import Device
from keras_conflux._devices.device import devices
from keras_conflux._devices.device import list_devices
from keras_conflux._devices.visibility import claim
from keras_conflux._extensions import installation as _installation
from keras_conflux._extensions.diagnostics.diagnostics import Statistics
from keras_conflux._extensions.diagnostics.diagnostics import assert_finite
from keras_conflux._extensions.diagnostics.diagnostics import statistics
from keras_conflux._extensions.memory.model_memory import Memory
from keras_conflux._extensions.memory.model_memory import memory
from keras_conflux._extensions.out_of_memory.out_of_memory import (
    skip_out_of_memory,
)
from keras_conflux._extensions.resume.checkpoint_files import Checkpoint
from keras_conflux._extensions.resume.checkpoint_files import checkpoints
from keras_conflux._extensions.resume.own_loops import load
from keras_conflux._extensions.resume.own_loops import save
from keras_conflux._extensions.resume.resume import Resume
from keras_conflux._extensions.throughput.throughput import Throughput
from keras_conflux._fit import keras_patches as _keras_patches
from keras_conflux._replication.batch_norm import synchronize_batch_norm
from keras_conflux._replication.replicas import Replicas
from keras_conflux._replication.replication import devices_of
from keras_conflux._replication.replication import replicate
from keras_conflux._replication.replication import unreplicate
from keras_conflux._replication.strategy import ReplicatedStrategy
from keras_conflux._replication.synchronization import assert_in_sync
from keras_conflux._replication.synchronization import in_sync
from keras_conflux._replication.synchronization import synchronize

__all__ = [
    "Checkpoint",
    "ClusterError",
    "ConfluxError",
    "ConfluxWarning",
    "Device",
    "DeviceError",
    "Memory",
    "ProcessError",
    "Replica",
    "ReplicaMismatchError",
    "Replicas",
    "ReplicatedStrategy",
    "Resume",
    "Statistics",
    "StepTimeoutError",
    "StrategyError",
    "Throughput",
    "allgather",
    "allreduce",
    "assert_finite",
    "assert_in_sync",
    "barrier",
    "broadcast",
    "checkpoints",
    "claim",
    "device_of",
    "devices",
    "devices_of",
    "distribute",
    "in_sync",
    "initialize",
    "list_devices",
    "load",
    "memory",
    "prefetch",
    "process_count",
    "process_index",
    "reduce",
    "replica",
    "replicate",
    "save",
    "shard",
    "skip_out_of_memory",
    "split",
    "statistics",
    "synchronize",
    "synchronize_batch_norm",
    "to_cpu",
    "to_device",
    "unreplicate",
    "withdevices",
]
__version__ = "0.1.0"

_notices.obey_environment()
_keras_patches.install_functions()
_patching.when_used(_keras_patches.install)
_installation.install(__version__, _supported.MISFITS)


def __dir__() -> list[str]:
    return __all__
