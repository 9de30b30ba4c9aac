"""Calls an operation in all ways that its cases name, and looks at numbers."""

import contextlib
import dataclasses
import inspect
import re
from typing import Any

import tensorflow as tf
from kinds_in_numbers import Numbers
from kinds_in_numbers import are_close
from kinds_in_numbers import blocks_of
from kinds_in_numbers import combined
from kinds_in_numbers import fault
from kinds_in_numbers import unoptimized_session
from rule_cases import L
from rule_cases import flatten
from rule_operands import SIZES
from rule_operands import Operands
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from keras_conflux._batch_analysis import drawn
from keras_conflux._batch_analysis.derivation import NotDerivable
from keras_conflux._batch_analysis.derivation import derivation_of
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.rules import RULES
from keras_conflux._batch_analysis.rules import kinds_of_outputs


def function_of(name):
    """Returns what calls an operation of a type, or `None`."""
    if name == "XlaDynamicUpdateSlice":
        return gen_xla_ops.xla_dynamic_update_slice
    return getattr(tf.raw_ops, name, None)


@dataclasses.dataclass(eq=False)
class Call:
    """An operation in a graph.

    Args:
        operation: It.
        forms: Of its inputs, by name.
        inputs: Their kinds.
        fired: The position of the rule that said something, or `None`.
        kinds: Of its outputs.
    """

    operation: Any
    forms: tuple
    inputs: list[Kind]
    fired: int | None
    kinds: list[Kind]

    def __str__(self):
        shapes = [str(x.shape) for x in self.operation.inputs]
        forms = map(str, self.forms)
        what = ", ".join(map(" ".join, zip(forms, shapes, strict=False)))
        attributes = dict(self.operation.node_def.attr)
        given = {k: v for k, v in attributes.items() if not v.type}
        brief = " ".join(str(given).split())[:300]
        return f"{self.operation.type}({what}) {brief}"


class Calls:
    """Calls of a type of operation, and what they give.

    Args:
        name: The type.
    """

    def __init__(self, name):
        self.name = name
        self.rules = RULES[name]
        self.is_random = name in drawn.RULES
        self.operands = Operands()
        self.calls = []
        self.failed = []
        self._before = []
        self._stacked = {}
        self._scopes = {}
        self.not_apart = []

    def operand(self, slot, form, place):
        """Returns a tensor for an input, or `None` if there is none."""
        if form == "constant":
            with self.operands.graph.as_default():
                dtype = tf.string if slot.value.dtype == object else None
                return tf.constant(slot.value, dtype)
        if form == "made":
            return slot.make(self.operands, self._before)
        return self.operands(form, slot.domain, slot.shape, place)

    def called(self, case, flat):
        """Returns an operation on these inputs."""
        values = iter(flat)
        given = [
            [next(values) for _ in slot]
            if isinstance(slot, L)
            else next(values)
            for slot in case.slots
        ]
        function = function_of(self.name)
        names = inspect.signature(function).parameters
        arguments = dict(zip(names, given, strict=False))
        with self.operands.graph.as_default():
            result = function(**arguments, **case.attributes)
        while not tf.is_tensor(result):
            result = result[0]
        return result.op

    @contextlib.contextmanager
    def session(self):
        """Opens a session in which variables have their values."""
        self._by_id = {id(call): call for call in self.calls}
        with (
            self.operands.graph.as_default(),
            unoptimized_session(self.operands.graph) as session,
        ):
            for operation in self._before:
                session.run(operation)
            yield session

    def wanted(self):
        """Returns what is computed of each output of a call."""
        return {
            (id(call), i): self._fetched(call, i)
            for call in self.calls
            for i in range(len(call.kinds))
        }

    def _fetched(self, call, i):
        output = call.operation.outputs[i]
        if output.dtype != tf.variant:
            return output
        key = id(call), i
        if key in self._stacked:
            return self._stacked[key]
        dtype = call.operation.get_attr("element_dtype")
        with self._scope(call):
            stacked = tf.raw_ops.TensorListStack(
                input_handle=output, element_shape=-1, element_dtype=dtype
            )
        kind = call.kinds[i]
        if kind.role is Role.ROWS:
            call.kinds[i] = kind.at(kind.axis + 1)
        self._stacked[key] = stacked
        return stacked

    def compute(self, session, wanted, sources, feeds=None):
        """Computes outputs and sources for the parts, and for the batch."""
        blocks = {}
        for key, tensor in wanted.items():
            with self._scope(self._by_id[key[0]]):
                found = blocks_of(tensor, self._kind_at(key))
            if found:
                blocks[*key, "blocks"] = found
        fetches = {**wanted, **blocks, **sources}
        for key, source in sources.items():
            found = blocks_of(source, self.operands.kinds.of(source))
            if found:
                fetches[key, "blocks"] = found
        values = self._each(session, fetches, feeds or self.operands.feeds)
        self.numbers = {}
        for call in self.calls:
            self.numbers[id(call)] = [
                self.numbers_of(values, (id(call), i), (id(call), i, "blocks"))
                for i in range(len(call.kinds))
            ]
        return values

    @contextlib.contextmanager
    def _scope(self, call):
        """Notes of which call it is what is put into the graph."""
        with tf.name_scope("of_call") as scope:
            self._scopes[scope.split("/")[0]] = call
            yield

    def _kind_at(self, key):
        return self._by_id[key[0]].kinds[key[1]]

    def numbers_of(self, values, key, of_blocks):
        """Returns the numbers of an output, or of a source."""
        parts = [each[key] for each in values]
        found = None
        if of_blocks in values[0]:
            found = [each[of_blocks] for each in values[:-1]]
        return Numbers(parts[:-1], parts[-1], SIZES, found)

    def _each(self, session, fetches, feeds):
        """Leaves out calls that cannot be run, as they join other lengths.

        So it does with those whose rows cannot be taken apart as is claimed.
        """
        while True:
            try:
                return [session.run(fetches, feed) for feed in feeds]
            except tf.errors.OpError as error:
                name = _failed_operation(error)
                gone = [c for c in self.calls if c.operation.name == name]
                taken_apart = self._scopes.get(name.split("/")[0])
                if taken_apart in self.calls:
                    gone = [taken_apart]
                    self.not_apart.append(id(taken_apart))
                if not gone:
                    raise
                for call in gone:
                    self.failed.append((call, error.message))
                    self.calls.remove(call)
                ids = [id(call) for call in gone]
                fetches = {
                    key: value
                    for key, value in fetches.items()
                    if not (isinstance(key, tuple) and key[0] in ids)
                }


class Walk(Calls):
    """The calls of which a rule says something.

    Args:
        name: The type of operation.
        cases: How it is called.
    """

    def __init__(self, name, cases):
        super().__init__(name)
        for case in cases:
            for forms in case.choices():
                self._add(case, forms)
        with self.session() as session:
            wanted = self.wanted()
            derivations = self._derivations(wanted)
            self._sources = {
                key: source
                for found in derivations.values()
                for key, source in found.sources.items()
            }
            computed = self.compute(session, wanted, self._sources)
            self._check_derived(session, derivations, computed)

    def _add(self, case, forms):
        """Calls the operation, if a rule may say something of it."""
        flat = [
            self.operand(slot, form, place)
            for place, (slot, form) in enumerate(
                zip(flatten(case.slots), forms, strict=True)
            )
        ]
        if any(each is None for each in flat):
            return
        kinds = [self.operands.kinds.of(each) for each in flat]
        if all(kind == EQUAL for kind in kinds) and not self.is_random:
            return
        asked = [kind.form for kind in kinds]
        if not any(each.does_accept(asked) for each in self.rules):
            return
        try:
            operation = self.called(case, flat)
        except ValueError:  # shapes that do not fit
            return
        fired = fired_rule(self.rules, operation, kinds)
        if fired is not None:
            found = kinds_of_outputs(operation, kinds)
            self.calls.append(Call(operation, forms, kinds, fired, found))

    def _derivations(self, wanted):
        found = {}
        for key, tensor in wanted.items():
            if self._is_derived(tensor):
                with contextlib.suppress(NotDerivable):
                    found[key] = derivation_of(tensor, self.operands.kinds)
        return {
            key: each
            for key, each in found.items()
            if all(x.dtype != tf.variant for x in each.sources.values())
        }

    def _is_derived(self, tensor):
        kind = self.operands.kinds.of(tensor)
        is_mixed = kind.role is Role.ROWS and kind.depends_on_other_samples
        return (
            (kind.role is Role.DERIVED or is_mixed)
            and tensor.dtype != tf.variant
            and not _is_unwritten(tensor)
        )

    def _check_derived(self, session, derivations, values):
        """Computes once more what is derived, from what parts combine to."""
        known, feed = {}, dict(self.operands.feeds[-1])
        for key, source in self._sources.items():
            kind = self.operands.kinds.of(source)
            if kind.role in (Role.EQUAL, Role.RANDOM):
                known[key] = source
                continue
            numbers = self.numbers_of(values, key, (key, "blocks"))
            known[key] = tf.compat.v1.placeholder(source.dtype, source.shape)
            feed[known[key].name] = combined(kind, numbers)
        alive = {id(call) for call in self.calls}
        again = {
            key: found.recomputed(known)
            for key, found in derivations.items()
            if key[0] in alive
        }
        got = session.run(again, feed)
        self.wrongly_derived = [
            key
            for key, value in got.items()
            if not are_close(value, values[-1][key])
        ]


def _failed_operation(error):
    """Returns the name of what failed, or has no kernel."""
    if error.op is not None:
        return error.op.name
    found = re.search(r"{{node ([\w/.]+)}}", error.message)
    return found[1] if found else ""


def fired_rule(rules, operation, kinds):
    """Returns the position of the first rule that is sure, or `None`."""
    forms = [kind.form for kind in kinds]
    given = [dataclasses.replace(kind, mixed=False) for kind in kinds]
    for place, each in enumerate(rules):
        if each.does_accept(forms) and each.claim(operation, given) is not None:
            return place
    return None


def _is_unwritten(tensor):
    """Whether an operation leaves in a result what was in memory before.

    Normalization by given statistics has nothing for its gradient to reserve.
    """
    operation = tensor.op
    return (
        re.fullmatch("FusedBatchNorm(V[23])?", operation.type) is not None
        and not operation.get_attr("is_training")
        and tensor.value_index > 2
    )


def faults(walk):
    """Yields what numbers say against the claims."""
    for call in walk.calls:
        for i, kind in enumerate(call.kinds):
            if walk.is_random and kind.role is Role.ROWS:
                kind = dataclasses.replace(kind, mixed=True)
            wrong = fault(kind, walk.numbers[id(call)][i])
            if wrong:
                yield f"{call}: {kind}: {wrong}"
            if (id(call), i) in walk.wrongly_derived:
                yield f"{call}: computed once more"
