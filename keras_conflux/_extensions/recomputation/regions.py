"""The operations that calls have traced, made again for the backward pass.

When a tape has traced a backward pass, its operations that read inside of a
call are pointed at copies of what they read. A copy computes the same from the
same tensors, once the derivatives by the call's results are known. An operation
with an effect is never copied: its results are kept.
"""

import dataclasses
from collections.abc import Callable
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_conflux._batch_analysis import EQUAL
from keras_conflux._common.contexts import Setting
from keras_conflux._common.user_warnings import warn
from keras_conflux._graphs import effects
from keras_conflux._graphs import rewriting
from keras_conflux._graphs import walks
from keras_conflux._replication import steps

_REGIONS = "_recomputed_regions"
"""The attribute of a graph that lists them, also of graphs inside of it."""
_OF_SHAPES = ("Shape", "ShapeN", "Size")
"""Operations that read no entries, so that they keep nothing."""
_is_in_one = Setting(False)


def traced(name: str, f: Callable, args: Any, kwargs: Any) -> Any:
    """Calls a function, and notes the operations that it adds to the graph."""
    if _is_in_one.get():
        return f(*args, **kwargs)
    graph: Any = tf.compat.v1.get_default_graph()
    start = len(graph.get_operations())
    with _is_in_one.to(True):
        result = f(*args, **kwargs)
    parts = tf.nest.flatten((args, kwargs, result), expand_composites=True)
    ends = {id(x): x for x in parts if isinstance(x, tf.Tensor)}
    region = _Region(name, graph, graph.get_operations()[start:], ends)
    while isinstance(graph, tf.__internal__.FuncGraph):
        setattr(graph, _REGIONS, [*getattr(graph, _REGIONS, ()), region])
        graph = graph.outer_graph
    return result


def gradient(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """Differentiates, and computes calls again for it."""
    graph: Any = tf.compat.v1.get_default_graph()
    regions = getattr(graph, _REGIONS, ())
    if tf.executing_eagerly() or not regions:
        return original(*args, **kwargs)
    start = len(graph.get_operations())
    found = original(*args, **kwargs)
    for each in regions:
        if each.graph is not graph and not each.was_differentiated:
            _warn_of_kept(each)
        each.was_differentiated = True
    here = [each for each in regions if each.graph is graph]
    for use in _uses(here, graph.get_operations()[start:]):
        use.point_at_copies()
    return found


@dataclasses.dataclass
class _Region:
    """The operations of a call, in order."""

    name: str
    graph: Any
    operations: list[tf.Operation]
    ends: dict[int, tf.Tensor]
    """By ids, the arguments and the results, which are kept."""
    was_differentiated: bool = False

    def is_late(self, tensor: tf.Tensor) -> bool:
        """Whether copies read a tensor, a number or a seed, late."""
        dtype = tensor.dtype
        if id(tensor) in self.ends:
            return dtype.is_floating or dtype.is_complex or dtype.is_integer
        return tensor.op.type == "ReadVariableOp" and dtype.is_integer

    def made_again(self) -> set[int]:
        """Returns the ids of the tensors inside that copies compute.

        All others, such as casts of weights, are known from the start: a
        compiler would take the copy for the original.
        """
        found: set[int] = set()
        for operation in self.operations:
            given = operation.inputs
            is_late = any(self.is_late(x) or id(x) in found for x in given)
            if is_late and _is_repeatable(operation):
                found.update(id(x) for x in operation.outputs)
        return found - self.ends.keys()


class _Use:
    """The use that a backward pass makes of a region."""

    def __init__(self, region: _Region, place: int) -> None:
        self.region = region
        self.place = place
        self.inside = region.made_again()
        self.reads: list[tuple[tf.Operation, tf.Tensor]] = []
        self.upstream: dict[int, tf.Tensor] = {}

    def point_at_copies(self) -> None:
        """Lets the backward pass read copies, of the kinds of originals."""
        if not self.upstream:
            return
        again = walks.by_need(
            [tensor.op for _, tensor in self.reads],
            lambda each: [x.op for x in each.inputs if id(x) in self.inside],
        )
        inputs = {id(x): x for each in again for x in each.inputs}
        late = [x for x in inputs.values() if self.region.is_late(x)]
        copies = rewriting.once_known(late, [*self.upstream.values()])
        known = dict(zip(map(id, late), copies, strict=True))
        rewriting.read_copies(self.reads, again, known)
        step = steps.current_fit_step()
        if step is None:
            return
        for tensor in late:
            step.kinds.mark(known[id(tensor)], step.kinds.of(tensor))
        for tensor in (x for each in again for x in each.outputs):
            kind = step.kinds.marked(tensor)
            if kind is not None:
                step.kinds.mark(known[id(tensor)], kind)


def _uses(regions: list[_Region], backward: Iterable[Any]) -> list[_Use]:
    """Returns the uses of regions by a backward pass.

    Copies wait for derivatives that depend on reads of later regions alone. So
    none waits for itself. Regions and operations are in the order of tracing.
    """
    uses = [_Use(each, place) for place, each in enumerate(regions)]
    makers = {key: use for use in uses for key in use.inside}
    first: dict[tf.Operation, int] = {}
    """By operation, the place of the first region on whose reads it depends."""
    ordered = len(uses)  # of operations that TensorFlow runs in order
    for operation in backward:
        if operation.type in _OF_SHAPES:
            continue
        before = (*walks.before(operation), *operation.control_inputs)
        reached = [first[each] for each in before if each in first]
        for tensor in operation.inputs:
            use = makers.get(id(tensor))
            if use is not None:
                use.reads.append((operation, tensor))
                reached.append(use.place)
                use.upstream.update(
                    (id(x), x)
                    for x in operation.inputs
                    if x.dtype.is_floating and first.get(x.op, 0) > use.place
                )
        if operation.op_def.is_stateful:
            ordered = min([ordered, *reached])
            reached.append(ordered)
        first[operation] = min(reached, default=len(uses))
    return uses


def _is_repeatable(operation: tf.Operation) -> bool:
    """Whether an operation gives the same in the backward pass.

    Results that replicas, or turns of one, make together are kept. A loop that
    reads variables is repeated, if nobody has written them since. Others that
    TensorFlow takes for stateful, it would run in the order of tracing.
    """
    step = steps.current_fit_step()
    made = operation.outputs
    if step and any(step.kinds.marked(each) == EQUAL for each in made):
        return False
    if not operation.op_def.is_stateful:
        return effects.is_repeatable(operation)
    handles = [x for x in operation.inputs if x.dtype == tf.resource]
    users = [user for each in handles for user in each.consumers()]
    return bool(users) and all(map(effects.only_reads, users))


def _warn_of_kept(region: _Region) -> None:
    warn(
        f"{region.name} is called in a loop, a branch or a function of "
        "TensorFlow that is differentiated from outside, so its activations "
        "are kept. Call it outside of these, or make the layer that has them "
        "inside of `keras.RematScope`.",
        next(iter(region.operations), None),
    )
