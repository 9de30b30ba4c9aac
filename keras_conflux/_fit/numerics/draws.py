"""Draws the random numbers of one device: each replica draws its own rows.

The state of a seed generator is equal on all replicas, as they draw equally
often. Numbers that are no rows of samples are the same on all. Where the graph
does not show whose numbers are drawn, the replica's rank moves the seeds.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import COUNT
from keras_conflux._batch_analysis import EQUAL
from keras_conflux._batch_analysis import Kind
from keras_conflux._batch_analysis import NotDerivable
from keras_conflux._batch_analysis import Role
from keras_conflux._batch_analysis import are_of_a_sample
from keras_conflux._batch_analysis import draws_shared_by_samples
from keras_conflux._common.contexts import having
from keras_conflux._common.trees import Tree
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._compat.tensorflow_internals import replica_index
from keras_conflux._fit.numerics import drawn_rows
from keras_conflux._fit.numerics import random_operations
from keras_conflux._fit.numerics.drawn_rows import OfConstant
from keras_conflux._fit.numerics.drawn_rows import sizes_of
from keras_conflux._fit.numerics.exit import Exit
from keras_conflux._fit.numerics.exit import TraceFindings
from keras_conflux._fit.numerics.writes import not_recording
from keras_conflux._replication import steps
from keras_conflux._replication.replica_context import in_replica
from keras_conflux._replication.replica_context import rank_as_tensor
from keras_conflux._replication.replica_context import replica_collectives

# Seeds count up from a seed of the user's; replicas must not meet each other's.
_STRIDE = 1_000_003


class Draws(Exit):
    """The random numbers that a step draws."""

    def __init__(self, step: steps.Step) -> None:
        super().__init__(step)
        self._takes_rows: bool | None = None
        """Whether `keras.random`, if it draws, draws rows by a seed."""
        self.rows: drawn_rows.DrawnRows | None = None
        """The rows that operations draw in place of a whole shape."""
        self.by_sample: frozenset[int] = frozenset()
        """The multiples of the samples' number that are rows of each, by their
        numbers, in the order in which a step draws them."""
        self.count = 0
        self._joined: dict[int, tuple[tf.Tensor, Kind]] = {}

    def end(self, output: Tree) -> Tree:
        """Warns of numbers that replicas draw apart. See `Exit`."""
        if replica_index() == 0 and replica_collectives().count > 1:
            draws = draws_shared_by_samples(self.step.kinds)
            for number, draw in enumerate(draws):
                self.step.warn_once(
                    f"own draw {number}: {draw.type}",
                    "the samples of a batch share the numbers that the "
                    f"operation {draw.type!r} of TensorFlow draws. Each "
                    "replica draws its own there, where one device draws once "
                    "for all samples. Draw by `keras.random` with a "
                    "`keras.random.SeedGenerator`.",
                    draw,
                )
        return output

    def report(self, findings: TraceFindings) -> None:
        """See `Exit`."""
        super().report(findings)
        findings.by_sample.update(
            number
            for number, (drawn, kind) in self._joined.items()
            if are_of_a_sample(drawn, kind, self.step.kinds)
        )

    def draw(
        self,
        function: functools.partial,
        shape: Any,
        parameters: Sequence[Any] | None,
        of_rows: Callable[[drawn_rows.DrawnRows], tf.Tensor] | None,
    ) -> Any:
        """Draws the numbers of one device, as far as the graph shows them.

        The function is one of `keras.random`, with its arguments. `parameters`
        may be rows of samples, and are `None` if the graph shows the inputs of
        the result. `of_rows` draws rows of one device's numbers. By default,
        operations of the function draw them in place of a whole shape.
        """
        seed = function.keywords.get("seed")
        kinds = {self.step.kinds.of(each) for each in parameters or ()}
        number = -1
        try:
            rows = drawn_rows.find(shape, not isinstance(seed, int), self.step)
            if COUNT in kinds:
                raise NotDerivable("a number of samples")
            if rows is not None and rows.is_multiple:
                number = self.count
                self.count += 1
                if number in self.by_sample or any(
                    kind.has_several_each for kind in kinds
                ):
                    rows = rows.by_sample()
            given = None if of_rows else rows
            with having(self, _takes_rows=True, rows=given):
                drawn = of_rows(rows) if of_rows and rows else function()
        except NotDerivable as reason:
            if isinstance(seed, int) and isinstance(reason, OfConstant):
                self.counted = "draws random numbers of an integer seed"
            else:
                _warn_of(function.func.__name__, self.step)
            with having(self, _takes_rows=False, rows=None):
                return function()
        if rows is None:
            return drawn
        if rows.is_multiple:
            self._joined.setdefault(number, (drawn, rows.kind))
        own = rows.kind
        are_alike = (  # of the same samples, or of none
            kind == EQUAL
            or (kind.regular and kind.with_entries(own.entries) == own)
            for kind in kinds
        )
        is_mixed = any(
            kind.needs_all_samples or kind.role in (Role.MEAN, Role.TOTAL)
            for kind in kinds
        )
        if is_mixed or (parameters is not None and all(are_alike)):
            # The graph does not show that these are rows of the same samples.
            own = dataclasses.replace(own, mixed=is_mixed)
            self.step.kinds.mark(drawn, own)
        return drawn

    def seeds_are_shared(self) -> bool:
        """Whether the next seed is equal on all replicas, as on one device."""
        if self._takes_rows is None:
            self.step.warn_once(
                "seeds",
                "the step takes a seed from a `SeedGenerator` by itself. Each "
                "replica gets another one, so numbers drawn with it differ "
                "from one device's. Give the generator to a function of "
                "`keras.random`, as `seed=`.",
            )
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


def operation(original: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
    """Draws by an operation of TensorFlow, in `keras.random` or elsewhere."""
    draws = _draws()
    if draws is None or draws.rows is None:
        return random_operations.draw(original, *args, **kwargs)
    given = _bound(original, args, kwargs)
    del given["shape"]
    return draws.rows.drawn(random_operations.Sampler(original, given))


def _bound(original: Callable, args: tuple, kwargs: dict) -> dict[str, Any]:
    return dict(inspect.signature(original).bind(*args, **kwargs).arguments)


def by_rows(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Draws rows of numbers of a shape, of which each is drawn alone."""
    given = _bound(original, args, kwargs)
    return _draw(original, given, given["shape"], _parameters(given))


def _parameters(given: dict[str, Any]) -> tuple[Any, ...]:
    """Returns means and the like, which may be rows of samples."""
    others = ("shape", "dtype", "seed", "num_samples")
    return tuple(x for name, x in given.items() if name not in others)


def dropout(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Drops the entries of the replica's samples that one device would drop."""
    given = _bound(original, args, kwargs)
    draws = _draws()
    if draws is None or given["rate"] in (0.0, 1.0):
        return original(**given)
    inputs = given["inputs"] = tf.convert_to_tensor(given["inputs"])
    if draws.step.kinds.of(inputs).mixed:
        # The graph has to show that they are, so it multiplies what is drawn.
        ones = tf.ones(tf.shape(inputs), inputs.dtype)
        return inputs * dropout(original, **given | {"inputs": ones})
    shape: Any = tf.shape(inputs)
    if given.get("noise_shape") is not None:
        sizes = sizes_of(shape)
        shape = [
            sizes[axis] if size is None else size
            for axis, size in enumerate(given["noise_shape"])
        ]
    return _draw(original, given, shape, (inputs,))


def whole(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Draws all rows of one device, and takes the replica's.

    For categories, and numbers drawn until they are accepted, as gamma's.
    """
    given = _bound(original, args, kwargs)
    shape: Any = given.get("shape")
    if shape is None:
        given["logits"] = tf.convert_to_tensor(given["logits"])
        shape = [sizes_of(tf.shape(given["logits"]))[0], given["num_samples"]]

    def of_rows(rows: drawn_rows.DrawnRows) -> tf.Tensor:
        if "shape" not in given and rows.axis:  # all by the same logits
            count = {"num_samples": rows.whole[1]}
            return rows.taken(original(**given | count))
        of_all: dict[str, Any] = {
            name: rows.spread(value)
            for name, value in given.items()
            if tf.is_tensor(value) and name not in ("shape", "seed")
        }
        if "shape" in given:
            of_all["shape"] = rows.whole
        return rows.taken(original(**given | of_all))

    return _draw(original, given, shape, _parameters(given), of_rows)


def shuffle(original: Callable, x: Any, axis: int = 0, seed: Any = None) -> Any:
    """Shuffles by a seed that is equal on all replicas.

    If these are samples, the graph shows that they are mixed, and how.
    """
    given = {"x": tf.convert_to_tensor(x), "axis": axis, "seed": seed}
    shape = [sizes_of(tf.shape(given["x"]))[axis]]
    return _draw(original, given, shape, None, lambda _: original(**given))


def _draw(
    original: Callable,
    given: dict[str, Any],
    shape: Any,
    parameters: Sequence[Any] | None,
    of_rows: Callable[[drawn_rows.DrawnRows], tf.Tensor] | None = None,
) -> Any:
    """Draws as `Draws` does in a step, and else as Keras."""
    draws = _draws()
    if draws is None:
        return original(**given)
    function = functools.partial(original, **given)
    return draws.draw(function, shape, parameters, of_rows)


def _draws() -> Draws | None:
    """Returns the draws of a step in which replicas draw together."""
    step = steps.current_fit_step()
    if step is None or tf.executing_eagerly():
        return None
    return Draws.of(step) if replica_collectives().count > 1 else None


def _warn_of(name: str, step: steps.Step) -> None:
    scope = re.sub(r"^replica_\d+/", "", tf.get_current_name_scope())
    step.warn_once(
        f"draws {name}",
        f"the graph does not show for which samples `keras.random.{name}` "
        f"draws in {scope!r}. Each replica draws its "
        "own numbers there, which differ from one device's. Make the shape "
        "from `keras.ops.shape(x)`, where `x` has a row for each sample, "
        "and draw outside of loops over samples.",
    )
