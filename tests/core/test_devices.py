"""What is known of devices, and which of them TensorFlow takes."""

import types

import forked
import pytest
import tensorflow as tf
from conftest import DEVICES
from conftest import ON_GPU

import keras_conflux as kc
from keras_conflux._compat import tensorflow_internals


def test_all_devices_are_listed_gpus_first():
    listed = kc.list_devices()
    assert set(DEVICES) <= set(listed)
    assert listed[-1].kind == "CPU"
    kinds = [device.kind for device in listed]
    assert kinds == sorted(kinds, reverse=True)
    assert listed[: len(DEVICES)] == DEVICES


def test_devices_of_a_kind():
    cpus = kc.devices("cpu")
    assert cpus == kc.devices("CPU")
    assert "CPU:0" in cpus
    if ON_GPU:
        assert kc.devices("gpu") == DEVICES
    else:
        with pytest.raises(kc.DeviceError, match=r"kind GPU .* only CPU:0"):
            kc.devices("gpu")


@pytest.mark.parametrize("device", kc.list_devices())
def test_what_a_device_is(device):
    assert device.name
    assert device.memory > 2**28


def test_a_device_that_does_not_exist_has_no_name():
    with pytest.raises(kc.DeviceError, match="no device GPU:98"):
        _ = kc.Device("GPU:98").name


def in_a_new_process(program: str) -> None:
    result = forked.run("-c", program)
    assert result.returncode == 0, result.stderr


LOOKING = """
import keras_conflux as kc
from keras_conflux._compat import tensorflow_internals

for device in kc.list_devices():
    print(device.kind, device.ordinal, device.name, device.memory)
    assert device.memory is None or device.kind == "CPU"
kc.devices()
kc.devices(1)
kc.claim()
assert not tensorflow_internals.has_started()
if kc.devices()[0].kind == "CPU":
    kc.devices(2)
    assert len(kc.devices(3)) == 3
assert kc.replicate() is kc.replicate()
assert tensorflow_internals.has_started()
assert kc.devices()[0].memory
assert kc.claim() == kc.devices()  # so it is already
"""


def test_looking_at_devices_does_not_take_them():
    in_a_new_process(LOOKING)


class Machine:
    """Four GPUs, and the settings and refusals of `tf.config`."""

    def __init__(self):
        device = tf.config.PhysicalDevice
        self.all = [
            device(f"/physical_device:{kind}:{index}", kind)
            for kind, index in [("CPU", 0)] + [("GPU", i) for i in range(4)]
        ]
        self.visible = list(self.all)
        self.growth = {}
        self.divided = {}
        self.started = False

    def of_kind(self, devices, kind):
        return [d for d in devices if kind in (None, d.device_type)]

    def set_visible_devices(self, devices, kind):
        others = [d for d in self.visible if d.device_type != kind]
        if self.started and self.visible != others + devices:
            raise RuntimeError("Visible devices cannot be modified")
        self.visible = others + devices

    def set_memory_growth(self, device, enable):
        if self.started and self.growth.get(device) != enable:
            raise RuntimeError("Physical devices cannot be modified")
        self.growth[device] = enable

    def start(self):
        """Refuses what `_compute_device_options` of context.py refuses."""
        visible = self.of_kind(self.visible, "GPU")
        assert len({self.growth.get(device) for device in visible}) < 2
        self.started = True

    @property
    def growing(self):
        return [self.all.index(gpu) - 1 for gpu in self.growth]

    @property
    def seen(self):
        visible = self.of_kind(self.visible, "GPU")
        return [self.all.index(gpu) - 1 for gpu in visible]


@pytest.fixture
def machine(monkeypatch):
    made = Machine()
    replaced = {
        "list_physical_devices": lambda kind: made.of_kind(made.all, kind),
        "get_visible_devices": lambda kind: made.of_kind(made.visible, kind),
        "get_logical_device_configuration": made.divided.get,
        "set_visible_devices": made.set_visible_devices,
        "experimental": types.SimpleNamespace(
            set_memory_growth=made.set_memory_growth,
            get_device_details=lambda device: {"device_name": device.name},
        ),
    }
    for name, function in replaced.items():
        monkeypatch.setattr(tf.config, name, function)
    monkeypatch.setattr(
        tensorflow_internals, "has_started", lambda: made.started
    )
    return made


@pytest.mark.parametrize(
    ("wanted", "seen", "names"),
    [
        (None, [0, 1, 2, 3], "GPU:0 GPU:1 GPU:2 GPU:3"),
        (2, [0, 1], "GPU:0 GPU:1"),
        ([1, 3], [1, 3], "GPU:0 GPU:1"),
        ("3,0", [0, 3], "GPU:1 GPU:0"),
        ("cpu", [], "CPU:0"),
    ],
)
def test_memory_grows_on_the_claimed_gpus_only(machine, wanted, seen, names):
    before = kc.devices(wanted)
    what = [device.name for device in before]
    claimed = kc.claim(wanted)
    assert " ".join(claimed) == names
    assert [device.name for device in claimed] == what
    assert machine.seen == seen
    assert sorted(machine.growing) == seen
    machine.start()
    assert sorted(kc.devices()) == sorted(claimed)


@pytest.mark.parametrize("wanted", [1, [0], "0,2", ["1"]])
def test_a_number_of_claim_is_never_a_cpu_device(machine, wanted):
    machine.visible = machine.all[:1]
    with pytest.raises(kc.DeviceError, match="names GPUs by number"):
        kc.claim(wanted)
    assert kc.claim() == kc.claim("cpu") == kc.claim(["CPU:0"]) == ("CPU:0",)


def test_growth_may_be_left_as_it_is(machine):
    kc.claim([2], grow=False)
    assert (machine.seen, machine.growing) == ([2], [])


def test_a_second_claim_counts_from_the_first(machine):
    kc.claim([1, 3])
    assert kc.claim([1]) == ("GPU:0",)
    assert machine.seen == [3]


def test_claims_that_come_too_late(machine):
    machine.start()
    for wanted in (None, 2, "cpu"):
        with pytest.raises(kc.DeviceError, match="at the start of the program"):
            kc.claim(wanted)
    assert kc.claim(grow=False) == kc.devices()


def test_the_same_claim_again_is_no_change(machine):
    claimed = kc.claim([1, 3])
    machine.start()
    assert kc.claim(claimed) == claimed


def test_a_divided_gpu_is_not_claimed(machine):
    machine.divided[machine.all[2]] = [None, None]  # the physical GPU 1
    assert kc.devices()[-1] == "GPU:4"
    assert kc.Device("GPU:2").name == kc.Device("GPU:1").name
    assert kc.Device("GPU:3").name.endswith("GPU:2")
    with pytest.raises(kc.DeviceError, match="GPU:1 has been divided"):
        kc.claim([0, 2])
    assert machine.growing == []
    assert machine.seen == [0, 1, 2, 3]
