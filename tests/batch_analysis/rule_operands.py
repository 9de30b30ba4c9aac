"""Tensors of each kind, made of the leaves of a batch, and their numbers."""

import itertools
import math
import zlib

import numpy as np
import tensorflow as tf

from keras_conflux._batch_analysis.analysis import KindInference
from keras_conflux._batch_analysis.kinds import COUNT
from keras_conflux._batch_analysis.kinds import COUNTED
from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import OPAQUE
from keras_conflux._batch_analysis.kinds import RANDOM
from keras_conflux._batch_analysis.kinds import ROW_SPLITS
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import rows
from keras_conflux._batch_analysis.kinds import shape as kind_of_shape

SIZES = (2, 1, 4, 0)
"""Of the parts. The last one is a stand-in: it runs on a copy of a sample."""
BATCH = sum(SIZES)
ROW_FORMS = (
    *("rows", "pairs", "some", "mixed", "mixed pairs", "joined", "divided"),
)
STATISTICS = ("equal", "random", "total", "counted", "mean", "count", "derived")
SHAPES = ("shape", "shape of pairs", "shape of some")
FORMS = (*ROW_FORMS, *STATISTICS)
OTHERS = (
    *("opaque", "long opaque", "long derived"),
    *("sizes", "two sizes", "counts", "positions"),
)
"""What inputs may be that are given to rules which do not accept them."""
FEW = ("rows", "some", "mixed", "joined", "divided", "equal", "total")
LENGTHS = {
    **{"pairs": "pairs", "mixed pairs": "pairs"},
    **{form: form for form in ("some", "joined")},
    **{"shape of pairs": "pairs", "shape of some": "some"},
    "positions": "positions",
}
"""Which forms have as many rows as others; the rest has one per sample."""


def _with_holes(rng, shape):
    drawn = rng.normal(size=shape)
    return np.where(drawn > 0.4, np.inf, np.where(drawn < -0.4, np.nan, drawn))


_WORDS = np.array(["a", "Bc", " d e ", "1.5", "ff"], object)
_LETTERS = np.array([50, 65, 945, 1078], "int32")
"""Of several alphabets."""


def _matrices(rng, shape):
    drawn = rng.normal(size=shape)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return drawn
    return drawn @ np.swapaxes(drawn, -1, -2) + np.eye(shape[-1])


def _complex(rng, shape):
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


DOMAINS = {
    "real": lambda rng, shape: rng.normal(size=shape),
    "real32": lambda rng, shape: rng.normal(size=shape).astype("float32"),
    "unit": lambda rng, shape: rng.uniform(0.1, 0.9, size=shape),
    "unit32": lambda rng, s: rng.uniform(0.1, 0.9, size=s).astype("float32"),
    "large": lambda rng, shape: rng.uniform(1.1, 3, size=shape),
    "int": lambda rng, shape: rng.integers(0, 3, size=shape, dtype="int32"),
    "digit": lambda rng, s: rng.integers(1, 3, size=s, dtype="int32"),
    "digit64": lambda rng, s: rng.integers(1, 4, size=s).astype("float64"),
    "keep": lambda rng, shape: np.array([1, 0, 0, 1, 1, 0, 1]) > 0,
    "zero": lambda rng, shape: np.zeros(shape, "int32"),
    "one32": lambda rng, shape: np.ones(shape, "float32"),
    "holes": _with_holes,
    "key": lambda rng, s: rng.integers(0, 99, size=s, dtype="uint64"),
    "long": lambda rng, shape: rng.integers(0, 3, size=shape, dtype="int64"),
    "letter": lambda rng, s: rng.choice([65, 945, 1073, 1488], s).astype("i4"),
    "bits": lambda rng, shape: rng.integers(1, 9, size=shape, dtype="int32"),
    "bool": lambda rng, shape: rng.integers(0, 2, size=shape) > 0,
    "string": lambda rng, shape: rng.choice(_WORDS, size=shape).astype(object),
    "number": lambda rng, s: rng.choice(["1", "2.5", "-3"], s).astype(object),
    "text": lambda rng, s: rng.choice(_WORDS * 40, s).astype(object),
    "base64": lambda rng, s: rng.choice(["YQ", "Yg", "Yw"], s).astype(object),
    "complex": _complex,
    "complex64": lambda rng, shape: _complex(rng, shape).astype("complex64"),
    "matrix": _matrices,
    "complex matrix": lambda rng, s: _matrices(rng, s).astype("complex128"),
}
_SMALL = ("unit", "unit32", "large")
"""Whose sums would leave the domain."""


class Operands:
    """Makes tensors of each form in a graph, and knows what to feed."""

    def __init__(self):
        self.graph = tf.__internal__.FuncGraph("rules")
        self.kinds = KindInference([], [], [])
        self.feeds = [{} for _ in (*SIZES, BATCH)]
        self.own_draws = [{} for _ in (*SIZES, BATCH)]
        """Of what is RANDOM: others for each part, as replicas may draw."""
        self._made = {}

    def __call__(self, form, domain, shape, slot=0):
        """Returns a tensor, or `None` where there is none.

        Args:
            form: One of those above.
            domain: A name in `DOMAINS`.
            shape: Where `None` is the axis of the samples.
            slot: Other slots have other values.
        """
        key = form, domain, shape, slot
        if key not in self._made:
            with self.graph.as_default():
                self._made[key] = self._make(*key)
        return self._made[key]

    def _make(self, form, domain, shape, slot):
        if form in SHAPES:
            value = self({"shape": "rows"}.get(form, form[9:]), domain, shape)
            return tf.shape(value)
        if form == "places":
            return tf.where(self._keep())
        if form in OTHERS:
            return self._of_others(form, domain, shape, slot)
        if form in (*ROW_FORMS, "triples"):
            if None not in shape:
                return None
            return self._rows(form, domain, shape, slot)
        return self._statistic(form, domain, shape, slot)

    def _keep(self):
        return self.leaf("keep", ())

    def leaf(self, domain, others, per_sample=1, slot=0):
        """Returns a leaf of the batch: a tensor of a row, or more, a sample."""
        key = "leaf", domain, others, per_sample, slot
        if key in self._made:
            return self._made[key]
        values = _drawn(domain, (BATCH * per_sample, *others), key)
        ends = np.cumsum(SIZES[:-1]) * per_sample
        parts = np.split(values, ends)
        parts[-1] = values[:per_sample]
        with self.graph.as_default():
            leaf = _placeholder(values, (None, *others))
        self._feed(leaf, [*parts, values])
        kind = rows(0)
        each = Entries.ONE if per_sample == 1 else Entries.SAME
        self.kinds.mark(leaf, kind.with_entries(each))
        self._made[key] = leaf
        return leaf

    def ragged(self):
        """Returns the values of a ragged leaf, and where samples begin."""
        if "ragged" not in self._made:
            rng = np.random.default_rng(0)
            lengths = rng.integers(0, 4, BATCH)
            ends = np.cumsum([0, *lengths])
            samples = np.cumsum([0, *SIZES[:-1]])
            parts = [(a, a + n) for a, n in zip(samples, SIZES, strict=True)]
            parts[-1] = 0, 1
            values = rng.normal(size=ends[-1])
            with self.graph.as_default():
                flat = tf.compat.v1.placeholder(tf.float64, [None])
                splits = tf.compat.v1.placeholder(tf.int64, [None])
                self.kinds.mark(flat, rows(0, regular=False))
                self.kinds.mark(splits, ROW_SPLITS)
            spans = [*parts, (0, BATCH)]
            self._feed(flat, [values[ends[a] : ends[b]] for a, b in spans])
            self._feed(splits, [ends[a : b + 1] - ends[a] for a, b in spans])
            self._made["ragged"] = flat, splits
        return self._made["ragged"]

    def chosen_draws(self):
        """Returns numbers of which each replica draws how many there are."""
        if "chosen" not in self._made:
            with self.graph.as_default():
                drawn = tf.compat.v1.placeholder(tf.float64, [None, 2])
            self.kinds.mark(drawn, RANDOM)
            sizes = range(1, len(self.feeds) + 1)
            self._feed(drawn, [np.ones((size, 2)) for size in sizes])
            self._made["chosen"] = drawn
        return self._made["chosen"]

    def _feed(self, tensor, values):
        for feed, value in zip(self.feeds, values, strict=True):
            feed[tensor.name] = value

    def _rows(self, form, domain, shape, slot):
        axis = shape.index(None)
        if form == "some":
            places = tf.squeeze(self("places", "unit", ()), [1])
            return tf.gather(
                self("rows", domain, shape, slot), places, axis=axis
            )
        if form.startswith("mixed"):
            plain = {"mixed": "rows"}.get(form, form[6:])
            return tf.reverse(self(plain, domain, shape, slot), [axis])
        if form == "joined":
            parts = [self(x, domain, shape, slot) for x in ("rows", "triples")]
            return tf.concat(parts, axis)
        if form == "divided":
            x = self("rows", domain, shape, slot)
            count = self("count", domain, shape, slot)
            return None if count is None or _is_whole(x) else x / count
        others = shape[:axis] + shape[axis + 1 :]
        each = {"pairs": 2, "triples": 3}.get(form, 1)
        leaf = self.leaf(domain, others, each, slot)
        return _with_samples_at(leaf, axis)

    def _statistic(self, form, domain, shape, slot):
        static = tuple(1 if size is None else size for size in shape)
        key = form, domain, static, slot
        if form == "equal":
            return tf.constant(_drawn(domain, static, key))
        if form in ("random", "counted"):
            return self._marked(form, domain, static, key)
        if domain in ("bool", "string", "text", "number", "base64", "key"):
            return self._of_no_numbers(form, domain, static, slot)
        leaf = self.leaf(domain, static, slot=slot)
        if form == "count":
            count = tf.cast(tf.shape(leaf)[0] * (slot + 1), leaf.dtype)
            return count * 0.1 if domain in _SMALL else count
        if form == "mean":
            return None if _is_whole(leaf) else tf.reduce_mean(leaf, 0)
        if form == "derived" and not leaf.dtype.is_complex:
            return tf.reduce_max(leaf, 0)
        total = tf.reduce_sum(leaf, 0)
        if domain in _SMALL:
            total *= 0.1
        return tf.square(total) if form == "derived" else total

    def _marked(self, form, domain, static, key):
        value = _drawn(domain, static, key)
        values = [value] * len(self.feeds)
        if form == "counted":
            if value.dtype.kind in "Ob":
                return None
            values = [_drawn(domain, static, (key, i)) for i in SIZES]
            values.append(np.sum(values, 0).astype(value.dtype))
        own = [_drawn(domain, static, (key, i)) for i in SIZES]
        return self._given(
            RANDOM if form == "random" else COUNTED,
            values,
            [*own, own[0]] if form == "random" else None,
        )

    def _of_others(self, form, domain, shape, slot):
        key = form, domain, shape, slot
        length = 2 if form == "two sizes" else 1
        static = tuple(length if size is None else size for size in shape)
        if form == "opaque":
            values = [_drawn(domain, static, (key, i)) for i in (*SIZES, BATCH)]
            return self._given(OPAQUE, values)
        if form in ("long opaque", "long derived"):
            if None not in shape:
                return None
            kind = OPAQUE if form == "long opaque" else DERIVED
            lengths = [*SIZES[:-1], 1, 5]
            values = [
                _drawn(domain, [x if n is None else n for n in shape], key)
                for x in lengths
            ]
            return self._given(kind, values, open_axis=shape.index(None))
        value = _drawn(domain, static, key)
        if value.dtype.kind not in "iufc":
            return None
        value = value + np.ones_like(value)
        sizes = [*SIZES[:-1], 1, BATCH]
        if form == "counts":
            return self._given(
                COUNT, [value * np.array(size, value.dtype) for size in sizes]
            )
        if form in ("sizes", "two sizes"):
            if len(static) != 1 or value.dtype not in (np.int32, np.int64):
                return None
            return self._given(kind_of_shape(0), _with_sizes(value, sizes))
        if value.dtype.kind not in "ifc" or None not in shape:
            return None
        return self._positions(value.dtype, shape)

    def _positions(self, dtype, shape):
        """Returns positions of some samples, of at least one in each part."""
        kept = np.array([0, 2, 3, 4, 6])
        ends = np.cumsum([0, *SIZES[:-1]])
        spans = [*itertools.pairwise(ends), (0, 1), (0, BATCH)]
        axis = shape.index(None)
        others = [size for size in shape if size is not None]
        values = []
        for begin, end in spans:
            found = kept[(kept >= begin) & (kept < end)] - begin
            flat = np.full((len(found), max(math.prod(others), 1)), 9)
            flat[:, 0] = found
            rows_of = flat.reshape(len(found), *others).astype(dtype)
            values.append(np.moveaxis(rows_of, 0, axis))
        kind = Kind(Role.ROWS, axis, Entries.VARYING, are_positions=True)
        return self._given(kind, values)

    def instead_of(self, value, form, step):
        """Returns a tensor of a form where a call has a constant, or `None`.

        Args:
            value: The constant.
            form: Of the names above.
            step: What another value, which is as good, is larger by.
        """
        key = "instead of", value.tobytes(), str(value.dtype), form, step
        if key not in self._made:
            with self.graph.as_default():
                self._made[key] = self._instead_of(value, form, step)
        return self._made[key]

    def _instead_of(self, value, form, step):
        parts = len(SIZES)
        if value.dtype == object:
            other = value + "x" * abs(step)
        elif value.dtype == bool:
            other = ~value
        else:
            other = value + np.asarray(step).astype(value.dtype)
        if form in ("derived", "opaque"):
            kind = DERIVED if form == "derived" else OPAQUE
            return self._given(kind, [*[value] * parts, other])
        if form == "random":
            own = [value, *[other] * (parts - 1), value]
            return self._given(RANDOM, [value] * (parts + 1), own)
        if value.dtype.kind not in "iuf":
            return None
        if form in ("total", "counted"):
            kind = TOTAL if form == "total" else COUNTED
            if np.all(value):
                each = 3 if form == "total" else parts
                return self._given(kind, [*[value] * parts, value * each])
            rest = [np.zeros_like(value)] * (parts - 2)
            return self._given(kind, [value, other - value, *rest, other])
        if form == "mean" and value.dtype.kind == "f":
            values = [value + 0] * parts
            values[1] = value + (other - value) * BATCH
            return self._given(MEAN, [*values, other])
        sizes = [*SIZES[:-1], 1, BATCH]
        if form == "count":
            of_one = np.ones_like(value)
            return self._given(COUNT, [size * of_one for size in sizes])
        if form == "sizes" and value.ndim == 1 and value.dtype.itemsize >= 4:
            if value.dtype.kind != "i":
                return None
            return self._given(kind_of_shape(0), _with_sizes(value, sizes))
        if not value.ndim:
            return None
        if form == "positions":
            return self._positions(value.dtype, (None, *value.shape[1:]))
        return self._rows_instead_of(value, form, step)

    def _rows_instead_of(self, value, form, step):
        whole = np.resize(value, (BATCH, *value.shape[1:]))
        if step == -1:
            whole = np.cumsum(np.ones_like(whole), 0).astype(value.dtype) - 1
        values = np.split(whole, np.cumsum(SIZES[:-1]))
        values[-1] = whole[:1]
        values.append(whole)
        if form == "rows":
            return self._given(rows(0), values)
        if form == "joined":
            twice = [np.concatenate([each, each]) for each in values]
            return self._given(
                Kind(Role.ROWS, 0, Entries.SAME, blocks=2), twice
            )
        return None

    def _given(self, kind, values, own_draws=None, open_axis=None):
        """Returns a tensor of a kind that is given with its values."""
        shape = list(values[-1].shape)
        if kind.role is Role.ROWS:
            open_axis = kind.axis
        if open_axis is not None:
            shape[open_axis] = None
        tensor = _placeholder(values[-1], shape)
        self._feed(tensor, values)
        for feed, value in zip(self.own_draws, own_draws or [], strict=False):
            feed[tensor.name] = value
        self.kinds.mark(tensor, kind)
        return tensor

    def _of_no_numbers(self, form, domain, static, slot):
        if form != "derived" or domain in ("number", "base64", "key"):
            return None
        leaf = self.leaf(domain, static, slot=slot)
        if domain == "bool":
            return tf.reduce_any(leaf, 0)
        return tf.strings.reduce_join(leaf, 0)


def _with_sizes(value, sizes):
    """Returns shapes of which the first entry is a number of samples."""
    found = []
    for size in sizes:
        found.append(value.copy())
        found[-1][0] = size
    return found


def _is_whole(tensor):
    return not (tensor.dtype.is_floating or tensor.dtype.is_complex)


def _drawn(domain, shape, key):
    rng = np.random.default_rng(zlib.crc32(repr(key).encode()))
    return np.asarray(DOMAINS[domain](rng, shape))


def _placeholder(values, shape):
    dtype = tf.string if values.dtype == object else tf.as_dtype(values.dtype)
    return tf.compat.v1.placeholder(dtype, shape)


def _with_samples_at(leaf, axis):
    if not axis:
        return leaf
    rank = leaf.shape.rank
    order = [*range(1, axis + 1), 0, *range(axis + 1, rank)]
    return tf.transpose(leaf, order)
