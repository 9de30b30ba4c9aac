"""How to call what is public, where it cannot be guessed."""

import keras
import numpy as np
import tensorflow as tf


class Given:
    """Arguments, of which some are the names of leaves."""

    def __init__(self, *args, **kwargs):
        self.args = args
        self.kwargs = kwargs


class Leaf(str):
    """The name of a leaf."""


def weights(*shape):
    return np.ones(shape, "float32")


NAMED = {
    "axis": -1,
    "axis1": 1,
    "axis2": 2,
    "dtype": "float32",
    "shape": (2, 3),
    # Of layers and metrics.
    "activation": "relu",
    "axes": 1,
    "cropping": 1,
    "dims": (1,),
    "factor": 0.2,
    "filters": 3,
    "head_dim": 2,
    "height": 4,
    "height_factor": 0.2,
    "input_dim": 9,
    "kernel_size": 2,
    "key_dim": 2,
    "max_number": 2,
    "n": 2,
    "num_bins": 5,
    "num_classes": 4,
    "num_heads": 2,
    "num_key_value_heads": 1,
    "num_query_heads": 2,
    "output_dim": 3,
    "output_size": 2,
    "pool_size": 2,
    "precision": 0.5,
    "rate": 0.3,
    "recall": 0.5,
    "num_segments": 3,
    "scale": 2.0,
    "sensitivity": 0.5,
    "specificity": 0.5,
    "seed": (1, 2),
    "sp_input": Leaf("sparse"),
    "stddev": 0.1,
    "target_class_ids": [1],
    "target_shape": (2, 2),
    "units": 4,
    "width": 4,
    "width_factor": 0.2,
}
"""Arguments by their names, which mean the same wherever they are required."""


def _dense():
    return keras.layers.Dense(3)


LAYERS = {
    "Bidirectional": (
        lambda: keras.layers.Bidirectional(keras.layers.LSTM(3)),
        (),
    ),
    "CategoryEncoding": (
        lambda: keras.layers.CategoryEncoding(num_tokens=5),
        (lambda t: (t.ints,),),
    ),
    "Discretization": (
        lambda: keras.layers.Discretization(bin_boundaries=[0.1, 0.5]),
        (),
    ),
    "EinsumDense": (
        lambda: keras.layers.EinsumDense("abc,cd->abd", (None, 3)),
        (),
    ),
    "GRUCell": (None, (lambda t: (t.floats, t.floats),)),
    "GroupedQueryAttention": (
        None,
        (lambda t: (t.steps, t.steps),),
    ),
    "HashedCrossing": (None, (lambda t: ((t.labels, t.strings),),)),
    "LSTMCell": (None, (lambda t: (t.floats, [t.floats, t.floats]),)),
    "Lambda": (lambda: keras.layers.Lambda(lambda x: x * 2), ()),
    "Masking": (
        lambda: keras.Sequential(
            [keras.layers.Masking(), keras.layers.LSTM(3)]
        ),
        (),
    ),
    "MultiHeadAttention": (None, (lambda t: (t.steps, t.steps),)),
    "ConvLSTM3D": (
        lambda: keras.layers.ConvLSTM3D(2, 2),
        (lambda t: (t.scenes,),),
    ),
    "MelSpectrogram": (
        lambda: keras.layers.MelSpectrogram(16, 8, num_mel_bins=4),
        (lambda t: (t.waves,),),
    ),
    "RandomPosterization": (
        lambda: keras.layers.RandomPosterization(4),
        (),
    ),
    "STFTSpectrogram": (
        lambda: keras.layers.STFTSpectrogram(
            frame_length=16, frame_step=8, fft_length=16
        ),
        (lambda t: (t.tunes,),),
    ),
    "Pipeline": (lambda: keras.layers.Pipeline([keras.layers.ReLU()]), ()),
    "RNN": (lambda: keras.layers.RNN(keras.layers.GRUCell(3)), ()),
    "SimpleRNNCell": (None, (lambda t: (t.floats, t.floats),)),
    "SpectralNormalization": (
        lambda: keras.layers.SpectralNormalization(_dense()),
        (),
    ),
    "StackedRNNCells": (
        lambda: keras.layers.RNN(
            [keras.layers.LSTMCell(3), keras.layers.GRUCell(2)]
        ),
        (),
    ),
    "StringLookup": (
        lambda: keras.layers.StringLookup(vocabulary=["a", "b"]),
        (),
    ),
    "IntegerLookup": (
        lambda: keras.layers.IntegerLookup(vocabulary=[1, 2]),
        (lambda t: (t.ints,),),
    ),
    "TextVectorization": (
        lambda: keras.layers.TextVectorization(vocabulary=["a", "b"]),
        (),
    ),
    "TimeDistributed": (lambda: keras.layers.TimeDistributed(_dense()), ()),
}
"""Layers: how they are made, and what they are given, beside what is guessed.

`Masking` is followed by a layer that uses the mask.
"""
NOT_CLASSES = {
    **dict.fromkeys(
        ("FlaxLayer", "JaxLayer", "TorchModuleWrapper"), "of other backends"
    ),
    "TFSMLayer": "reads a file",
    "InputLayer": "is not called",
    **dict.fromkeys(("Layer", "Loss", "Metric", "Wrapper"), "has no call"),
}
LOSSES = {}
METRICS = {
    "MeanMetricWrapper": lambda: keras.metrics.MeanMetricWrapper(
        keras.losses.mean_squared_error
    ),
}
FLOATS, COLUMN, VECTOR = Leaf("floats"), Leaf("column"), Leaf("vector")
STEPS, MATRICES, IMAGES = Leaf("steps"), Leaf("matrices"), Leaf("images")
VOLUMES, WAVES, BOXES = Leaf("volumes"), Leaf("waves"), Leaf("boxes")
INTS, LONGS, LABELS = Leaf("ints"), Leaf("longs"), Leaf("labels")
BOOLS, BYTES, TOKENS = Leaf("bools"), Leaf("bytes"), Leaf("tokens")
STRINGS, WORDS, RAGGED = Leaf("strings"), Leaf("words"), Leaf("ragged")
SPARSE, COMPLEX = Leaf("sparse"), Leaf("complex")
SPARSE_LONGS = Leaf("sparse longs")
SPECTRA = Leaf("complex images")
_SEED = (1, 2)
_TWICE = Given(lambda x: x * 2, FLOATS)
_ADDED = Given(lambda a, b: a + b, FLOATS)
_PAIR = Given([FLOATS, FLOATS])
_PAIRS = Given((FLOATS, FLOATS), (COLUMN, COLUMN))
_PAIR_OF_SPARSE = Given([SPARSE, SPARSE])
_PAIR_OF_RAGGED = Given([RAGGED, RAGGED])
_PARTS = Given(FLOATS, 2, 1)
_LOOP = Given(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (0, FLOATS))
_WINDOW = Given(8)
_POOLED = Given(IMAGES, 2, 2, "VALID")
_POOLED1 = Given(STEPS, 2, 2, "VALID")
_POOLED3 = Given(VOLUMES, 2, 2, "VALID")
_SAMPLED = Given(LONGS, 4, 3, True, 9)
_SAMPLED_LOSS = Given(weights(9, 4), weights(9), LONGS, FLOATS, 3, 9, 4)
_HISTOGRAM = Given(FLOATS, [0.1, 0.5, 0.9])
_SEGMENTS = Given(FLOATS, LABELS, 3)
_SPARSE_SEGMENTS = Given(weights(3, 4), LABELS, LABELS)
_FFT = Given((FLOATS, FLOATS)), Given((IMAGES, IMAGES)), Given((STEPS, STEPS))
_FFTN = Given(SPECTRA, [8, 8], [1, 2])
_BOX = Given(IMAGES, 1, 1, 4, 4)
_CHOSEN = Given(weights(5, 4), weights(5), 3)
_LU = Given(MATRICES, TOKENS)
_ENCODED = Given(STRINGS, "UTF-8")
_CTC = Given(TOKENS, STEPS, LABELS, LABELS)
CALLS = {
    "keras.ops.adaptive_average_pool": [Given(IMAGES, 2)],
    "keras.ops.adaptive_max_pool": [Given(IMAGES, 2)],
    "keras.ops.arange": [Given(5)],
    "keras.ops.array_split": [_PARTS],
    "keras.ops.associative_scan": [Given(lambda a, b: a + b, weights(4, 2))],
    "keras.ops.average_pool": [Given(x, 2) for x in (STEPS, IMAGES, VOLUMES)],
    "keras.ops.bartlett": [_WINDOW],
    "keras.ops.blackman": [_WINDOW],
    "keras.ops.concatenate": [_PAIR],
    "keras.ops.cond": [Given(True, lambda: 1.0, lambda: 2.0)],
    "keras.ops.conv": [
        Given(IMAGES, weights(2, 2, 3, 2)),
        Given(STEPS, weights(2, 4, 2)),
        Given(VOLUMES, weights(2, 2, 2, 3, 2)),
    ],
    "keras.ops.conv_transpose": [Given(IMAGES, weights(2, 2, 4, 3))],
    "keras.ops.corrcoef": [Given(weights(3, 4))],
    "keras.ops.ctc_decode": [Given(STEPS, LABELS)],
    "keras.ops.ctc_loss": [_CTC],
    "keras.ops.depth_to_space": [Given(weights(2, 4, 4, 4), 2)],
    "keras.ops.depthwise_conv": [Given(IMAGES, weights(2, 2, 3, 2))],
    "keras.ops.digitize": [_HISTOGRAM],
    "keras.ops.dsplit": [Given(IMAGES, 2)],
    "keras.ops.dstack": [_PAIR],
    "keras.ops.einsum": [
        Given("ij,jk->ik", FLOATS, weights(4, 2)),
        Given("ij,ij->i", FLOATS, FLOATS),
    ],
    "keras.ops.extract_sequences": [Given(WAVES, 8, 4)],
    "keras.ops.eye": [Given(3)],
    "keras.ops.fft": _FFT,
    "keras.ops.fft2": _FFT[1:],
    "keras.ops.fold": [Given(weights(2, 4, 4), 2, 1)],
    "keras.ops.fori_loop": [Given(0, 3, lambda i, x: x * 2, FLOATS)],
    "keras.ops.gcd": [Given(np.int32([4, 6]), np.int32([2, 3]))],
    "keras.ops.hamming": [_WINDOW],
    "keras.ops.hanning": [_WINDOW],
    "keras.ops.hsplit": [Given(FLOATS, 2)],
    "keras.ops.hstack": [_PAIR],
    "keras.ops.identity": [_WINDOW],
    "keras.ops.ifft2": _FFT[1:],
    "keras.ops.in_top_k": [Given(LABELS, FLOATS, 2)],
    "keras.ops.irfft": _FFT,
    "keras.ops.isin": [Given(INTS, [1, 2])],
    "keras.ops.istft": [Given((STEPS, STEPS), 6, 2, 6)],
    "keras.ops.kaiser": [Given(8, 1.0)],
    "keras.ops.kron": [Given(weights(2, 2), weights(2, 2))],
    "keras.ops.lcm": [Given(np.int32([4, 6]), np.int32([2, 3]))],
    "keras.ops.lstsq": [Given(weights(4, 4), weights(4, 2))],
    "keras.ops.lu_factor": [Given(weights(3, 3))],
    "keras.ops.map": [_TWICE],
    "keras.ops.max_pool": [Given(x, 2) for x in (STEPS, IMAGES, VOLUMES)],
    "keras.ops.moments": [Given(FLOATS, 0), Given(FLOATS, 1)],
    "keras.ops.moveaxis": [Given(IMAGES, 1, 2)],
    "keras.ops.multi_hot": [Given(INTS, num_classes=3)],
    "keras.ops.one_hot": [Given(LABELS, 3), Given(INTS, 3)],
    "keras.ops.pad": [Given(FLOATS, ((0, 0), (1, 1)))],
    "keras.ops.rearrange": [Given(IMAGES, "b h w c -> b c h w")],
    "keras.ops.roll": [Given(FLOATS, 1, 1)],
    "keras.ops.scan": [
        Given(lambda c, x: (c + x, c), weights(4), FLOATS),
    ],
    "keras.ops.select": [Given([BOOLS], [FLOATS])],
    "keras.ops.separable_conv": [
        Given(IMAGES, weights(2, 2, 3, 1), weights(1, 1, 3, 2))
    ],
    "keras.ops.slice": [Given(weights(4, 4), (0, 1), (2, 2))],
    "keras.ops.slice_update": [Given(weights(4, 4), (0, 1), weights(1, 1))],
    "keras.ops.scatter_update": [Given(weights(9, 4), [[0]], weights(1, 4))],
    "keras.ops.space_to_depth": [Given(IMAGES, 2)],
    "keras.ops.sparse_categorical_crossentropy": [Given(LABELS, FLOATS)],
    "keras.ops.split": [_PARTS, Given(FLOATS, 2, 0)],
    "keras.ops.stack": [_PAIR],
    "keras.ops.stft": [Given(WAVES, 16, 8, 16)],
    "keras.ops.switch": [
        Given(1, [lambda x: x, lambda x: x * 2], FLOATS),
    ],
    "keras.ops.tile": [Given(FLOATS, (1, 2))],
    "keras.ops.top_k": [Given(FLOATS, 2)],
    "keras.ops.tri": [Given(3)],
    "keras.ops.unfold": [Given(weights(2, 3, 8, 8), 2)],
    "keras.ops.unstack": [Given(FLOATS, axis=1)],
    "keras.ops.vectorize": [Given(lambda x: x * 2)],
    "keras.ops.vectorized_map": [_TWICE],
    "keras.ops.view_as_complex": [Given(weights(3, 2))],
    "keras.ops.vsplit": [Given(weights(4, 4), 2)],
    "keras.ops.vstack": [_PAIR],
    "keras.ops.while_loop": [_LOOP],
    "keras.random.categorical": [Given(FLOATS, 2)],
    "keras.random.dropout": [Given(FLOATS, 0.3)],
    "keras.random.randint": [Given((2, 3), 0, 5)],
    "tf.Assert": [Given(BOOLS, [FLOATS])],
    "tf.add_n": [_PAIR],
    "tf.approx_top_k": [Given(FLOATS, 2)],
    "tf.assert_rank": [Given(FLOATS, 2)],
    "tf.batch_to_space": [Given(weights(4, 2, 2, 1), [2, 2], [[0, 0]] * 2)],
    "tf.bitcast": [Given(INTS, tf.float32)],
    "tf.case": [
        Given([(tf.constant(True), lambda: 1.0)], default=lambda: 2.0),
    ],
    "tf.clip_by_global_norm": [Given([FLOATS], 1.0)],
    "tf.cond": [Given(tf.constant(True), lambda: 1.0, lambda: 2.0)],
    "tf.constant": [Given(1.0)],
    "tf.conv": [Given(IMAGES, weights(2, 2, 3, 2), [1] * 4, "VALID")],
    "tf.conv2d_backprop_filter_v2": [
        Given(IMAGES, weights(2, 2, 3, 3), IMAGES, [1] * 4, "SAME")
    ],
    "tf.conv2d_backprop_input_v2": [
        Given(IMAGES, weights(2, 2, 3, 3), IMAGES, [1] * 4, "SAME")
    ],
    "tf.dynamic_partition": [Given(FLOATS, LABELS, 2)],
    "tf.dynamic_stitch": [Given([[0, 1], [2]], [weights(2), weights(1)])],
    "tf.einsum": [
        Given("ij,jk->ik", FLOATS, weights(4, 2)),
        Given("ij,ij->i", FLOATS, FLOATS),
    ],
    "tf.ensure_shape": [Given(FLOATS, (None, 4))],
    "tf.extract_volume_patches": [
        Given(VOLUMES, [1, 2, 2, 2, 1], [1] * 5, "VALID")
    ],
    "tf.eye": [Given(3), Given(3, batch_shape=[2])],
    "tf.fftnd": [_FFTN],
    "tf.fill": [Given([2, 3], 1.0)],
    "tf.foldl": [_ADDED],
    "tf.foldr": [_ADDED],
    "tf.identity_n": [_PAIR],
    "tf.ifftnd": [_FFTN],
    "tf.irfftnd": [_FFTN],
    "tf.linspace": [Given(0.0, 1.0, 5)],
    "tf.map_fn": [_TWICE, Given(lambda x: x * 2, RAGGED)],
    "tf.numpy_function": [Given(np.abs, [FLOATS], tf.float32)],
    "tf.pad": [
        Given(FLOATS, [[0, 0], [1, 1]], mode)
        for mode in ("CONSTANT", "REFLECT", "SYMMETRIC")
    ],
    "tf.parallel_stack": [Given([weights(2), weights(2)])],
    "tf.print": [Given(FLOATS)],
    "tf.py_function": [Given(lambda x: x * 2, [FLOATS], tf.float32)],
    "tf.ragged_fill_empty_rows": [
        Given(np.int64([0]), weights(1), np.int64(2), 0.0)
    ],
    "tf.ragged_fill_empty_rows_grad": [Given(np.int64([0]), weights(1))],
    "tf.random_index_shuffle": [Given(LABELS, [1, 2, 3], 9)],
    "tf.range": [Given(5)],
    "tf.repeat": [Given(FLOATS, 2, 0), Given(FLOATS, 2, 1)],
    "tf.required_space_to_batch_paddings": [Given([4, 4], [2, 2])],
    "tf.reverse": [Given(FLOATS, [1]), Given(FLOATS, [0])],
    "tf.reverse_sequence": [Given(FLOATS, LABELS, 1, 0)],
    "tf.rfftnd": [Given(IMAGES, [8, 8], [1, 2])],
    "tf.roll": [Given(FLOATS, 1, 1)],
    "tf.scalar_mul": [Given(2.0, FLOATS)],
    "tf.scan": [_ADDED],
    "tf.scatter_nd": [Given(INTS, VECTOR, [9, 9, 9, 9])],
    "tf.sequence_mask": [Given(LABELS, 4), Given(LABELS)],
    "tf.shape_n": [_PAIR],
    "tf.slice": [Given(FLOATS, [0, 1], [-1, 2])],
    "tf.space_to_batch": [Given(IMAGES, [2, 2], [[0, 0]] * 2)],
    "tf.space_to_batch_nd": [Given(IMAGES, [2, 2], [[0, 0]] * 2)],
    "tf.split": [_PARTS, Given(FLOATS, [1, 3], 1)],
    "tf.strided_slice": [Given(FLOATS, [0, 1], [2, 3])],
    "tf.switch_case": [Given(tf.constant(1), [lambda: 1.0, lambda: 2.0])],
    "tf.tensor_scatter_nd_add": [
        Given(weights(9), np.int32([[0]]), weights(1))
    ],
    "tf.tensordot": [Given(STEPS, weights(4, 2), 1), Given(FLOATS, FLOATS, 2)],
    "tf.tile": [Given(FLOATS, [1, 2]), Given(FLOATS, [2, 1])],
    "tf.tuple": [_PAIR],
    "tf.unstack": [Given(FLOATS, axis=1)],
    "tf.vectorized_map": [_TWICE],
    "tf.while_loop": [_LOOP],
    "tf.math.accumulate_n": [_PAIR],
    "tf.math.approx_max_k": [Given(FLOATS, 2)],
    "tf.math.approx_min_k": [Given(FLOATS, 2)],
    "tf.math.in_top_k": [Given(LABELS, FLOATS, 2)],
    "tf.math.polyval": [Given([2.0, 1.0], FLOATS)],
    "tf.math.sobol_sample": [Given(2, 3)],
    **{
        f"tf.math.unsorted_segment_{name}": [_SEGMENTS]
        for name in ("max", "mean", "min", "prod", "sqrt_n", "sum")
    },
    "tf.linalg.eigh_tridiagonal": [Given(weights(4), weights(3))],
    "tf.linalg.global_norm": [_PAIR],
    "tf.linalg.lu_matrix_inverse": [Given(weights(3, 3), [0, 1, 2])],
    "tf.linalg.lu_reconstruct": [Given(weights(3, 3), [0, 1, 2])],
    "tf.linalg.lu_solve": [Given(weights(3, 3), [0, 1, 2], weights(3, 1))],
    "tf.linalg.set_diag": [Given(MATRICES, FLOATS)],
    "tf.nn.all_candidate_sampler": [Given(LONGS, 4, 3, True)],
    "tf.nn.atrous_conv2d": [Given(IMAGES, weights(2, 2, 3, 2), 2, "SAME")],
    "tf.nn.atrous_conv2d_transpose": [
        Given(IMAGES, weights(2, 2, 2, 3), (2, 10, 10, 2), 2, "VALID")
    ],
    "tf.nn.avg_pool": [_POOLED],
    "tf.nn.avg_pool1d": [_POOLED1],
    "tf.nn.avg_pool2d": [_POOLED],
    "tf.nn.avg_pool3d": [_POOLED3],
    "tf.nn.batch_norm_with_global_normalization": [
        Given(IMAGES, *[weights(3)] * 4, 0.1, True)
    ],
    "tf.nn.bias_add": [Given(FLOATS, weights(4)), Given(IMAGES, weights(3))],
    "tf.nn.conv1d": [Given(STEPS, weights(2, 4, 3), 1, "SAME")],
    "tf.nn.conv1d_transpose": [Given(STEPS, weights(2, 3, 4), (2, 6, 3), 1)],
    "tf.nn.conv2d_transpose": [
        Given(IMAGES, weights(2, 2, 2, 3), (2, 8, 8, 2), 1)
    ],
    "tf.nn.conv3d_transpose": [
        Given(VOLUMES, weights(2, 2, 2, 2, 3), (2, 4, 4, 4, 2), 1)
    ],
    "tf.nn.conv_transpose": [
        Given(IMAGES, weights(2, 2, 2, 3), (2, 8, 8, 2), 1)
    ],
    "tf.nn.conv2d": [Given(IMAGES, weights(2, 2, 3, 2), 1, "SAME")],
    "tf.nn.conv3d": [Given(VOLUMES, weights(2, 2, 2, 3, 2), [1] * 5, "SAME")],
    "tf.nn.convolution": [Given(IMAGES, weights(2, 2, 3, 2))],
    "tf.nn.crelu": [Given(FLOATS)],
    "tf.nn.ctc_beam_search_decoder": [Given(STEPS, LABELS)],
    "tf.nn.ctc_greedy_decoder": [Given(STEPS, LABELS)],
    "tf.nn.ctc_loss": [Given(TOKENS, STEPS, LABELS, LABELS)],
    "tf.nn.depth_to_space": [Given(weights(2, 4, 4, 4), 2)],
    "tf.nn.depthwise_conv2d": [
        Given(IMAGES, weights(2, 2, 3, 2), [1] * 4, "SAME")
    ],
    "tf.nn.depthwise_conv2d_backprop_filter": [
        Given(IMAGES, [2, 2, 3, 1], IMAGES, [1] * 4, "SAME")
    ],
    "tf.nn.depthwise_conv2d_backprop_input": [
        Given([2, 8, 8, 3], weights(2, 2, 3, 1), IMAGES, [1] * 4, "SAME")
    ],
    "tf.nn.dilation2d": [
        Given(IMAGES, weights(2, 2, 3), [1] * 4, "SAME", "NHWC", [1] * 4)
    ],
    "tf.nn.dropout": [Given(FLOATS, 0.3)],
    "tf.nn.embedding_lookup": [Given(weights(9, 4), INTS)],
    "tf.nn.embedding_lookup_sparse": [
        Given(weights(9, 4), SPARSE_LONGS, None, combiner=combiner)
        for combiner in ("sum", "mean", "sqrtn")
    ],
    "tf.nn.safe_embedding_lookup_sparse": [Given(weights(9, 4), SPARSE_LONGS)],
    "tf.nn.erosion2d": [
        Given(IMAGES, weights(2, 2, 3), [1] * 4, "SAME", "NHWC", [1] * 4)
    ],
    "tf.nn.fixed_unigram_candidate_sampler": [
        Given(LONGS, 4, 3, True, 9, unigrams=[0.1] * 9)
    ],
    "tf.nn.fractional_avg_pool": [Given(IMAGES, [1.0, 1.4, 1.4, 1.0])],
    "tf.nn.fractional_max_pool": [Given(IMAGES, [1.0, 1.4, 1.4, 1.0])],
    "tf.nn.learned_unigram_candidate_sampler": [_SAMPLED],
    "tf.nn.max_pool": [_POOLED],
    "tf.nn.max_pool1d": [_POOLED1],
    "tf.nn.max_pool2d": [_POOLED],
    "tf.nn.max_pool3d": [_POOLED3],
    "tf.nn.max_pool_with_argmax": [_POOLED],
    "tf.nn.moments": [Given(FLOATS, [0]), Given(FLOATS, [1])],
    "tf.nn.nce_loss": [_SAMPLED_LOSS],
    "tf.nn.pool": [Given(IMAGES, [2, 2], "AVG", [2, 2], "VALID")],
    "tf.nn.sampled_softmax_loss": [_SAMPLED_LOSS],
    "tf.nn.separable_conv2d": [
        Given(IMAGES, weights(2, 2, 3, 1), weights(1, 1, 3, 2), [1] * 4, "SAME")
    ],
    "tf.nn.sigmoid_cross_entropy_with_logits": [Given(FLOATS, FLOATS)],
    "tf.nn.space_to_depth": [Given(IMAGES, 2)],
    "tf.nn.sparse_softmax_cross_entropy_with_logits": [Given(LABELS, FLOATS)],
    "tf.nn.sufficient_statistics": [Given(FLOATS, [0])],
    "tf.nn.weighted_moments": [Given(FLOATS, [0], FLOATS)],
    "tf.image.adjust_contrast": [Given(IMAGES, 0.5)],
    "tf.image.central_crop": [Given(IMAGES, 0.5)],
    "tf.image.adjust_jpeg_quality": [Given(weights(4, 4, 3), 50)],
    "tf.image.random_jpeg_quality": [Given(weights(4, 4, 3), 40, 60)],
    "tf.image.stateless_random_jpeg_quality": [
        Given(weights(4, 4, 3), 40, 60, _SEED)
    ],
    "tf.image.combined_non_max_suppression": [
        Given(weights(1, 5, 1, 4), weights(1, 5, 2), 2, 3)
    ],
    "tf.image.non_max_suppression_overlaps": [
        Given(weights(5, 5), weights(5), 3)
    ],
    "tf.image.non_max_suppression_padded": [
        Given(weights(5, 4), weights(5), 3)
    ],
    "tf.image.sample_distorted_bounding_box": [
        Given([8, 8, 3], weights(1, 1, 4))
    ],
    "tf.image.stateless_sample_distorted_bounding_box": [
        Given([8, 8, 3], weights(1, 1, 4), _SEED)
    ],
    "tf.image.crop_and_resize": [
        Given(IMAGES, weights(2, 4), np.int32([0, 1]), (4, 4))
    ],
    "tf.image.crop_to_bounding_box": [_BOX],
    "tf.image.decode_and_crop_jpeg": [Given("", [0, 0, 1, 1])],
    **{
        f"tf.image.{name}": [Given("")]
        for name in (
            *("decode_bmp", "decode_gif", "decode_image", "decode_jpeg"),
            *("decode_png", "decode_jxl", "decode_webp", "extract_jpeg_shape"),
        )
    },
    "tf.image.encode_jpeg": [Given(np.zeros((4, 4, 3), "uint8"))],
    "tf.image.encode_png": [Given(np.zeros((4, 4, 3), "uint8"))],
    "tf.image.extract_glimpse": [Given(IMAGES, [2, 2], weights(1, 2))],
    "tf.image.extract_patches": [
        Given(IMAGES, [1, 2, 2, 1], [1] * 4, [1] * 4, "VALID")
    ],
    "tf.image.grayscale_to_rgb": [Given(weights(2, 4, 4, 1))],
    "tf.image.non_max_suppression": [_CHOSEN],
    "tf.image.non_max_suppression_with_scores": [_CHOSEN],
    "tf.image.pad_to_bounding_box": [Given(IMAGES, 1, 1, 10, 10)],
    "tf.image.random_brightness": [Given(IMAGES, 0.2)],
    "tf.image.random_contrast": [Given(IMAGES, 0.2, 0.5)],
    "tf.image.random_hue": [Given(IMAGES, 0.2)],
    "tf.image.random_saturation": [Given(IMAGES, 0.2, 0.5)],
    "tf.image.resize": [
        Given(IMAGES, (4, 4), method)
        for method in ("area", "bicubic", "bilinear", "nearest", "lanczos3")
    ],
    "tf.image.resize_with_crop_or_pad": [Given(IMAGES, 9, 5)],
    "tf.image.resize_with_pad": [Given(IMAGES, 9, 5)],
    "tf.image.ssim": [Given(IMAGES, IMAGES, 1.0, filter_size=3)],
    "tf.image.ssim_multiscale": [
        Given(*[weights(1, 96, 96, 1)] * 2, 1.0, filter_size=3)
    ],
    "tf.image.stateless_random_brightness": [Given(IMAGES, 0.2, _SEED)],
    "tf.image.stateless_random_contrast": [Given(IMAGES, 0.2, 0.5, _SEED)],
    "tf.image.stateless_random_flip_left_right": [Given(IMAGES, _SEED)],
    "tf.image.stateless_random_flip_up_down": [Given(IMAGES, _SEED)],
    "tf.image.stateless_random_crop": [Given(IMAGES, (2, 4, 4, 3), _SEED)],
    "tf.image.stateless_random_hue": [Given(IMAGES, 0.2, _SEED)],
    "tf.image.stateless_random_saturation": [Given(IMAGES, 0.2, 0.5, _SEED)],
    "tf.sparse.concat": [Given(0, [SPARSE, SPARSE])],
    "tf.sparse.cross": [_PAIR_OF_SPARSE],
    "tf.sparse.cross_hashed": [_PAIR_OF_SPARSE],
    "tf.sparse.eye": [Given(3)],
    "tf.sparse.fill_empty_rows": [Given(SPARSE, 0.0)],
    "tf.sparse.map_values": [Given(tf.abs, SPARSE)],
    "tf.sparse.segment_mean": [_SPARSE_SEGMENTS],
    "tf.sparse.segment_sqrt_n": [_SPARSE_SEGMENTS],
    "tf.sparse.segment_sum": [_SPARSE_SEGMENTS],
    "tf.sparse.slice": [Given(SPARSE, [0, 0], [2, 2])],
    "tf.sparse.sparse_dense_matmul": [Given(SPARSE, weights(2, 3))],
    "tf.sparse.to_indicator": [Given(SPARSE_LONGS, 5)],
    "tf.sparse.split": [Given(SPARSE, 2, 1)],
    "tf.ragged.constant": [Given([[1], [2, 3]])],
    "tf.ragged.cross": [_PAIR_OF_RAGGED],
    "tf.ragged.cross_hashed": [_PAIR_OF_RAGGED],
    "tf.ragged.map_flat_values": [Given(tf.abs, RAGGED)],
    "tf.ragged.stack": [_PAIR_OF_RAGGED],
    "tf.ragged.stack_dynamic_partitions": [Given(FLOATS, LABELS, 2)],
    "tf.signal.frame": [Given(WAVES, 8, 4)],
    "tf.signal.hamming_window": [_WINDOW],
    "tf.signal.hann_window": [_WINDOW],
    "tf.signal.inverse_stft": [Given(SPECTRA, 14, 4)],
    "tf.signal.irfftnd": [Given(SPECTRA)],
    "tf.signal.kaiser_bessel_derived_window": [_WINDOW],
    "tf.signal.kaiser_window": [_WINDOW],
    "tf.signal.mdct": [Given(WAVES, 8)],
    "tf.signal.overlap_and_add": [Given(STEPS, 2)],
    "tf.signal.stft": [Given(WAVES, 16, 8)],
    "tf.signal.vorbis_window": [_WINDOW],
    "tf.strings.format": [Given("{}", FLOATS)],
    "tf.strings.join": [Given([STRINGS, STRINGS])],
    "tf.strings.ngrams": [Given(WORDS, 2)],
    "tf.strings.reduce_join": [Given(WORDS, 1)],
    "tf.strings.regex_full_match": [Given(STRINGS, "a")],
    "tf.strings.regex_replace": [Given(STRINGS, "a", "b")],
    "tf.strings.split": [Given(STRINGS), Given(WORDS)],
    "tf.strings.substr": [Given(STRINGS, 0, 1)],
    "tf.strings.to_hash_bucket": [Given(STRINGS, 5)],
    "tf.strings.to_hash_bucket_fast": [Given(STRINGS, 5)],
    "tf.strings.to_hash_bucket_strong": [Given(STRINGS, 5, [1, 2])],
    "tf.strings.unicode_decode": [_ENCODED],
    "tf.strings.unicode_decode_with_offsets": [_ENCODED],
    "tf.strings.unicode_encode": [Given(INTS, "UTF-8")],
    "tf.strings.unicode_split": [_ENCODED],
    "tf.strings.unicode_split_with_offsets": [_ENCODED],
    "tf.strings.unicode_transcode": [Given(STRINGS, "UTF-8", "UTF-16-BE")],
    "tf.strings.unsorted_segment_join": [Given(STRINGS, LABELS, 3)],
    "tf.random.categorical": [Given(FLOATS, 2)],
    "tf.random.fixed_unigram_candidate_sampler": [
        Given(LONGS, 4, 3, True, 9, unigrams=[0.1] * 9)
    ],
    "tf.random.fold_in": [Given(tf.constant([1, 2]), 3)],
    "tf.random.log_uniform_candidate_sampler": [_SAMPLED],
    "tf.random.stateless_categorical": [Given(FLOATS, 2, _SEED)],
    "tf.random.stateless_gamma": [Given((3,), _SEED, 1.0)],
    "tf.random.uniform_candidate_sampler": [_SAMPLED],
}
"""Functions of which no guess does, and what is given to them."""
NO_OPERATIONS = {
    *("keras.activations.deserialize", "keras.activations.get"),
    *("keras.activations.serialize", "keras.ops.convert_to_numpy"),
    *("tf.as_dtype", "tf.broadcast_static_shape", "tf.control_dependencies"),
    *("tf.custom_gradient", "tf.device", "tf.executing_eagerly"),
    *("tf.function", "tf.get_current_name_scope", "tf.get_logger"),
    *("tf.get_static_value", "tf.grad_pass_through", "tf.gradients"),
    *("tf.hessians", "keras.ops.jvp"),
    *("tf.import_graph_def", "tf.init_scope", "tf.inside_function"),
    *("tf.is_symbolic_tensor", "tf.is_tensor", "tf.load_library"),
    *("tf.load_op_library", "tf.make_ndarray", "tf.make_tensor_proto"),
    *("tf.no_gradient", "tf.nondifferentiable_batch_function"),
    *("tf.recompute_grad", "tf.register_tensor_conversion_function"),
    *("tf.type_spec_from_value", "tf.variable_creator_scope"),
    *("tf.nn.scale_regularization_loss", "tf.random.create_rng_state"),
    *("tf.random.get_global_generator", "tf.random.set_global_generator"),
    *("tf.random.set_seed",),
}
"""Functions that compute nothing, or only what functions given to them do."""
