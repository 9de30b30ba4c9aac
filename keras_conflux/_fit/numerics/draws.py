"""Draws the random numbers of one device: each replica draws its own rows.

The state of a seed generator is equal on all replicas, as they draw equally
often, so it is saved, restored and resumed as on one device. All replicas draw
by the same seeds, each the rows of its own samples. Numbers that are no rows of
samples, such as a fixed projection's, are the same on all.

Where the graph does not show whose numbers are drawn, the seeds of generators
are moved by the replica's rank, so that replicas do not repeat each other's
numbers.
"""

import contextlib
import re
from collections.abc import Callable
from collections.abc import Iterator
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from keras_conflux._batch_analysis import COUNT
from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import Kind
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import are_of_one_sample
from keras_conflux._batch_analysis import draws_shared_by_samples
from keras_conflux._common.trees import Tree
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._fit.numerics import counted_draws
from keras_conflux._fit.numerics import drawn_rows
from keras_conflux._fit.numerics.counted_draws import Sampler
from keras_conflux._fit.numerics.drawn_rows import DrawnRows
from keras_conflux._fit.numerics.drawn_rows import OfConstant
from keras_conflux._fit.numerics.drawn_rows import WrittenPlace
from keras_conflux._fit.numerics.drawn_rows import sizes_of
from keras_conflux._fit.numerics.exit import Exit
from keras_conflux._fit.numerics.exit import TraceFindings
from keras_conflux._fit.numerics.writes import not_recording
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import rank_as_tensor
from keras_conflux._replication.replica_context import replica_collectives
from keras_conflux._replication.replica_context import replica_index
from keras_conflux._replication.steps import Step

# Seeds count up from a seed of the user's; replicas must not meet each other's.
_STRIDE = 1_000_003


class Draws(Exit):
    """The random numbers that a step draws."""

    def __init__(self, step: Step) -> None:
        super().__init__(step)
        self._takes_rows: bool | None = None
        self._counted: str | None = None
        self._by_sample: frozenset[int] = frozenset()
        self.count = 0
        self._joined: dict[int, tuple[tf.Tensor, Kind]] = {}

    def draw_by_sample(self, multiples: frozenset[int]) -> None:
        """Notes the multiples of the samples' number that are rows of each.

        Args:
            multiples: Their numbers, in the order in which a step draws them.
        """
        self._by_sample = multiples

    @contextlib.contextmanager
    def again(self, count: int) -> Iterator[None]:
        """Marks a repetition of draws, which does not count.

        Args:
            count: The value of `count` before the first draw.
        """
        before, self.count = self.count, count
        try:
            yield
        finally:
            self.count = before

    def begin(self) -> None:
        """See `Exit`."""
        WrittenPlace.of(self.step).write()

    def end(self, output: Tree) -> Tree:
        """Warns of numbers that replicas draw apart. See `Exit`."""
        if replica_index() == 0 and replica_collectives().count > 1:
            step = self.step
            draws = draws_shared_by_samples(step.kinds)
            for number, draw in enumerate(draws):
                _warn_of_own_draw(number, draw, step)
        return output

    def report(self, findings: TraceFindings) -> None:
        """See `Exit`."""
        findings.counted = findings.counted or self._counted
        findings.by_sample.update(
            number
            for number, (drawn, kind) in self._joined.items()
            if are_of_one_sample(drawn, kind, self.step.kinds)
        )

    def draw(
        self,
        name: str,
        shape: Any,
        seed: Any,
        original: Callable[[], Any],
        of_rows: Callable[[DrawnRows], tf.Tensor],
        parameters: Sequence[Any] | None,
    ) -> Any:
        """Draws the numbers of one device, as far as the graph shows them.

        Args:
            name: The name of the function of `keras.random`.
            shape: The shape of the replica's draw.
            seed: A seed, as the function takes it.
            original: Draws as a replica that is alone.
            of_rows: Draws rows of one device's numbers.
            parameters: Parameters of the draw that may be rows of samples.
                `None` if the graph shows the inputs of the result.
        """
        kinds = {self.step.kinds.of(each) for each in parameters or ()}
        number = -1
        try:
            rows = drawn_rows.find(shape, not isinstance(seed, int), self.step)
            if COUNT in kinds:
                raise NotDerivable("a number of samples")
            if rows is not None and rows.is_multiple:
                number = self.count
                self.count += 1
                if number in self._by_sample or any(
                    kind.has_several_each for kind in kinds
                ):
                    rows = rows.by_sample()
            with self._taking_rows(True):
                drawn = original() if rows is None else of_rows(rows)
        except NotDerivable as reason:
            if isinstance(seed, int) and isinstance(reason, OfConstant):
                self._counted = "draws random numbers of an integer seed"
            else:
                _warn_of(name, self.step)
            with self._taking_rows(False):
                return original()
        if rows is not None and rows.is_multiple:
            self._joined.setdefault(number, (drawn, rows.kind))
        if (
            rows is not None
            and parameters is not None
            and all(_is_alike(kind, rows.kind) for kind in kinds)
        ):
            # The graph does not show that these are rows of the same samples.
            self.step.kinds.mark(drawn, rows.kind)
        return drawn

    @contextlib.contextmanager
    def _taking_rows(self, rows: bool) -> Iterator[None]:
        """Says, while `keras.random` draws, whether it draws rows by a seed."""
        before, self._takes_rows = self._takes_rows, rows
        try:
            yield
        finally:
            self._takes_rows = before

    def seeds_are_shared(self) -> bool:
        """Whether the next seed is equal on all replicas, as on one device."""
        if self._takes_rows is None:
            _warn_of_own_seeds(self.step)
        return bool(self._takes_rows)


def next_seed(
    original: Callable, generator: Any, *args: Any, **kwargs: Any
) -> Any:
    """Returns the next seed, moved by the rank unless rows are drawn by it."""
    with not_recording():
        seed = original(generator, *args, **kwargs)
    if not in_replica():
        return seed
    draws = _draws()
    if draws is not None and draws.seeds_are_shared():
        return seed
    with tensorflow_tracing.of_rank():
        rank = rank_as_tensor()
        if isinstance(rank, int) and rank == 0:
            moved = tf.identity(seed)
        else:
            rank = tf.cast(rank, seed.dtype)
            moved = seed + tf.stack([rank * _STRIDE, tf.zeros_like(rank)])
    if draws is not None:
        draws.step.kinds.mark_own([moved])
    return moved


def normal(
    original: Callable,
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> Any:
    """Draws the rows of `keras.random.normal`."""
    sampler = counted_draws.normal(dtype or keras.config.floatx())
    given = shape, mean, stddev, dtype, seed
    return _draw_around("normal", sampler, original, *given)


def truncated_normal(
    original: Callable,
    shape: Any,
    mean: Any = 0.0,
    stddev: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> Any:
    """Draws the rows of `keras.random.truncated_normal`."""
    sampler = counted_draws.truncated_normal(dtype or keras.config.floatx())
    given = shape, mean, stddev, dtype, seed
    return _draw_around("truncated_normal", sampler, original, *given)


def _draw_around(
    name: str,
    sampler: Sampler,
    original: Callable,
    shape: Any,
    mean: Any,
    stddev: Any,
    dtype: Any,
    seed: Any,
) -> Any:
    """Draws rows of numbers that lie around a mean."""

    def of_rows(rows: DrawnRows) -> tf.Tensor:
        drawn = rows.drawn(sampler, seed)
        scale, center = (
            tf.convert_to_tensor(x, drawn.dtype) for x in (stddev, mean)
        )
        return drawn * scale + center

    return _draw(
        name,
        shape,
        seed,
        lambda: original(shape, mean, stddev, dtype, seed),
        of_rows,
        (mean, stddev),
    )


def uniform(
    original: Callable,
    shape: Any,
    minval: Any = 0.0,
    maxval: Any = 1.0,
    dtype: Any = None,
    seed: Any = None,
) -> Any:
    """Draws the rows of `keras.random.uniform`."""
    sampler = counted_draws.uniform(dtype or keras.config.floatx())

    def of_rows(rows: DrawnRows) -> tf.Tensor:
        low, high = (tf.cast(x, sampler.dtype) for x in (minval, maxval))
        return rows.drawn(sampler, seed) * (high - low) + low

    return _draw(
        "uniform",
        shape,
        seed,
        lambda: original(shape, minval, maxval, dtype, seed),
        of_rows,
        (minval, maxval),
    )


def randint(
    original: Callable,
    shape: Any,
    minval: Any,
    maxval: Any,
    dtype: Any = "int32",
    seed: Any = None,
) -> Any:
    """Draws the rows of `keras.random.randint`."""

    def of_rows(rows: DrawnRows) -> tf.Tensor:
        # As Keras does, which casts to other types afterwards.
        kind = tf.as_dtype(dtype)
        drawn = kind if kind in (tf.int32, tf.int64) else tf.int64
        sampler = counted_draws.integers(minval, maxval, drawn)
        return tf.cast(rows.drawn(sampler, seed), kind)

    return _draw(
        "randint",
        shape,
        seed,
        lambda: original(shape, minval, maxval, dtype, seed),
        of_rows,
        (minval, maxval),
    )


def dropout(
    original: Callable,
    inputs: Any,
    rate: Any,
    noise_shape: Any = None,
    seed: Any = None,
) -> Any:
    """Drops the entries of the replica's samples that one device would drop."""
    if _draws() is None or rate in (0.0, 1.0):
        return original(inputs, rate, noise_shape, seed)
    inputs = tf.convert_to_tensor(inputs)
    sampler = counted_draws.uniform(inputs.dtype)

    def of_rows(rows: DrawnRows) -> tf.Tensor:
        return tf.nn.experimental.general_dropout(
            inputs, rate, lambda **_: rows.drawn(sampler, seed), rows.shape
        )

    return _draw(
        "dropout",
        _noise_shape(inputs, noise_shape),
        seed,
        lambda: original(inputs, rate, noise_shape, seed),
        of_rows,
        (inputs,),
    )


def _noise_shape(inputs: tf.Tensor, noise_shape: Any) -> Any:
    shape = tf.shape(inputs)
    if noise_shape is None:
        return shape
    sizes = sizes_of(shape)
    return [
        sizes[axis] if size is None else size
        for axis, size in enumerate(noise_shape)
    ]


def whole(original: Callable, shape: Any, *args: Any, **kwargs: Any) -> Any:
    """Draws all rows of one device, and takes the replica's.

    For numbers that are drawn until they are accepted, as gamma's.
    """

    def of_rows(rows: DrawnRows) -> tf.Tensor:
        def spread(value: Any) -> Any:
            return rows.spread(value) if tf.is_tensor(value) else value

        given = {name: spread(value) for name, value in kwargs.items()}
        return rows.taken(original(rows.whole, *map(spread, args), **given))

    return _draw(
        original.__name__,
        shape,
        kwargs.get("seed"),
        lambda: original(shape, *args, **kwargs),
        of_rows,
        (*args, *kwargs.values()),
    )


def categorical(
    original: Callable,
    logits: Any,
    num_samples: Any,
    dtype: Any = "int64",
    seed: Any = None,
) -> Any:
    """Draws the rows of `keras.random.categorical`."""
    logits = tf.convert_to_tensor(logits)

    def of_rows(rows: DrawnRows) -> tf.Tensor:
        spread = rows.spread(logits)
        return rows.taken(original(spread, num_samples, dtype, seed))

    return _draw(
        "categorical",
        [sizes_of(tf.shape(logits))[0], num_samples],
        seed,
        lambda: original(logits, num_samples, dtype, seed),
        of_rows,
        (logits,),
    )


def shuffle(original: Callable, x: Any, axis: int = 0, seed: Any = None) -> Any:
    """Shuffles by a seed that is equal on all replicas.

    If these are samples, the graph shows that they are mixed, and how.
    """
    x = tf.convert_to_tensor(x)
    return _draw(
        "shuffle",
        [sizes_of(tf.shape(x))[axis]],
        seed,
        lambda: original(x, axis, seed),
        lambda _: original(x, axis, seed),
        None,
    )


def _draw(
    name: str,
    shape: Any,
    seed: Any,
    original: Callable[[], Any],
    of_rows: Callable[[DrawnRows], tf.Tensor],
    parameters: Sequence[Any] | None = (),
) -> Any:
    """Draws as `Draws` does in a step, and else as Keras."""
    draws = _draws()
    if draws is None:
        return original()
    return draws.draw(name, shape, seed, original, of_rows, parameters)


def _is_alike(kind: Kind, rows: Kind) -> bool:
    """Whether a parameter has entries of the same samples, or of none."""
    if kind == EQUAL:
        return True
    return kind.regular and kind.with_entries(rows.entries) == rows


def _draws() -> Draws | None:
    """Returns the draws of a step in which replicas draw together."""
    step = steps.current_fit_step()
    if step is None or tf.executing_eagerly():
        return None
    return Draws.of(step) if replica_collectives().count > 1 else None


def _warn_of_own_seeds(step: Step) -> None:
    step.warn_once(
        "seeds",
        "the step takes a seed from a `SeedGenerator` by itself. Each replica "
        "gets another one, so numbers drawn with it differ from one device's. "
        "Give the generator to a function of `keras.random`, "
        "as `seed=`.",
    )


def _warn_of_own_draw(number: int, draw: tf.Operation, step: Step) -> None:
    step.warn_once(
        f"own draw {number}: {draw.type}",
        "the samples of a batch share the numbers that the operation "
        f"{draw.type!r} of TensorFlow draws. Each replica draws its own there, "
        "where one device draws once for all samples. Draw by `keras.random` "
        "with a `keras.random.SeedGenerator`.",
        draw,
    )


def _warn_of(name: str, step: Step) -> None:
    scope = re.sub(r"^replica_\d+/", "", tf.get_current_name_scope())
    step.warn_once(
        f"draws {name}",
        f"the graph does not show for which samples `keras.random.{name}` "
        f"draws in {scope!r}. Each replica draws its "
        "own numbers there, which differ from one device's. Make the shape "
        "from `keras.ops.shape(x)`, where `x` has a row for each sample, "
        "and draw outside of loops over samples.",
    )
