"""What XLA makes of steps whose weights, or optimizer's state, lie in parts.

On CPU devices it compiles collectives, and cannot run them. What fails there
damages memory, as it was to update variables in place. So nothing is run.
"""

import collections
import contextlib
import functools
import itertools
import re
import warnings

import keras
import numpy as np
import pytest
import step_memory
import tensorflow as tf
from conftest import MANY
from conftest import ON_GPU
from conftest import several
from keras import layers
from tensorflow.compiler.xla.service import hlo_pb2
from tensorflow.python.eager.polymorphic_function import compiler_ir

import keras_conflux as kc
from examples.benchmarks import models
from keras_conflux._communication.communicator import Communicator
from keras_conflux._compat import replicas_in_turn
from keras_conflux._compat import tensorflow_xla
from keras_conflux._extensions.sharding import cutting
from keras_conflux._extensions.sharding import gathered_weights
from keras_conflux._extensions.sharding import narrow_gradients
from keras_conflux._fit.execution.traced_program import TracedProgram
from keras_conflux._fit.numerics import gradients
from keras_conflux._graphs import rewriting

LAYERS = 6  # whose kernels are cut


needs_module_calls = pytest.mark.skipif(
    not tensorflow_xla.has_module_calls(), reason="needs TensorFlow 2.21"
)


class Traced(Exception):
    """All that is asked for has been traced."""


def run(self, *arguments):
    raise Traced


@pytest.fixture
def traces(monkeypatch):
    """What replicas have traced for XLA, though the devices are CPUs."""
    found = []
    original = replicas_in_turn.SharedTrace.__init__

    def noted(self, *arguments):
        original(self, *arguments)
        found.append(self)

    monkeypatch.setattr(replicas_in_turn.SharedTrace, "__init__", noted)
    monkeypatch.setattr(TracedProgram, "__call__", run)
    monkeypatch.setattr(Communicator, "supports_xla", True)
    monkeypatch.setattr(tensorflow_xla, "_PLATFORM", "CPU")
    return found


def traced(traces, shard, mode=None, activation="tanh"):
    """Returns the program of a step of some layers."""
    with keras.RematScope(mode):
        inner = [layers.Dense(64, activation) for _ in range(LAYERS)]
    model = keras.Sequential([layers.Input((64,)), *inner])
    return program_of(traces, model, shard)


def program_of(traces, model, shard):
    """Returns the program of a step of a model of 64 numbers a sample."""
    kc.replicate(model, devices=2, shard=shard)
    model.compile(keras.optimizers.Adam(), "mse", jit_compile=True)
    x = np.ones([8, 64], "float32")
    with pytest.raises(Traced):
        model.fit(x, x, verbose=0)
    (trace,) = traces
    assert trace.serves_others()
    return compiled(trace, "optimized_hlo")


def compiled(trace, stage, samples=4):
    """Returns what XLA makes of a program, of some samples."""
    specs = [
        tf.TensorSpec(
            [samples if x is None else x for x in each.shape], each.dtype
        )
        for each in trace._concrete.inputs
        if each.dtype != tf.resource
    ]
    made = compiler_ir.from_concrete_function(trace._concrete, specs)
    return made(stage, "/device:CPU:0")


def collectives(program):
    """Returns the names of the collectives of a program, with operands."""
    kind = r" (all-gather|all-reduce|reduce-scatter)\(([^)]*)\)"
    return [(x[1], len(x[2].split(","))) for x in re.finditer(kind, program)]


def known_before_gatherings(program):
    """Returns what gatherings wait for, in the order of tracing.

    For each there are two numbers: of products of a layer that have to be
    computed before, activations or gradients by these, and of reductions.
    """
    line = r"(%\S+) = (.*?) ([a-z][\w-]*)\((.*)"
    before, gatherings = {}, []
    for name, shape, kind, others in re.findall(line, program):
        counts = kind == "reduce-scatter" or (kind, shape[:9]) == (
            "dot",
            "f32[4,64]",
        )
        given = [before.get(x, {}) for x in re.findall(r"%[\w.-]+", others)]
        before[name] = dict.fromkeys(
            itertools.chain([(kind, name)] * counts, *given)
        )
        if kind == "all-gather":
            channel = int(re.search(r"channel_id=(\d+)", others)[1])
            found = collections.Counter(each for each, _ in before[name])
            gatherings.append((channel, found["dot"], found["reduce-scatter"]))
    return [tuple(known) for _, *known in sorted(gatherings)]


@pytest.mark.long
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_collectives_of_a_step(traces, shard):
    program = traced(traces, shard)
    found = collectives(program)
    kinds = collections.Counter(kind for kind, _ in found)
    assert kinds["reduce-scatter"] == LAYERS
    if shard == "optimizer":
        assert kinds["all-gather"] == 1
        assert ("all-gather", LAYERS) in found
    else:
        # The backward pass does not read the first kernel.
        assert kinds["all-gather"] == 2 * LAYERS - 1
        # An activation or a gradient travels along, but with the first two.
        assert found.count(("all-gather", 2)) == 2 * LAYERS - 3
        # While a layer is computed, the kernel of the next one travels.
        forward = [(max(0, n - 1), 0) for n in range(LAYERS)]
        # So it is again once all layers are known, and few gradients wait to
        # be reduced.
        backward = [
            (LAYERS + max(0, n - 1), max(0, n - 2)) for n in range(LAYERS - 1)
        ]
        assert known_before_gatherings(program) == forward + backward


@pytest.mark.long
@needs_module_calls
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
def test_recomputation_gathers_each_weight_twice_and_in_order(traces):
    program = traced(traces, "weights", "full", "gelu")
    gatherings = [x for x in collectives(program) if x[0] == "all-gather"]
    # The first kernel as well, which is needed to compute its layer again.
    assert gatherings.count(("all-gather", 2)) == 2 * LAYERS - 2
    assert len(gatherings) <= 2 * LAYERS
    products, reductions = zip(*known_before_gatherings(program), strict=True)
    forward, backward = products[:LAYERS], products[LAYERS:]
    assert forward == tuple(max(0, n - 1) for n in range(LAYERS))
    assert all(known >= LAYERS for known in backward)
    assert list(backward) == sorted(backward)
    assert reductions[-1] == LAYERS - 4


class WithLora(layers.Dense):
    """Adds a product of weights to its kernel, as Keras' layers do."""

    def build(self, shape):
        super().build(shape)
        self.enable_lora(64)


@pytest.mark.long
@pytest.mark.sampled(2)
@needs_module_calls
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
@pytest.mark.parametrize("mode", [None, "full"])
def test_frozen_weights_are_gathered_and_not_reduced(traces, mode):
    with keras.RematScope(mode):
        inner = [WithLora(64, activation="tanh") for _ in range(LAYERS)]
    model = keras.Sequential([layers.Input((64,)), *inner])
    program = program_of(traces, model, "weights")
    found = collections.Counter(kind for kind, _ in collectives(program))
    assert found["reduce-scatter"] == 2 * LAYERS  # of LoRA's two factors
    if mode:
        known = [count for count, _ in known_before_gatherings(program)]
        assert sum(not count for count in known) <= 6


@needs_module_calls
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
@pytest.mark.parametrize("shard", ["optimizer", "weights"])
def test_a_weight_that_a_layer_writes_is_equal_after_an_update(traces, shard):
    """Else a warning would say that nobody knows what it is made of."""
    inner = layers.SpectralNormalization(layers.Dense(64))
    program_of(traces, keras.Sequential([layers.Input((64,)), inner]), shard)


@pytest.mark.long
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
def test_nothing_but_data_orders_gatherings(traces, monkeypatch):
    """Without what travels along, all weights may be whole at once."""
    joined = gathered_weights._Unit._whole_weights

    def unordered(unit, parts, after, again=False):
        return joined(unit, parts, [], again)

    monkeypatch.setattr(gathered_weights._Unit, "_whole_weights", unordered)
    known = known_before_gatherings(traced(traces, "weights"))
    assert known == [(0, 0)] * (2 * LAYERS - 1)


@pytest.mark.sampled(3)
@needs_module_calls
@pytest.mark.skipif(ON_GPU or MANY < 3, reason="takes CPU devices")
@pytest.mark.parametrize(
    ("shard", "devices"), [("optimizer", 2), ("weights", 2), ("weights", 3)]
)
def test_two_devices_exchange_what_products_write_in_16_bits(
    traces, shard, devices
):
    model = keras.Sequential(
        [layers.Input((8,)), layers.Dense(5000, dtype="mixed_bfloat16")]
    )
    kc.replicate(model, devices=devices, shard=shard)
    model.compile("sgd", "mse", jit_compile=True)
    with pytest.raises(Traced):
        model.fit(np.ones([12, 8]), np.ones([12, 5000]), verbose=0)
    program = compiled(traces[0], "hlo")
    kinds = re.findall(r"= \(?(\w+)\[.* (all-gather|reduce-scatter)\(", program)
    updated, read = [("f32", "all-gather")], [("bf16", "all-gather")] * 2
    exchanged, added_up = ("bf16", "all-gather"), ("f32", "reduce-scatter")
    # The gradient of the bias is a sum, which XLA may hand on in float32.
    bias, kernel = added_up, exchanged if devices == 2 else added_up
    gathered = updated if shard == "optimizer" else read
    assert sorted(kinds) == sorted([*gathered, bias, kernel])


def test_what_a_product_has_written_is_not_what_was_rounded_since():
    @tf.function(input_signature=[tf.TensorSpec([2, 2])] * 2)
    def run(x, y):
        narrow = [tf.cast(each, tf.float16) for each in (x, y)]
        wide = tf.cast(tf.matmul(*narrow), tf.float32)
        rounded = tf.cast(tf.matmul(x, y), tf.float16)
        return [
            narrow_gradients.as_written(each, tf.float32)
            for each in (wide, tf.reduce_sum(wide, 0), rounded)
        ]

    large = tf.fill([2, 2], 300.0)
    product, added_up, rounded = run(large, large)
    assert product.dtype == tf.float16
    assert added_up.dtype == rounded.dtype == tf.float32
    assert np.isinf(rounded).all()


@needs_module_calls
@pytest.mark.skipif(ON_GPU, reason="runs on a CPU without the other device")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", ["bf16", "f16"])
def test_two_devices_add_up_what_they_exchange(monkeypatch, rank, name):
    rng = np.random.default_rng(0)
    dtype = {"bf16": tf.bfloat16, "f16": tf.float16}[name]
    mine, yours = (tf.cast(rng.normal(size=64), dtype) for _ in range(2))
    own, other = (
        slice(32 * rank, 32 * (rank + 1)),
        slice(32 - 32 * rank, 64 - 32 * rank),
    )
    wide = functools.partial(tf.cast, dtype=tf.float32)

    got = received(monkeypatch, mine, rank, [mine[other], yours[own]])
    np.testing.assert_array_equal(got, wide(mine[own]) + wide(yours[own]))
    # What it sends, if that came back to it.
    got = received(monkeypatch, mine, rank, None)
    np.testing.assert_array_equal(got, wide(mine[own]) + wide(mine[other]))


def received(monkeypatch, flat, rank, halves):
    """Returns what a device computes whose collective returns some halves.

    Args:
        monkeypatch: Replaces the collective.
        flat: Its summand.
        rank: Which of the two devices it is.
        halves: Its own first, or `None` for what it sends, twice.
    """
    call = tensorflow_xla.module_call

    def without_the_other(text, operands, *others, **options):
        given = re.search("%flat: (tensor<64x[a-z0-9]+>)", text)[1]
        part = given.replace("64", "32")
        joined = ""
        if halves is None:
            joined = f"""%all = "stablehlo.concatenate"(%sent, %sent) <{{
                dimension = 0 : i64}}> : ({part}, {part}) -> {given}\n"""
        text = re.sub("%all = .*?(?=%got)", joined, text, flags=re.DOTALL)
        if halves is not None:
            text = text.replace(
                "%rank: tensor<i64>", f"%rank: tensor<i64>, %all: {given}", 1
            )
            by_rank = halves if rank == 0 else halves[::-1]
            operands = [*operands, tf.concat(by_rank, 0)]
        return call(text, operands, *others, **options)

    @tf.function(jit_compile=True, autograph=False)
    def added_up(flat):
        return tensorflow_xla.exchanged_sum(flat, tf.float32, rank, 1)

    with monkeypatch.context() as patched:
        patched.setattr(tensorflow_xla, "module_call", without_the_other)
        patched.setattr(tensorflow_xla, "_PLATFORM", "CPU")
        return added_up(flat)


@pytest.mark.long
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
@pytest.mark.usefixtures("dense_gradients")
def test_parts_take_few_more_operations_than_copies(traces, monkeypatch):
    """A start is mostly tracing, whose time is that of its operations."""
    monkeypatch.setattr(cutting, "WHOLE_BELOW", 129)  # as many as if large
    x = np.ones([4, 8])
    for shard in (None, "weights"):
        model = models.gpt(2, width=64, heads=2, length=8, vocabulary=96)
        model.jit_compile = True
        kc.replicate(model, devices=2, shard=shard)
        with pytest.raises(Traced):
            model.fit(x, x, verbose=0)
    copies, weights = map(operations, traces)
    assert weights < 1.1 * copies


def operations(trace):
    """Returns of how many operations a program is, functions included."""
    program = trace._concrete.graph.as_graph_def()
    functions = [len(each.node_def) for each in program.library.function]
    return len(program.node) + sum(functions)


@pytest.mark.long
@several
@pytest.mark.parametrize(
    ("shard", "options"),
    [("optimizer", {}), (None, {"gradient_accumulation_steps": 2})],
)
@pytest.mark.usefixtures("dense_gradients")
def test_gradients_of_embeddings_are_known_again(shard, options, monkeypatch):
    def made_global(grads, *_):
        raise AssertionError("the optimizer took gradients for the user's")

    monkeypatch.setattr(gradients, "_made_global", made_global)
    model = keras.Sequential([layers.Input((3,)), layers.Embedding(70, 70)])
    kc.replicate(model, devices=2, shard=shard)
    model.compile(keras.optimizers.SGD(**options), "mse")
    model.fit(np.ones([4, 3]), np.ones([4, 3, 70]), verbose=0)


@several
@pytest.mark.parametrize(
    ("jit_compile", "cure"),
    [(False, "`jit_compile=True`"), (True, "`drop_remainder=True`"), (0, None)],
)
def test_weights_that_stay_whole_are_warned_of(jit_compile, cure, monkeypatch):
    """As between GPUs in a graph, and if they are large."""
    monkeypatch.setattr(Communicator, "supports_xla", False)
    monkeypatch.setattr(Communicator, "can_gather_again", lambda *_: False)
    if cure:
        monkeypatch.setattr(gathered_weights, "WORTH_A_WARNING", 0)
    model = keras.Sequential([layers.Input((70,)), layers.Dense(70)])
    kc.replicate(model, devices=2, shard="weights")
    model.compile("sgd", "mse", jit_compile=bool(jit_compile))
    x = np.ones([5, 70], "float32")
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        model.fit(x, x, batch_size=4, epochs=2, verbose=0)
    found = [each for each in found if each.category is kc.ConfluxWarning]
    assert [each.filename for each in found] == [__file__] * bool(cure)
    assert not cure or cure in str(found[0].message)


@pytest.mark.long
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
def test_recomputation_does_not_keep_all_weights_whole(traces):
    """They are gathered again for it, as for gradients."""
    for mode in (None, "full"):
        scope = keras.RematScope(mode) if mode else contextlib.nullcontext()
        with scope:
            model = keras.Sequential(
                [layers.Input((64,))]
                + [layers.Dense(64, activation="tanh") for _ in range(12)]
            )
        kc.replicate(model, devices=2, shard="weights")
        model.compile(keras.optimizers.SGD(), "mse", jit_compile=True)
        x = np.ones([8, 64], "float32")
        with pytest.raises(Traced):
            model.fit(x, x, verbose=0)
    plain, again = map(temporary, traces)
    kernels = 4 * 12 * 64 * 64
    assert again < plain + kernels


@pytest.mark.long
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
def test_a_step_takes_the_memory_that_was_told(traces):
    """By XLA's assignment of buffers. GPUs are measured in `test_memory.py`."""
    width = 128
    samples = step_memory.samples(width)
    told = step_memory.told(width)
    x = np.ones([2 * samples, width], "float32")
    for shard, mode in step_memory.WAYS:
        model = step_memory.blocks(width, mode)
        kc.replicate(model, devices=2, shard=shard)
        with pytest.raises(Traced):
            model.fit(x, x, batch_size=len(x), verbose=0)
    found = [temporary(trace, samples) for trace in traces]
    weights = told[0].weights
    assert found[1] < found[0] + 0.5 * weights
    held = [
        told[0].with_shard(shard).variables for shard, _ in step_memory.WAYS
    ]
    step_memory.assert_as_told([*map(sum, zip(held, found, strict=True))], told)


@pytest.mark.long
@pytest.mark.skipif(ON_GPU or MANY < 2, reason="takes CPU devices")
def test_parts_in_16_bits_are_not_kept(traces, monkeypatch):
    x = np.ones([64, 128], "float32")
    for _ in range(2):
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_bfloat16")
        model = step_memory.blocks(128)
        keras.config.set_dtype_policy(before)
        kc.replicate(model, devices=2, shard="weights")
        with pytest.raises(Traced):
            model.fit(x, x, batch_size=64, verbose=0)
        monkeypatch.setattr(rewriting, "once_known", lambda parts, _: parts)
    found, kept = (temporary(trace, 32) for trace in traces)
    assert found < kept - 0.1 * kc.memory(model).weights


def temporary(trace, samples=4):
    """Returns the bytes of what a program has beside its arguments."""
    program = compiled(trace, "optimized_hlo_proto_serialized", samples)
    found = hlo_pb2.HloProto.FromString(program).buffer_assignment
    return sum(
        each.size
        for each in found.buffer_allocations
        if not each.is_entry_computation_parameter
    )
