"""Small programs that are drawn by a number, as source text.

A program is a function of samples. Each line is one drawn operation; whether it
can be computed is found out by computing it for two batches. In a program that
mixes, a statistic of the batch or the position of samples enters at a drawn
line. In one that does not, each sample is treated by itself, which is tried out
on parts of the batch.

    python tests/drawn_programs.py --programs 3000 --workers 32 --first 0

trains many of them, in many processes, and prints what is not as on one device.
"""

import argparse
import contextlib
import dataclasses
import linecache
import re
import textwrap

import drawn_lot
import drawn_operations as operations
import numpy as np
import tensorflow as tf
from keras import ops

SIZES = (7, 4)
"""The samples of the batches for which what is drawn can be computed."""
FEATURES, HIDDEN, TARGETS = 5, 4, 3
TABLE = np.sin(np.arange(16.0) + 1).reshape(4, 4)
PARTS = ((4, 3), (1, 6), (3, 2, 2))
LARGEST = 30.0
MOST_ENTRIES = 600
ARGUMENTS = {"layer": "x", "state": "x", "input": "x, y", "slope": "d, x"}
"""What a program at a place is given, if not targets and predictions."""


class Redraw(Exception):
    """Says that what was drawn is no program to compare."""


@dataclasses.dataclass(frozen=True)
class Program:
    """What was drawn.

    Args:
        place: Where in a training it stands.
        mixes: Whether its value depends on the whole batch in another way than
            as rows, or a sum or a mean of rows.
        lines: Names, and what is assigned to them.
        options: How the training around it goes.
    """

    place: str
    mixes: bool
    lines: tuple[tuple[str, str], ...]
    options: dict

    @property
    def source(self):
        """The text of the function."""
        arguments = arguments_of(self.place)
        counted = f"n = tf.shape({arguments[0]})[0]\n"
        body = "".join(f"{name} = {text}\n" for name, text in self.lines)
        return (
            f"def drawn({arguments}):\n"
            + textwrap.indent(
                (counted if _uses("n", body) else "") + body, "    "
            )
            + f"    return {self.lines[-1][0]}\n"
        )

    @property
    def function(self):
        """The function, whose lines tracebacks and warnings show."""
        name = f"<drawn {abs(hash(self.source))}>"
        lines = self.source.splitlines(keepends=True)
        linecache.cache[name] = len(self.source), None, lines, name
        names = {"tf": tf, "ops": ops, "TABLE": TABLE}
        exec(compile(self.source, name, "exec"), names)
        return names["drawn"]

    def __str__(self):
        """What to read of a program that was found wrong."""
        kind = "mixes" if self.mixes else "apart"
        return f"# {self.place}, {kind}, {self.options}\n{self.source}"


def arguments_of(place):
    return ARGUMENTS.get(place, "y, p")


def _uses(name, text):
    return re.search(rf"\b{name}\b", text) is not None


@dataclasses.dataclass(frozen=True)
class Value:
    """A tensor of a program, for each of two batches."""

    name: str
    tensors: tuple

    def __str__(self):
        """The name, so that it can be written into source text."""
        return self.name

    @property
    def rank(self):
        return len(self.tensors[0].shape)

    @property
    def dtype(self):
        return self.tensors[0].dtype

    @property
    def is_of_rows(self):
        """Whether there is one row for each sample."""
        return self.rank > 0 and all(
            each.shape[0] == n
            for each, n in zip(self.tensors, SIZES, strict=True)
        )

    @property
    def shape(self):
        """The shape after the first axis, which is to be a constant."""
        one, other = (tuple(each.shape[1:]) for each in self.tensors)
        return one if one == other else None

    def size(self, axis):
        return self.tensors[0].shape[axis]


class Drawing:
    """The values that a program has so far, and draws of them.

    Args:
        rng: Draws.
        given: By their names, the arguments of the function.
    """

    def __init__(self, rng, given):
        self.rng = rng
        self.given = [Value(name, pair) for name, pair in given.items()]
        self.values = list(self.given)
        self.lines = []
        first = self.given[0].tensors
        self._names = [
            {"tf": tf, "ops": ops, "TABLE": TABLE, "n": tf.shape(each)[0]}
            for each in first
        ]
        for value in self.given:
            self._name(value)

    def _name(self, value):
        for names, tensor in zip(self._names, value.tensors, strict=True):
            names[value.name] = tensor

    def add(self, text):
        """Adds a line, if what it computes is a number of moderate size."""
        tensors = []
        for names in self._names:
            try:
                found = tf.convert_to_tensor(eval(text, dict(names)))
            except Exception as error:
                raise LookupError(text) from error
            tensors.append(found)
        if any(not _is_moderate(each.numpy()) for each in tensors):
            raise LookupError(text)
        if len({len(each.shape) for each in tensors}) > 1:
            raise LookupError(text)
        value = Value(f"v{len(self.lines) + 1}", tuple(tensors))
        self.values.append(value)
        self.lines.append((value.name, text))
        self._name(value)
        return value

    def line(self, templates):
        """Adds a drawn line, mostly one of what came last."""
        last = self.values[-1]
        for attempt in range(60):
            try:
                text = self.rng.choice(templates)(self)
                is_next = _uses(last.name, text) or last in self.given
                if is_next or attempt > 50:
                    return self.add(text)
            except LookupError:
                continue
        raise Redraw("no line")

    def closed(self, templates, is_wanted):
        """Adds a line that makes of the last value what is wanted."""
        last = self.values[-1]
        if is_wanted(last) and self.rng.random() < 0.5:
            return last
        for _ in range(60):
            try:
                found = self.add(self.rng.choice(templates)(self, last))
            except LookupError:
                continue
            if is_wanted(found):
                return found
            self.values.pop()
            self.lines.pop()
        raise Redraw("no end")

    def living(self):
        """Returns the lines that the last one needs."""
        needed, kept = {self.lines[-1][0]}, []
        for name, text in reversed(self.lines):
            if name in needed:
                kept.append((name, text))
                needed |= set(re.findall(r"\bv\d+\b", text))
        return tuple(reversed(kept))

    # What templates ask for.

    def of(self, choices):
        return self.rng.choice(choices)

    def _one(self, is_wanted):
        found = [value for value in self.values if is_wanted(value)]
        if not found:
            raise LookupError
        return found[-1] if self.rng.random() < 0.6 else self.of(found)

    def real(self, rank=0):
        return self._one(lambda v: v.dtype == tf.float64 and v.rank >= rank)

    def rows(self, rank=2):
        return self._one(
            lambda v: v.dtype == tf.float64 and v.rank >= rank and v.is_of_rows
        )

    def scalar(self):
        return self._one(lambda v: v.dtype == tf.float64 and v.rank == 0)

    def discrete(self):
        return self._one(lambda v: v.dtype.is_integer or v.dtype.is_bool)

    def integer(self):
        return self._one(lambda v: v.dtype.is_integer)

    def truth(self):
        try:
            return self._one(lambda v: v.dtype.is_bool)
        except LookupError:
            return f"({self.real()} > 0.1)"

    def row_numbers(self):
        try:
            return self._one(
                lambda v: v.dtype == tf.float64 and v.rank == 1 and v.is_of_rows
            )
        except LookupError:
            return f"{self.rows()}[:, 0]"

    def mask(self):
        return f"({self.row_numbers()} > {self.of(['0.1', '-0.2'])})"

    def choice(self):
        def is_chosen(value):
            return value.dtype.is_integer and value.rank == 1

        if self.rng.random() < 0.5:
            try:
                return f"({self._one(is_chosen)} % 3)"
            except LookupError:
                pass
        return self.of(
            [
                f"tf.argmax({self.rows()}[:, :3], 1, output_type='int32')",
                f"tf.cast({self.row_numbers()} > 0.1, 'int32')",
            ]
        )

    def places(self):
        return self.of(
            [
                *("tf.range(n)", "ops.arange(n)", "tf.range(n)"),
                "tf.cumsum(tf.ones([n], 'int32'), exclusive=True)",
                "tf.cast(tf.where(tf.ones([n], 'bool'))[:, 0], 'int32')",
            ]
        )

    def axis(self, value):
        axis = self.rng.randrange(value.rank)
        return self.of([axis, axis - value.rank])

    def inner(self, value):
        if value.rank < 2:
            raise LookupError
        axis = self.rng.randrange(1, value.rank)
        return self.of([axis, axis - value.rank])

    def kept(self):
        return self.of(["", "", ", keepdims=True"])


def _is_moderate(value):
    if value.dtype.kind not in "fiub" or value.size > MOST_ENTRIES:
        return False
    if value.ndim > 4 or not value.size:
        return False
    return value.dtype.kind != "f" or bool(
        np.all(np.isfinite(value)) and np.max(np.abs(value)) < LARGEST
    )


OF_OPTIMIZERS = (
    *({}, {}, {}, {}),
    {"global_clipnorm": 0.1},
    {"gradient_accumulation_steps": 2},
)
PLACES = ("loss", "layer", "metric", "step", "branch", "slope")
OF_STEPS = ("input", "loss", "metric", "log", "gradient")
"""What a program in a step of the user's own computes."""
OF_BRANCHES = (
    *("set", "add", "moving", "double", "count"),
    *("optimizer", "metric", "rows", "loss"),
)
"""What a branch does that a step chooses by what a program computes."""
CHOICES = ("cond", "ops", "case", "function", "if", "nested")
"""How it chooses. The last three do so in a `tf.function`."""


def drawn_program(rng, most):
    """Draws a program for some number of devices, at most `most`.

    Raises:
        Redraw: If what was drawn is none.
    """
    place = rng.choice(PLACES)
    mixes = rng.random() < 0.7
    options = drawn_options(rng, place, most)
    site = options.get("site", place)
    if site == "state":
        mixes = True
    draw = Drawing(rng, given(rng, site))
    count = rng.randrange(2, 7)
    where = rng.randrange(count)
    for position in range(count):
        templates = operations.APART
        if mixes and position == where:
            templates = operations.MIXING
        elif mixes and position > where and rng.random() < 0.6:
            templates = operations.ANY
        draw.line(templates)
    _close(draw, site, mixes)
    lines = draw.living()
    if not 2 <= len(lines) <= 8:
        raise Redraw("length")
    if site == "loss" and not any(_uses("p", text) for _, text in lines):
        raise Redraw("no predictions")
    if site == "slope" and not any(_uses("d", text) for _, text in lines):
        raise Redraw("no derivatives")
    program = Program(site, mixes, lines, options | {"kind": place})
    if does_mix(program, draw.given) != mixes:
        raise Redraw("mixes")
    return program


def drawn_options(rng, place, most):
    options = {
        "devices": min(rng.choice([2, 2, 3]), most),
        "optimizer": rng.choice(["sgd", "adam"]),
        "of optimizer": rng.choice(OF_OPTIMIZERS),
        "seed": rng.randrange(1000),
        # The second batch: 2 samples leave the third device without any.
        "last": rng.choice([SIZES[1], SIZES[1], 2]),
    }
    if place == "step":
        options["site"] = rng.choice(OF_STEPS)
    if place == "loss":
        options["form"] = rng.choice(["function", "compute_loss", "add_loss"])
    if place == "metric":
        options["form"] = rng.choice(["function", "sum", "last", "largest"])
    if place == "layer":
        options["site"] = rng.choice(["layer", "layer", "layer", "state"])
    if place == "branch":
        options["site"] = rng.choice(["branch", "branch", "branch", "state"])
        options["by"] = rng.choice(CHOICES)
        options["form"] = rng.choice(OF_BRANCHES)
    if place == "slope":
        options["form"] = rng.choice(["layer", "loss", "sum", "rows"])
        options["forward"] = rng.choice(["identity", "sign", "tanh"])
    if options.get("site") == "state":
        options["form"] = rng.choice(["assign", "add", "moving"])
        options["used"] = rng.random() < 0.5
    return options


def given(rng, site):
    """Returns the arguments of a program, for both batches."""
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    sizes = {"x": FEATURES if site == "input" else HIDDEN}
    if site == "slope":
        sizes = {"d": HIDDEN, "x": HIDDEN}
    return {
        name: tuple(
            tf.constant(numbers.normal(size=(n, sizes.get(name, TARGETS))))
            for n in SIZES
        )
        for name in arguments_of(site).split(", ")
    }


def _close(draw, site, mixes):
    """Makes of the last value what is used where the program stands."""

    def is_real(value):
        return value.dtype == tf.float64

    def is_of_rows(value):
        return is_real(value) and value.is_of_rows

    def is_number(value):
        return is_real(value) and value.rank == 0

    if site in ("layer", "input"):
        sizes = (
            [(FEATURES,)] if site == "input" else [(k,) for k in range(1, 9)]
        )
        draw.closed(
            operations.ROWS, lambda v: is_of_rows(v) and v.shape in sizes
        )
    elif site == "slope":
        draw.closed(
            operations.ROWS, lambda v: is_of_rows(v) and v.shape == (HIDDEN,)
        )
    elif site == "state":
        last = draw.values[-1]
        if not is_real(last) or last.is_of_rows or last.rank > 2:
            raise Redraw("state")
        if last.tensors[0].shape != last.tensors[1].shape:
            raise Redraw("state")
    elif site in ("gradient", "branch") and mixes:
        draw.closed(operations.NUMBER + operations.NUMBER_OF_ALL, is_number)
    elif not mixes:
        draw.closed(operations.ROWS, is_of_rows)
        if draw.rng.random() < 0.7 or site in ("gradient", "branch"):
            draw.closed(operations.NUMBER[:4], is_number)
    elif draw.rng.random() < 0.3 and is_of_rows(draw.values[-1]):
        pass
    else:
        draw.closed(operations.NUMBER + operations.NUMBER_OF_ALL, is_number)


def does_mix(program, values):
    """Whether parts of a batch give another value than the batch.

    The values of the parts are joined if they are rows. Numbers are added up,
    or averaged with the sizes of the parts as weights.
    """
    whole = [value.tensors[0] for value in values]
    function = program.function
    expected = function(*whole).numpy()
    for sizes in PARTS:
        parts = zip(*(tf.split(each, sizes) for each in whole), strict=True)
        try:
            found = [function(*part).numpy() for part in parts]
        except Exception:
            return True
        if not any(
            joined.shape == expected.shape
            and np.allclose(joined, expected, 1e-9, 1e-9)
            for joined in _joined(found, sizes)
        ):
            return True
    return False


def _joined(found, sizes):
    if found[0].ndim:
        with contextlib.suppress(ValueError):
            yield np.concatenate(found)
    if len({each.shape for each in found}) == 1:
        yield sum(found)
        weights = np.array(sizes) / sum(sizes)
        yield sum(w * each for w, each in zip(weights, found, strict=True))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    chosen = parser.parse_args()
    found = []

    def tell(judged):
        found.append(judged)
        if judged.verdict in drawn_lot.FAULTS:
            print(f"\n{judged}", flush=True)
        if len(found) % 100 == 0:
            print(f"\n{drawn_lot.table(found)}", flush=True)

    numbers = range(chosen.first, chosen.first + chosen.programs)
    drawn_lot.judge_all(numbers, chosen.workers, tell)
    print(f"\n{drawn_lot.report(found)}")


if __name__ == "__main__":
    main()
