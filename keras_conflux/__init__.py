"""Keras 3 models on several devices, with the result of one."""

from keras_conflux import _requirements  # noqa: F401, I001  says what is missing
from keras_conflux.claim import claim as claim
from keras_conflux.collectives import allgather as allgather
from keras_conflux.collectives import allreduce as allreduce
from keras_conflux.collectives import broadcast as broadcast
from keras_conflux.collectives import reduce as reduce
from keras_conflux.devices import Device as Device
from keras_conflux.devices import devices as devices
from keras_conflux.devices import list_devices as list_devices
from keras_conflux.diagnostics import Statistics as Statistics
from keras_conflux.diagnostics import assert_finite as assert_finite
from keras_conflux.diagnostics import statistics as statistics
from keras_conflux.errors import DeviceError as DeviceError
from keras_conflux.errors import ReplicaMismatchError as ReplicaMismatchError
from keras_conflux.errors import StepTimeoutError as StepTimeoutError
from keras_conflux.errors import StrategyError as StrategyError
from keras_conflux.feed import distribute as distribute
from keras_conflux.feed import split as split
from keras_conflux.movement import device_of as device_of
from keras_conflux.movement import to_cpu as to_cpu
from keras_conflux.movement import to_device as to_device
from keras_conflux.out_of_memory import (
    skip_out_of_memory as skip_out_of_memory,
)
from keras_conflux.prefetch import prefetch as prefetch
from keras_conflux.replicas import Replicas as Replicas
from keras_conflux.replicas import replicate as replicate
from keras_conflux.replicas import unreplicate as unreplicate
from keras_conflux.run import Replica as Replica
from keras_conflux.run import replica as replica
from keras_conflux.run import withdevices as withdevices
from keras_conflux.shards import shard as shard
from keras_conflux.strategy import ReplicatedStrategy as ReplicatedStrategy
from keras_conflux.synchronization import assert_in_sync as assert_in_sync
from keras_conflux.synchronization import in_sync as in_sync
from keras_conflux.synchronization import synchronize as synchronize
from keras_conflux.engine import hooks

__version__ = "0.1.0"

hooks.install()
