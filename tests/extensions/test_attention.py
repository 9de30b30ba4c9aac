"""Fused attention: which attentions are, and that they compute the same.

XLA has no fused attention on CPUs. So these tests read the programs that GPUs
would run, and let a kernel of TensorFlow's operations compute in place of
cuDNN's.
"""

import contextlib
import functools
import logging
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import ON_GPU
from conftest import several
from keras import layers
from models import MARGIN
from models import assert_same_training

import keras_conflux as kc
from keras_conflux._compat import tensorflow_xla
from keras_conflux._extensions.kernels import cudnn
from keras_conflux._extensions.kernels import dispatch
from keras_conflux._extensions.kernels import limits
from keras_conflux._extensions.kernels import masks
from keras_conflux._fit.execution import xla_program
from keras_conflux._fit.execution.step_executor import StepExecutor
from keras_conflux._replication import steps
from keras_conflux._replication.watchdog import StepWatchdog

B, T, N, H = 2, 64, 4, 16
attention = keras.ops.dot_product_attention


def scores_of(queries, keys, bias, form):
    keys = tf.repeat(keys, queries.shape[2] // keys.shape[2], axis=2)
    scores = tf.einsum("btnh,bsnh->bnts", *map(as_float, (queries, keys)))
    scores *= form.scale
    if bias is not None:
        scores += as_float(bias)
    if form.is_causal:
        allowed = tf.linalg.band_part(tf.ones(scores.shape[2:], "bool"), -1, 0)
        scores = tf.where(allowed, scores, -1e30)
    return scores


def as_float(tensor):
    return tf.cast(tensor, tf.float32)


def grouped(gradient, like):
    """Adds up the gradients of heads that share keys and values."""
    batch, length, heads, size = like.shape
    gradient = tf.reshape(gradient, [batch, length, heads, -1, size])
    return tf.cast(tf.reduce_sum(gradient, 3), like.dtype)


class Reference:
    """Computes what cuDNN does, with the same interface."""

    def __init__(self):
        self.calls = []

    def obstacle(self, context):
        return None

    def forward(self, queries, keys, values, bias, form):
        self.calls.append("forward")
        scores = scores_of(queries, keys, bias, form)
        values = tf.repeat(values, queries.shape[2] // values.shape[2], axis=2)
        output = tf.einsum(
            "bnts,bsnh->btnh", tf.nn.softmax(scores), as_float(values)
        )
        statistics = tf.reduce_logsumexp(scores, axis=-1)
        return [tf.cast(output, queries.dtype), statistics]

    def backward(
        self, queries, keys, values, bias, form, output, statistics, upstream
    ):
        self.calls.append("backward")
        scores = scores_of(queries, keys, bias, form)
        weights = tf.exp(scores - statistics[..., None])
        upstream, output = as_float(upstream), as_float(output)
        groups = queries.shape[2] // keys.shape[2]
        all_keys, all_values = (
            as_float(tf.repeat(x, groups, axis=2)) for x in (keys, values)
        )
        by_weights = tf.einsum("btnh,bsnh->bnts", upstream, all_values)
        inner = tf.einsum("btnh,btnh->bnt", upstream, output)
        by_scores = weights * (by_weights - inner[..., None]) * form.scale
        return [
            tf.cast(
                tf.einsum("bnts,bsnh->btnh", by_scores, all_keys), queries.dtype
            ),
            grouped(
                tf.einsum("bnts,btnh->bsnh", by_scores, as_float(queries)), keys
            ),
            grouped(tf.einsum("bnts,btnh->bsnh", weights, upstream), values),
        ]


@pytest.fixture
def reference(monkeypatch):
    """Lets TensorFlow's operations compute what is fused, on any device."""
    kernel = Reference()
    for name in ("obstacle", "forward", "backward"):
        monkeypatch.setattr(cudnn, name, getattr(kernel, name))
    return kernel


@pytest.fixture
def gpu(monkeypatch):
    """Makes XLA's program for CPUs have what that for GPUs has."""
    if ON_GPU:
        pytest.skip("reads programs that are made for CPUs")
    monkeypatch.setattr(tensorflow_xla, "_PLATFORM", "CPU")
    strategy = kc.replicate(devices=1)
    monkeypatch.setattr(strategy.communicator, "compute_capability", (9, 0))
    return strategy


@contextlib.contextmanager
def in_a_program(in_xla=True, kinds=None):
    kc.replicate(devices=1)  # puts the kernels in place
    compiled = steps.CompiledStep() if in_xla else None
    context = steps.Step("test", compiled=compiled, kinds=kinds)
    with steps.entered(context):
        yield


def random(*shape, seed=0, dtype="bfloat16"):
    return tf.cast(tf.random.stateless_normal(shape, [seed, 7]), dtype)


def inputs(t=T, s=T, n=N, k=N, h=H, dtype="bfloat16"):
    return (
        random(B, t, n, h, seed=1, dtype=dtype),
        random(B, s, k, h, seed=2, dtype=dtype),
        random(B, s, k, h, seed=3, dtype=dtype),
    )


def hlo(strategy, function, *arguments, **context):
    """Returns XLA's program for one replica, before it is optimized."""

    def run(*arguments):
        with strategy.scope(), in_a_program(**context):
            return function(*arguments)

    compiled = tf.function(run, jit_compile=True, autograph=False)
    return compiled.experimental_get_compiler_ir(*arguments)(stage="hlo")


def with_gradients(function):
    def run(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            output = function(*arguments)
        return output, tape.gradient(output, arguments)

    return run


def calls_in(text):
    return [line for line in text.splitlines() if "__cudnn" in line]


def operands(call):
    return re.search(r"custom-call\((.*?)\), custom_call_target", call)[1]


def shapes_of_operands(call):
    return re.findall(r"\w+\[[\d,]*\]", operands(call))


def causal(*arguments):
    return attention(*arguments, is_causal=True)


def test_what_xla_is_given(gpu):
    forward, backward = calls_in(hlo(gpu, with_gradients(causal), *inputs()))
    result = r"bf16\[2,4,64,16\]\{3,1,2,0\}"
    assert re.search(
        rf"\({result}, f32\[2,4,64\]\{{2,1,0\}}, u8\[0\]\{{0\}}\)", forward
    )
    assert re.search(rf"\({result}, {result}, {result}, u8\[0\]", backward)
    assert 'custom_call_target="__cudnn$fmhaSoftmax"' in forward
    assert 'custom_call_target="__cudnn$fmhaSoftmaxBackward"' in backward
    for call in (forward, backward):
        assert re.search(r'"fmha_scale": ?0.25\b', call.replace("\\", ""))
        assert re.search('"mask_type": ?"CAUSAL"', call.replace("\\", ""))
        operands = r"operand_layout_constraints=\{bf16\[2,64,4,16\]\{3,2,1,0\}"
        assert re.search(operands, call)


def test_without_a_tape_there_is_no_gradient(gpu):
    (call,) = calls_in(hlo(gpu, attention, *inputs()))
    assert "NO_MASK" in call


def test_a_mask_is_a_bias(gpu):
    def masked(*arguments):
        return attention(
            *arguments, mask=tf.sequence_mask([9, 64])[:, None, None]
        )

    forward, backward = calls_in(hlo(gpu, with_gradients(masked), *inputs()))
    assert '__cudnn$fmhaScaleBiasSoftmax"' in forward
    assert '__cudnn$fmhaScaleBiasSoftmaxBackward"' in backward
    bias = "bf16[2,1,64,64]"
    assert [each == bias for each in shapes_of_operands(forward)] == [
        *[False] * 3,
        True,
    ]
    # Queries, keys, values, statistics, the output's gradient, bias, output.
    assert [each == bias for each in shapes_of_operands(backward)] == [
        *[False] * 5,
        True,
        False,
    ]
    assert shapes_of_operands(backward)[3] == "f32[2,4,64]"


def test_heads_may_share_keys(gpu):
    forward, backward = calls_in(
        hlo(gpu, with_gradients(attention), *inputs(k=2))
    )
    assert operands(forward).count("bf16[2,64,2,16]") == 2
    assert operands(backward).count("bf16[2,64,2,16]") == 2
    assert backward.count("bf16[2,2,64,16]") == 2


def of_open_batch(function, knows=True):
    """Traces a function for any number of samples, as a step is.

    Args:
        function: What to trace.
        knows: Whether it is known what XLA will compile it for.
    """

    def run(*arguments):
        context = steps.current()
        specs = [
            tf.TensorSpec([None, *x.shape[1:]], x.dtype) for x in arguments
        ]
        shapes = [x.shape.as_list() for x in arguments]

        def inside(*arguments):
            if knows:
                context.shard = arguments
                context.compiled = steps.CompiledStep(shapes)
            with steps.entered(context):
                return function(*arguments)

        return tf.function(inside, specs, autograph=False)(*arguments)

    return run


@pytest.mark.parametrize(("knows", "calls"), [(True, 2), (False, 0)])
def test_the_number_of_samples_is_that_of_the_program(gpu, knows, calls):
    program = of_open_batch(with_gradients(causal), knows)
    assert len(calls_in(hlo(gpu, program, *inputs()))) == calls


def test_the_number_of_samples_stays_unknown(gpu):
    seen = []

    def program(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            output = attention(*arguments)
        gradients = tape.gradient(output, arguments)
        seen.extend(x.shape.as_list() for x in (output, *gradients))
        return output, gradients

    hlo(gpu, of_open_batch(program), *inputs())
    assert seen == [[None, T, N, H]] * 4


def test_samples_may_be_cut_into_windows(gpu):
    def windows(images):
        x = tf.reshape(images, [-1, 2, T, N, H])
        x = tf.reshape(x, [-1, T, N, H])
        return attention(x, x, x)

    images = random(B, 2 * T, N * H)
    (call,) = calls_in(hlo(gpu, of_open_batch(windows), images))
    assert "bf16[4,64,4,16]" in operands(call)


NOT_FUSED = {
    "float32": (inputs(dtype="float32"), attention, "computes in float32"),
    "mixed": (
        (*inputs()[:2], inputs(dtype="float32")[2]),
        attention,
        "bfloat16, float32",
    ),
    "head size": (inputs(h=20), attention, "has the size 20"),
    "large heads": (inputs(h=136), attention, "has the size 136"),
    "short": (inputs(t=32), attention, "shorter than 64"),
    "few keys": (inputs(s=32), attention, "shorter than 64"),
    "odd length with a mask": (
        inputs(t=T + 1),
        lambda *a: attention(*a, mask=tf.ones([1, 1, 1, T], "bool")),
        "odd length",
    ),
    "bias": (
        inputs(),
        lambda *a: attention(*a, bias=random(1, N, T, T)),
        "has a bias",
    ),
    "a scale that is computed": (
        inputs(),
        lambda *a: attention(*a, scale=tf.sqrt(2.0)),
        "scale is a tensor",
    ),
    "switched off": (
        inputs(),
        lambda *a: attention(*a, flash_attention=False),
        "disabled",
    ),
}


@pytest.fixture
def said(caplog):
    dispatch._say.cache_clear()
    caplog.set_level(logging.DEBUG, "keras_conflux")
    return lambda: [r.message for r in caplog.records if "fused" in r.message]


@pytest.mark.parametrize("case", NOT_FUSED)
def test_what_is_not_fused(gpu, said, case):
    arguments, function, reason = NOT_FUSED[case]
    for _ in range(2):
        assert not calls_in(hlo(gpu, function, *arguments))
    (message,) = said()
    assert reason in message


def test_keras_switch(gpu, said):
    keras.config.disable_flash_attention()
    try:
        assert not calls_in(hlo(gpu, attention, *inputs()))
    finally:
        keras.config.enable_flash_attention()
    assert "disabled" in said()[0]
    assert calls_in(hlo(gpu, attention, *inputs()))


def test_a_layer_may_ask_for_it(gpu):
    def asked(*arguments):
        return attention(*arguments, flash_attention=True)

    assert calls_in(hlo(gpu, asked, *inputs()))
    with pytest.raises(ValueError, match="not supported"):  # Keras' own
        hlo(gpu, asked, *inputs(dtype="float32"))


@pytest.mark.parametrize(
    ("capability", "reason"),
    [((7, 5), "compute capability 7.5"), (None, "not all devices are CUDA")],
)
def test_gpus_without_it(gpu, monkeypatch, said, capability, reason):
    monkeypatch.setattr(gpu.communicator, "compute_capability", capability)
    assert not calls_in(hlo(gpu, attention, *inputs()))
    assert reason in said()[0]


def test_a_step_that_is_not_compiled(gpu, said):
    assert not calls_in(hlo(gpu, attention, *inputs(), in_xla=False))
    assert "not compiled by XLA" in said()[0]


def test_deterministic_operations(gpu, monkeypatch, said):
    monkeypatch.setattr(
        cudnn.tensorflow_internals, "is_deterministic", lambda: True
    )
    assert not calls_in(hlo(gpu, attention, *inputs()))
    assert "deterministic" in said()[0]


def test_outside_of_replicas_it_is_kerass(gpu):
    run = tf.function(lambda *a: attention(*a), jit_compile=True)
    with gpu.scope():
        text = run.experimental_get_compiler_ir(*inputs())(stage="hlo")
    assert not calls_in(text)


def test_after_an_error_it_is_kerass(gpu):
    def fails(*arguments):
        attention(*arguments)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        hlo(gpu, fails, *inputs())
    test_outside_of_replicas_it_is_kerass(gpu)


MASKS = {
    "padded": tf.sequence_mask([40, T], T)[:, None, None],
    "padded queries, too": (
        tf.sequence_mask([40, 50], T)[:, None, None]
        & tf.sequence_mask([40, T], T)[:, None, :, None]
    ),
    "by head": tf.random.stateless_uniform([1, N, T, T], [1, 2]) > 0.3,
    "of rank 2": tf.random.stateless_uniform([T, T], [1, 2]) > 0.3,
    "none allowed": tf.zeros([1, 1, T, T], "bool"),
}
OPTIONS = {
    "": {},
    "causal": {"is_causal": True},
    "scaled": {"scale": 0.7},
    **{name: {"mask": mask} for name, mask in MASKS.items()},
    "padded and causal": {"mask": MASKS["padded"], "is_causal": True},
}


@functools.cache
def rounding():
    """Returns how far Keras' attention is from that of float32 here.

    A processor without products of bfloat16 rounds more often.
    """
    given = inputs(dtype="bfloat16")
    wide = [tf.cast(each, "float32") for each in given]
    run = tf.function(with_gradients(attention), autograph=False)
    return max(
        np.abs(as_float(one) - as_float(other)).max() / np.abs(other).max()
        for one, other in zip(
            *map(tf.nest.flatten, (run(*given), run(*wide))), strict=True
        )
    )


def assert_close(found, expected):
    # Both may be as far from what they stand for as Keras is.
    tolerance = max(0.02, MARGIN * rounding())
    for one, other in zip(
        tf.nest.flatten(found), tf.nest.flatten(expected), strict=True
    ):
        one, other = as_float(one).numpy(), as_float(other).numpy()
        assert np.abs(one - other).max() <= tolerance * np.abs(other).max()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("keys", [N, 2])
@pytest.mark.parametrize("options", OPTIONS)
def test_it_computes_what_keras_does(reference, options, keys, dtype):
    weights = random(B, T, N, H, seed=4, dtype=dtype)

    def weighted(*arguments):
        return attention(*arguments, **OPTIONS[options]) * weights

    given = inputs(k=keys, dtype=dtype)
    program = tf.function(with_gradients(weighted), autograph=False)
    expected = program(*inputs(k=keys, dtype=dtype))
    assert not reference.calls
    program = tf.function(with_gradients(weighted), autograph=False)
    with in_a_program():
        found = program(*given)
    assert reference.calls == ["forward", "backward"]
    assert_close(found, expected)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("options", OPTIONS)
def test_cudnn_computes_what_keras_does(options, dtype):
    strategy = kc.replicate(devices=1)
    weights = random(B, T, N, H, seed=4, dtype=dtype)

    def weighted(*arguments):
        return attention(*arguments, **OPTIONS[options]) * weights

    expected = with_gradients(weighted)(*inputs(dtype=dtype))

    @tf.function(jit_compile=True, autograph=False)
    def run(*given):
        with strategy.scope(), in_a_program():
            return with_gradients(weighted)(*given)

    found = run(*inputs(dtype=dtype))
    program = run.experimental_get_compiler_ir(*inputs(dtype=dtype))()
    assert len(calls_in(program)) == 2
    assert_close(found, expected)


@pytest.mark.parametrize("options", ["causal", "padded queries, too"])
def test_it_computes_the_same_in_a_step_for_any_number(reference, options):
    mask = OPTIONS[options].get("mask")

    def run(queries, keys, values, *masks):
        options = {"mask": masks[0]} if masks else {"is_causal": True}
        return with_gradients(lambda *given: attention(*given, **options))(
            queries, keys, values
        )

    given = *inputs(), *([] if mask is None else [mask])
    expected = tf.function(run, autograph=False)(*given)
    program = tf.function(of_open_batch(run), jit_compile=True, autograph=False)
    with in_a_program():
        found = program(*given)
    assert reference.calls
    assert_close(found, expected)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("is_open", [False, True])
def test_gradients_of_gradients_are_kerass(reference, is_open):
    def penalty(*arguments):
        with tf.GradientTape() as tape:
            tape.watch(arguments)
            output = causal(*arguments)
        gradients = tape.gradient(output, arguments)
        return tf.add_n([tf.reduce_sum(as_float(g) ** 2) for g in gradients])

    program = with_gradients(penalty)
    expected = tf.function(program, autograph=False)(*inputs())
    if is_open:
        program = of_open_batch(program)
    with in_a_program():
        found = tf.function(program, autograph=False, jit_compile=True)(
            *inputs()
        )
    assert "backward" in reference.calls
    assert_close(found, expected)


def test_gradients_that_no_tape_asks_for(reference):
    def program(*arguments):
        output = causal(*arguments)
        return tf.gradients(output, arguments)

    expected = tf.function(program, autograph=False)(*inputs())
    with in_a_program():
        found = tf.function(program, autograph=False)(*inputs())
    assert reference.calls == ["forward", "backward"]
    assert_close(found, expected)


def language_model(masked, jit_compile=True, **options):
    keras.utils.set_random_seed(0)
    tokens = keras.Input((T,), dtype="int32")
    x = layers.Embedding(20, N * H, mask_zero=masked)(tokens)
    for _ in range(2):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(N, H, use_bias=False, **options)(
            h, h, use_causal_mask=True
        )
    model = keras.Model(tokens, layers.Dense(20, dtype="float32")(x))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=jit_compile)
    return model


def texts(size):
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 20, (2 * size, T + 1))
    tokens[::3, T // 2 :] = 0
    return tf.data.Dataset.from_tensor_slices(
        (tokens[:, :-1], tokens[:, 1:])
    ).batch(size)


@pytest.fixture
def half():
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy("float32")


class HasBeenRead(Exception):
    """Says that a program has been read, and need not run."""


@pytest.fixture
def programs(monkeypatch):
    """The texts of the XLA programs that `fit` and its kin would run."""
    texts = []

    class Traced:
        def __init__(self, communicator, watchdog, function, *_, compiled):
            assert compiled
            self.function = function

        def __call__(self, steps, shards):
            def flat(steps, *leaves):
                return self.function(steps, [leaves])

            program = tf.function(flat, jit_compile=True, autograph=False)
            read = program.experimental_get_compiler_ir(steps, *shards[0])
            texts.append(read(stage="hlo"))
            raise HasBeenRead

    monkeypatch.setattr(xla_program, "TracedProgram", Traced)
    monkeypatch.setattr(
        StepWatchdog, "mark_end", lambda self, index, output: output
    )
    return texts


CALLS = {
    "fit": lambda model, data: model.fit(data, verbose=0),
    "evaluate": lambda model, data: model.evaluate(data, verbose=0),
    "predict": lambda model, data: model.predict(data, verbose=0),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("call", CALLS)
def test_the_programs_of_fit_and_its_kin(half, gpu, programs, call, masked):
    model = kc.replicate(language_model(masked=masked), 1)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(HasBeenRead):
        CALLS[call](model, texts(4))
    calls = calls_in(programs[0])
    assert len(calls) == (4 if call == "fit" else 2)
    assert all("bf16[4,64,4,16]" in operands(each) for each in calls)
    # Of the two layers, only the first gets the mask from Keras.
    with_bias = sum("ScaleBias" in each for each in calls)
    assert with_bias == (len(calls) // 2 if masked else 0)


def test_dropout_is_kerass(half, gpu, programs):
    model = kc.replicate(language_model(masked=False, dropout=0.1), 1)
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(HasBeenRead):
        model.fit(texts(4), verbose=0)
    assert not calls_in(programs[0])


def test_withdevices(gpu, monkeypatch):
    found = []
    monkeypatch.setattr(
        dispatch.Fused,
        "__call__",
        lambda self, *given: found.append(self) or given[0],
    )
    given = inputs()
    for jit_compile in (False, True):
        run = kc.withdevices(
            lambda: attention(*given), devices=1, jit_compile=jit_compile
        )
        run()
        assert len(found) == jit_compile


@pytest.fixture
def exact(monkeypatch, reference):
    """Lets the reference compute in float32."""
    monkeypatch.setattr(limits, "HALVES", (tf.float32,))
    monkeypatch.setitem(masks._LOW, tf.float32, -(2.0**41))
    return reference


@pytest.fixture
def in_graphs(monkeypatch, exact):
    """Lets the reference compute on several CPU devices.

    XLA has no collectives for these. What is known of the samples that XLA
    compiles a step for has to be said here: a global batch has four.
    """
    original = steps.entered

    def entered(context):
        if context is not None and context.compiled is None:
            count = 4 // tf.distribute.get_strategy().num_replicas_in_sync
            leaves = context.shard
            shapes = [[count, *leaf.shape[1:]] for leaf in leaves]
            context.compiled = steps.CompiledStep(shapes)
        return original(context)

    monkeypatch.setattr(steps, "entered", entered)
    monkeypatch.setattr(steps.Step, "in_xla", False)
    return exact


class OwnStep(keras.Model):
    """Attends in its `train_step`, to a loss that is no sum over samples."""

    def __init__(self):
        super().__init__()
        self.embed = layers.Embedding(20, N * H)

    def call(self, tokens):
        return self.embed(tokens)

    def train_step(self, data):
        with tf.GradientTape() as tape:
            x = tf.reshape(self(data[0]), [-1, T, N, H])
            output = causal(x, x, x)
            loss = tf.sqrt(tf.reduce_mean(tf.square(output)))
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def own_step():
    keras.utils.set_random_seed(0)
    model = OwnStep()
    model.compile(keras.optimizers.SGD(1.0), jit_compile=False)
    return model


MODELS = {
    "causal": lambda: language_model(masked=False, jit_compile=False),
    "masked": lambda: language_model(masked=True, jit_compile=False),
    "own step": own_step,
}


@pytest.mark.long
@pytest.mark.sampled(3)
@several
@pytest.mark.parametrize("build", MODELS)
def test_replicas_train_what_one_device_does(in_graphs, build):
    models, histories = [], []
    for count in (None, 1, 2):
        model = MODELS[build]()
        if count:
            kc.replicate(model, count)
        histories.append(model.fit(texts(4), epochs=2, verbose=0))
        assert bool(in_graphs.calls) == bool(count)
        models.append(model)
    for model, history in zip(models[1:], histories[1:], strict=True):
        assert_same_training(models[0], model, histories[0], history)


@pytest.mark.long
def test_another_number_of_samples_is_another_program(monkeypatch, exact):
    said = set()
    monkeypatch.setattr(dispatch, "_say", said.add)
    monkeypatch.setattr(StepExecutor, "_is_worth_compiling", lambda *_: True)
    model = kc.replicate(language_model(masked=True), 1)
    expected = language_model(masked=True)
    for size in (4, 2):
        data = texts(4).unbatch().batch(size)
        found = model.predict(data, verbose=0)
        np.testing.assert_allclose(
            found, expected.predict(data, verbose=0), rtol=1e-4, atol=1e-5
        )
    assert sorted(each[-15:] for each in said) == [
        "(2, 64, 4, 16).",
        "(4, 64, 4, 16).",
    ]


def test_a_shape_that_no_operation_tells(reference, said):
    @tf.function(autograph=False)
    def looped(x):
        return tf.while_loop(
            lambda i, _: i < 2, lambda i, x: (i + 1, x), (0, x)
        )

    def program(*arguments):
        (_, query), key, value = looped(arguments[0]), *arguments[1:]
        return attention(query, key, value)

    with in_a_program():
        tf.function(of_open_batch(program), autograph=False)(*inputs())
    assert not reference.calls
    assert "not known: (None, 64, 4, 16), (2, 64, 4, 16)" in said()[0]


def test_shapes_are_told_through_variables_and_captures(reference):
    table = tf.Variable(tf.cast(tf.random.normal([9, N * H]), "bfloat16"))

    def program(tokens):
        x = tf.gather(table, tokens)  # from the handle of a variable

        @tf.function(autograph=False)
        def inside():
            y = tf.reshape(x, [tf.shape(x)[0], T, N, H])
            return attention(y, y, y)

        return inside()

    with in_a_program():
        output = tf.function(of_open_batch(program), autograph=False)(
            tf.ones([B, T], tf.int32)
        )
    assert reference.calls == ["forward"]
    assert output.shape == [B, T, N, H]


def test_derivatives_in_forward_mode_are_kerass(reference, said):
    def program(query, key, value):
        ones = tf.ones_like(query)
        with tf.autodiff.ForwardAccumulator([query], [ones]) as accumulator:
            output = causal(query, key, value)
        return accumulator.jvp(output)

    expected = tf.function(program, autograph=False)(*inputs())
    with in_a_program():
        found = tf.function(program, autograph=False)(*inputs())
    assert "forward mode" in said()[0]
    assert_close(found, expected)
