"""Lists the operations that Keras and TensorFlow put into graphs.

    cd tests/batch_analysis; export PYTHONPATH=../..:..
    python known_operations.py --write      # calls all, takes minutes
    python known_operations.py --update     # after a change to a rule
    python known_operations.py --derived    # where values of a batch begin

Everything public is traced, with gradients, and the page of the developers'
notes says which rule the table has for each type of operation.
"""

import argparse
import collections
import contextlib
import dataclasses
import inspect
import logging
import pathlib
import re
import types
import warnings
from collections.abc import Callable
from collections.abc import Iterator
from typing import Any

import keras
import public_functions
import tensorflow as tf
from alarms import limited
from function_calls import NOT_CLASSES
from traced_operations import Trace
from traced_operations import Values
from traced_operations import traced

from keras_conflux._batch_analysis import rules
from keras_conflux._graphs import effects
from keras_conflux._graphs.bodies import BRANCHES
from keras_conflux._graphs.bodies import CALLS
from keras_conflux._graphs.bodies import LOOPS
from keras_conflux._graphs.effects import COLLECTIVES

PAGE = pathlib.Path(__file__).with_name("known-operations.md")
UNKNOWN = ("DERIVED", "OPAQUE")
"""What is said of operations without a rule."""
_READ = (
    *("AssignVariableOp", "Placeholder", "PlaceholderWithDefault"),
    "ReadVariableOp",
)
"""Operations whose kinds depend on the whole graph."""
_SECONDS = 20
"""How long a call may take to be traced. Some would never end."""
_NAMES = 3


@dataclasses.dataclass
class Found:
    """What was found.

    Args:
        makers: By type, the names of what puts such operations into graphs.
        failed: Names of what could not be called.
        count: How many functions and classes there are.
    """

    makers: dict[str, set[str]]
    failed: list[str]
    count: int


def status_of(kind: str) -> str:
    """Returns where a type's rule is, or what holds without one."""
    for name, module in vars(rules).items():
        is_table = isinstance(module, types.ModuleType)
        if is_table and kind in getattr(module, "RULES", ()):
            return f"`{name}.py`"
    if kind in CALLS | BRANCHES | LOOPS:
        return "`control_flow.py`"
    reads = effects.of_type(kind) is effects.Effect.READS
    if reads or kind in rules.CODE | {*COLLECTIVES}:
        return "`rules.py`"
    if kind in _READ:
        return "`analysis.py`"
    definition = tf.Graph().op_def_for_type(kind)
    if not definition.output_arg:
        return "no output"
    if not definition.input_arg and not definition.is_stateful:
        return "no input"
    return UNKNOWN[definition.is_stateful]


def traces() -> Iterator[tuple[str, list[Callable[[], Trace]]]]:
    """Yields names of what is public, and ways to trace it.

    Of each family of ways, `public_functions.ENOUGH` that do are used.
    """
    for name, families in public_functions.functions().items():
        for family in families:
            yield name, [_Partial(traced, call) for call in family]
        if not families:
            yield name, []
    for module, kinds, make in (
        ("layers", public_functions.layers(), _traced_layer),
        ("losses", public_functions.losses(), _traced_loss),
        ("metrics", public_functions.metrics(), _traced_metric),
    ):
        for name, kind in kinds.items():
            if name in NOT_CLASSES:
                continue
            calls = public_functions.TARGETS
            if module == "layers":
                calls = public_functions.calls_of_layer(kind)
            for call in calls:
                yield f"keras.{module}.{name}", [_Partial(make, kind, call)]


class _Partial:
    """A call that is made later."""

    def __init__(self, function: Callable, *args: Any) -> None:
        self._function, self._args = function, args

    def __call__(self) -> Trace:
        return self._function(*self._args)


def _traced_layer(kind: Any, call: Callable) -> Trace:
    layer = public_functions.layer(kind)
    given = {}
    if "training" in inspect.signature(layer.call).parameters:
        given["training"] = True
    layer(*call(Values()), **given)
    weights = tuple(each.value for each in layer.trainable_variables)
    return traced(lambda t: layer(*call(t), **given), weights)


def _traced_loss(kind: Any, call: Callable) -> Trace:
    loss = public_functions.loss(kind)
    return traced(lambda t: loss(*call(t)))


def _traced_metric(kind: Any, call: Callable) -> Trace:
    metric = public_functions.metric(kind)
    metric.update_state(*call(Values()))

    def run(t: Any) -> Any:
        metric.update_state(*call(t))
        return metric.result()

    return traced(run, (), tuple(each.value for each in metric.variables))


def successful() -> Iterator[tuple[str, Trace | None]]:
    """Yields what is public with what it puts into a graph, and each name."""
    for name, ways in traces():
        yield name, None
        done = 0
        for way in ways:
            if done == public_functions.ENOUGH:
                break
            # Any error says that a guess was wrong.
            with contextlib.suppress(Exception), limited(_SECONDS):
                yield name, way()
                done += 1


def collected() -> Found:
    """Traces everything."""
    makers: dict[str, set[str]] = collections.defaultdict(set)
    called: dict[str, bool] = {}
    with _quiet():
        for name, trace in successful():
            called[name] = called.get(name, False) or trace is not None
            for kind in trace.types() if trace else ():
                makers[kind].add(name)
    failed = [name for name, is_done in called.items() if not is_done]
    return Found(dict(makers), failed, len(called))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    logger = tf.get_logger()
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    logger.setLevel(level)


def versions() -> str:
    return f"Keras {keras.__version__} and TensorFlow {tf.__version__}"


@dataclasses.dataclass
class Row:
    """A line of the page.

    Args:
        kind: The type of an operation.
        status: See `status_of`.
        count: How many functions and classes make it.
        makers: A few of them.
    """

    kind: str
    status: str
    count: int
    makers: str

    def __str__(self) -> str:
        return (
            f"| `{self.kind}` | {self.status} | {self.count} | {self.makers} |"
        )


def rows_of(found: Found) -> list[Row]:
    return [
        Row(
            kind,
            status_of(kind),
            len(names),
            ", ".join(f"`{name}`" for name in sorted(names)[:_NAMES]),
        )
        for kind, names in found.makers.items()
    ]


def page(rows: list[Row], failed: list[str], count: int, made_by: str) -> str:
    """Returns the text of the page."""
    rows = sorted(rows, key=lambda row: (-row.count, row.kind))
    unknown = [row for row in rows if row.status in UNKNOWN]
    known = [row for row in rows if row.status.startswith("`")]
    others = [row for row in rows if row not in unknown and row not in known]
    unmade = collections.defaultdict(list)
    for kind in sorted(set(rules.RULES) - {row.kind for row in rows}):
        unmade[status_of(kind)].append(f"`{kind}`")
    return _TEXT.format(
        versions=made_by,
        count=count,
        called=count - len(failed),
        types=len(rows),
        known=len(known),
        others=len(others),
        unknown=len(unknown),
        stateful=sum(row.status == "OPAQUE" for row in unknown),
        unknown_rows="\n".join(map(str, unknown)),
        known_rows="\n".join(map(str, known)),
        other_rows="\n".join(map(str, others)),
        unmade="\n".join(f"* {k}: {', '.join(v)}" for k, v in unmade.items()),
        failed="\n".join(f"* `{name}`" for name in failed) or "None.",
    )


_HEAD = "| operation | {} | made by | such as |\n|---|---|---|---|"
_TEXT = f"""# Notes: operations that are known

`python tests/batch_analysis/known_operations.py --write` has written this page,
with {{versions}}.

It traces everything public of `keras.ops`, `keras.activations`, `keras.random`,
`tf` and its modules `math`, `bitwise`, `linalg`, `nn`, `image`, `sparse`,
`ragged`, `signal`, `strings`, `random` and `quantization`, and Keras' layers,
losses and metrics, with their gradients: {{called}} of {{count}} functions and
classes. For each type of operation it says which module of
`keras_conflux/_batch_analysis` has its rule.

| types of operations | {{types}} |
|---|---|
| with a rule | {{known}} |
| that need none | {{others}} |
| unknown | {{unknown}}, of which {{stateful}} have a state |

## Unknown

What they make of samples is DERIVED: right, and computed once more from what is
exchanged between replicas. What has a state is OPAQUE.

{_HEAD.format("without a rule")}
{{unknown_rows}}

## With a rule

{_HEAD.format("rule")}
{{known_rows}}

## Without inputs or outputs

What has no inputs is equal on all replicas.

{_HEAD.format("why it needs no rule")}
{{other_rows}}

## Rules of operations that were not made

No function made these as it was called, older ones among them that saved
programs have.

{{unmade}}

## Not called

{{failed}}
"""


def read(text: str) -> tuple[list[Row], list[str], int, str]:
    """Returns what a page says: its rows and the other arguments of `page`."""
    rows = [
        Row(kind, status, int(count), makers)
        for kind, status, count, makers in re.findall(
            r"^\| `(\w+)` \| (.+?) \| (\d+) \| (.+) \|$", text, re.MULTILINE
        )
    ]
    failed = re.findall(r"^\* `([\w.]+)`$", text, re.MULTILINE)
    count = re.search(r"\d+ of (\d+) functions\s+and", text)
    made_by = re.search(r"Keras \S+ and TensorFlow [\d.]+\d", text)
    assert count
    assert made_by
    return rows, failed, int(count[1]), made_by[0]


def updated(text: str) -> str:
    """Returns a page with the rules that there are now."""
    rows, *others = read(text)
    for row in rows:
        row.status = status_of(row.kind)
    return page(rows, *others)


def print_derived(wanted: str) -> None:
    """Prints the operations with which values of the whole batch begin."""
    found: dict[str, dict[str, set[str]]] = collections.defaultdict(dict)
    with _quiet():
        for name, trace in successful():
            if not name.startswith(wanted) or trace is None:
                continue
            for operation in trace.derived():
                kinds = ", ".join(
                    f"{trace.kinds.of(x).form.name} {x.shape}"
                    for x in operation.inputs
                )
                found[operation.type].setdefault(kinds, set()).add(name)
    for kind, calls in sorted(found.items()):
        print(kind, status_of(kind))
        for kinds, names in calls.items():
            print(f"    {kinds}: {', '.join(sorted(names))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--update", action="store_true")
    parser.add_argument(
        "--derived", metavar="PREFIX", nargs="?", const="keras."
    )
    given = parser.parse_args()
    if given.write:
        found = collected()
        rows = rows_of(found)
        PAGE.write_text(page(rows, found.failed, found.count, versions()))
    if given.update:
        PAGE.write_text(updated(PAGE.read_text()))
    if given.derived:
        print_derived(given.derived)


if __name__ == "__main__":
    main()
