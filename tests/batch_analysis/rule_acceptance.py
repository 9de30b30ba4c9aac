"""Rules that accept one form of input more, which numbers have to refute.

A rule says which forms of its inputs it accepts. For each of its inputs and
each other form, here is a rule that accepts this as well. What it then claims
has to be wrong in the numbers of some call, or no more than what holds anyway.
"""

import dataclasses
import itertools

import tensorflow as tf
from kinds_in_numbers import fault
from rule_cases import K
from rule_cases import L
from rule_cases import Made
from rule_cases import V
from rule_cases import are_aligned
from rule_cases import flatten
from rule_operands import BATCH
from rule_operands import FORMS
from rule_operands import OTHERS
from rule_operands import SHAPES
from rule_walk import Call
from rule_walk import Calls

from keras_conflux._batch_analysis import rule
from keras_conflux._batch_analysis.kinds import COUNT
from keras_conflux._batch_analysis.kinds import COUNTED
from keras_conflux._batch_analysis.kinds import DERIVED
from keras_conflux._batch_analysis.kinds import EQUAL
from keras_conflux._batch_analysis.kinds import MEAN
from keras_conflux._batch_analysis.kinds import OPAQUE
from keras_conflux._batch_analysis.kinds import RANDOM
from keras_conflux._batch_analysis.kinds import TOTAL
from keras_conflux._batch_analysis.kinds import Entries
from keras_conflux._batch_analysis.kinds import Form
from keras_conflux._batch_analysis.kinds import Kind
from keras_conflux._batch_analysis.kinds import Role
from keras_conflux._batch_analysis.kinds import mixed_rows
from keras_conflux._batch_analysis.kinds import rows
from keras_conflux._batch_analysis.kinds import shape
from keras_conflux._batch_analysis.rule import Rule

REFUTED = "refuted"
NO_MORE = "no more claimed"
NO_CALL = "no such call"
RAISES = "raises on one device"
RIGHT = "right"
NO_CASE = "no case"
CAUGHT = (REFUTED, NO_MORE, NO_CALL, RAISES)
"""All but what has to be listed as equivalent."""

NAMES = {
    **dict.fromkeys(("rows", "some", "pairs"), Form.ROWS),
    **dict.fromkeys(("mixed", "mixed pairs"), Form.ROWS),
    **{"joined": Form.JOINED, "divided": Form.DIVIDED},
    **{"positions": Form.PLACES, "places": Form.PLACES},
    **{"counts": Form.COUNT, "count": Form.COUNT},
    **dict.fromkeys(("shape", "shape of pairs", "shape of some"), Form.SHAPE),
    **{
        "sizes": Form.SHAPE,
        "two sizes": Form.SHAPE,
        "total": Form.TOTAL,
        "counted": Form.COUNTED,
    },
    **{"long opaque": Form.OPAQUE, "long derived": Form.DERIVED},
    **{"mean": Form.MEAN, "derived": Form.DERIVED, "opaque": Form.OPAQUE},
    **{"equal": Form.EQUAL, "constant": Form.EQUAL, "random": Form.RANDOM},
}
"""The forms of the operands that have these names."""
STEPS = (1, -1, 2, 5)
MOST_CALLS = 32
"""How many calls of a mutant are looked at."""
MOST_RUN = 6
"""Of how many the numbers are computed, if more is claimed of them."""


@dataclasses.dataclass(frozen=True)
class Wider:
    """A rule that accepts more.

    Args:
        place: Of the rule, among those of a type.
        slot: Of the input, among the forms that the rule lists.
        form: What it accepts, too.
    """

    place: int
    slot: int
    form: Form

    def __str__(self):
        return f"{self.place}.{self.slot} {self.form.name}"

    def applied(self, rules):
        """Returns the rules of a type, one of which accepts more."""
        old = rules[self.place]
        slots = [i for i, each in enumerate(old.accepts) if each is not ...]
        accepts = list(old.accepts)
        accepts[slots[self.slot]] |= self.form
        new = Rule(old.claim, *accepts)
        return (*rules[: self.place], new, *rules[self.place + 1 :])


def wider(rules):
    """Yields all rules that accept one form more at one input."""
    for place, each in enumerate(rules):
        forms = [form for form in each.accepts if form is not ...]
        for slot, accepted in enumerate(forms):
            for form in Form:
                if not form & accepted:
                    yield Wider(place, slot, form)


def slots_of_inputs(accepts, count):
    """Returns for each of `count` inputs which form in `accepts` is its own."""
    forms = [form for form in accepts if form is not ...]
    if ... not in accepts:
        return list(range(count)) if len(forms) == count else None
    repeated = accepts.index(...) - 1
    times = count - len(forms) + 1
    if times < 1:
        return None
    after = range(repeated + 1, len(forms))
    return [*range(repeated), *[repeated] * times, *after]


class Acceptance(Calls):
    """What numbers say of rules that accept more.

    Args:
        name: The type of operation.
        cases: How it is called.
    """

    def __init__(self, name, cases):
        super().__init__(name)
        self._cases = cases
        self._operations = {}
        self.asked = {
            mutant: self._asked(mutant) for mutant in wider(self.rules)
        }
        self.calls = [
            call
            for calls in self.asked.values()
            if isinstance(calls, list)
            for call in calls
        ]
        with self.session() as session:
            self._run(session)
            self.verdicts = {
                mutant: self._verdict(session, given)
                if isinstance(given, list)
                else given
                for mutant, given in self.asked.items()
            }

    def _asked(self, mutant):
        """Returns calls of which a mutant claims more, or a verdict."""
        rules = mutant.applied(self.rules)
        found, more = [], []
        candidates = itertools.islice(self._candidates(mutant), MOST_CALLS)
        is_asked = False
        for candidate in candidates:
            is_asked = True
            operation, kinds = candidate.operation, candidate.kinds
            now = rule.apply(self.rules, operation, kinds)
            try:
                then = rule.apply(rules, operation, kinds)
            except (AttributeError, IndexError, TypeError, ValueError):
                return REFUTED
            if all(map(_says_no_more, then, now)):
                continue
            more.append(candidate)
            if candidate.is_real:
                forms = candidate.forms
                found.append(Call(operation, forms, kinds, mutant.place, then))
            if len(found) == MOST_RUN:
                break
        if found:
            return found
        if more and any(
            _can_be(mutant.form, dtype)
            for each in more
            for dtype in _dtypes(each.operation, each.position)
        ):
            return NO_CASE
        return NO_MORE if is_asked and not more else NO_CALL

    def _candidates(self, mutant):
        """Yields calls that a mutant accepts, of each case in turn."""
        cases = self._cases
        if mutant.form is Form.SHAPE:
            cases = [_of_integers(case) for case in cases]
        waiting = [
            self._of_case(mutant, case, turn) for turn, case in enumerate(cases)
        ]
        while waiting:
            for each in list(waiting):
                found = next(each, None)
                if found is None:
                    waiting.remove(each)
                else:
                    yield found

    def _of_case(self, mutant, case, turn):
        """Yields calls of one case, in turn with another operand first."""
        accepts = self.rules[mutant.place].accepts
        inputs = flatten(case.slots)
        slots = slots_of_inputs(accepts, len(inputs))
        forms = [form for form in accepts if form is not ...]
        for position, slot in enumerate(slots or []):
            if slot != mutant.slot:
                continue
            choices = [
                _names(each, forms[slots[i]])
                if i != position
                else _turned(
                    _names_of(_fit_for(mutant.form, each), mutant.form), turn
                )
                for i, each in enumerate(inputs)
            ]
            for names in itertools.product(*choices):
                if case.is_aligned and not are_aligned(_words(names)):
                    continue
                found = self._candidate(mutant, case, names, position)
                if found is not None:
                    yield found

    def _candidate(self, mutant, case, names, position):
        inputs = flatten(case.slots)
        inputs[position] = _fit_for(mutant.form, inputs[position])
        flat = [
            self._given(slot, name, i)
            for i, (slot, name) in enumerate(zip(inputs, names, strict=True))
        ]
        pretended = None
        if flat[position] is None:
            slot = inputs[position]
            flat[position], pretended = self._pretended(slot, mutant, position)
        if any(each is None for each in flat):
            return None
        kinds = [self.operands.kinds.of(each) for each in flat]
        if pretended is not None:
            kinds[position] = pretended
        if all(kind == EQUAL for kind in kinds) and not self.is_random:
            return None
        given = [kind.form for kind in kinds]
        accepted = mutant.applied(self.rules)[mutant.place]
        if kinds[position].form is not mutant.form or (
            not accepted.does_accept(given)
        ):
            return None
        operation = self._operation(case, flat)
        if operation is None:
            return None
        return Candidate(operation, names, kinds, position, pretended is None)

    def _given(self, slot, name, place):
        if isinstance(name, tuple):
            return self.operands.instead_of(slot.value, *name)
        return self.operand(slot, name, place)

    def _pretended(self, slot, mutant, place):
        """Returns a tensor that is of another kind, and what is said of it."""
        is_of_rows = mutant.form & (_OF_ROWS | Form.ROWS)
        if isinstance(slot, K):
            name = "rows" if is_of_rows and slot.value.ndim else "opaque"
            tensor = self.operands.instead_of(slot.value, name, 1)
        elif isinstance(slot, Made):
            tensor = self.operand(slot, "made", place)
        else:
            name = "rows" if is_of_rows and None in slot.shape else "equal"
            tensor = self.operand(slot, name, place)
        if tensor is None or tensor.shape.rank is None:
            return tensor, _PRETENDED.get(mutant.form)
        if is_of_rows and not tensor.shape.rank:
            return None, None
        if mutant.form is Form.SHAPE and tensor.shape.rank != 1:
            return None, None
        kind = _PRETENDED[mutant.form]
        if is_of_rows and None in tensor.shape.as_list():
            kind = kind.at(tensor.shape.as_list().index(None))
        return tensor, kind

    def _operation(self, case, flat):
        key = repr(case.attributes), *map(id, flat)
        if key not in self._operations:
            try:
                self._operations[key] = self.called(case, flat)
            except (TypeError, ValueError):  # shapes that do not fit
                self._operations[key] = None
        return self._operations[key]

    def _run(self, session):
        """Computes all calls but those that may not be possible."""
        self._numbers, self._own_draws = {}, {}
        self._compute(
            session, [x for x in self.calls if x.forms == _words(x.forms)]
        )

    def _compute(self, session, calls):
        drawn = [call for call in calls if "random" in _words(call.forms)]
        self._own_draws.update(
            self._computed(session, drawn, self.operands.own_draws)
        )
        self._numbers.update(
            self._computed(session, calls, self.operands.feeds)
        )

    def _computed(self, session, calls, feeds):
        if not calls:
            return {}
        given = [
            {**feed, **own}
            for feed, own in zip(self.operands.feeds, feeds, strict=True)
        ]
        self.calls = [*calls]
        self.compute(session, self.wanted(), {}, given)
        return self.numbers

    def _verdict(self, session, calls):
        """Returns what numbers say of one mutant."""
        verdict = RAISES
        for call in calls:
            if call.forms != _words(call.forms):
                self._compute(session, [call])
            if id(call) in self.not_apart:
                return REFUTED
            if id(call) not in self._numbers:
                continue
            verdict = RIGHT
            if any(self._faults(call)):
                return REFUTED
        return verdict

    def _faults(self, call):
        """Yields what is wrong with the claims of a call, or `None`."""
        for i, kind in enumerate(call.kinds):
            if _is_not_known(kind, call.inputs):
                yield "it cannot be computed"
            yield self._fault(kind, call, self._numbers[id(call)][i])
            if id(call) in self._own_draws:
                numbers = self._own_draws[id(call)][i]
                yield self._fault_of_draws(kind, numbers)

    def _fault(self, kind, call, numbers):
        """Returns what is wrong if all replicas draw the same numbers."""
        if call.operation.op_def.is_stateful:
            return self._fault_of_draws(kind, numbers)
        return fault(EQUAL if kind == RANDOM else kind, numbers)

    def _fault_of_draws(self, kind, numbers):
        """Returns what is wrong if each replica draws for itself."""
        if kind.role is Role.ROWS:
            kind = dataclasses.replace(kind, mixed=True)
        return fault(kind, numbers)


@dataclasses.dataclass
class Candidate:
    """A call that only a mutant accepts.

    Args:
        operation: It.
        forms: Of its inputs, by name.
        kinds: Of its inputs.
        position: Of the input that is of another form.
        is_real: Whether that has a tensor, or is said to be what it is not.
    """

    operation: object
    forms: tuple
    kinds: list
    position: int
    is_real: bool


_OF_ROWS = Form.JOINED | Form.DIVIDED | Form.PLACES
_PRETENDED = {
    Form.EQUAL: EQUAL,
    Form.RANDOM: RANDOM,
    Form.ROWS: rows(0),
    Form.JOINED: Kind(Role.ROWS, entries=Entries.SAME, blocks=2),
    Form.DIVIDED: Kind(Role.ROWS, divided=True),
    Form.PLACES: Kind(Role.ROWS, entries=Entries.VARYING, are_positions=True),
    Form.COUNT: COUNT,
    Form.SHAPE: shape(0),
    Form.TOTAL: TOTAL,
    Form.COUNTED: COUNTED,
    Form.MEAN: MEAN,
    Form.DERIVED: DERIVED,
    Form.OPAQUE: OPAQUE,
}


def _words(forms):
    return tuple(x if isinstance(x, str) else x[0] for x in forms)


def _fit_for(form, slot):
    """Returns an input that may be of a form, if it was of a fixed shape."""
    if isinstance(slot, (K, Made)):
        return slot
    if slot.forms == SHAPES:
        return K([BATCH if size is None else size for size in slot.shape])
    if form is Form.SHAPE and len(slot.shape) != 1:
        return dataclasses.replace(slot, shape=(2,))
    is_open = form & (_OF_ROWS | Form.ROWS | Form.OPAQUE | Form.DERIVED)
    if is_open and slot.shape and None not in slot.shape:
        return dataclasses.replace(slot, shape=(None, *slot.shape[1:]))
    return slot


def _of_integers(case):
    """Returns a case with integers for numbers that are none."""

    def changed(slot):
        if isinstance(slot, L):
            return L(*map(changed, slot))
        if isinstance(slot, V) and slot.domain in _NUMBERS:
            return dataclasses.replace(slot, domain="int")
        if isinstance(slot, K) and slot.value.dtype.kind == "f":
            return K(slot.value.astype("int32"))
        return slot

    return dataclasses.replace(case, slots=tuple(map(changed, case.slots)))


_NUMBERS = ("real", "unit", "large", "real32", "unit32")


def _names(slot, accepted):
    """Returns what an input may be that a rule accepts."""
    if isinstance(slot, Made):
        return slot.forms
    return [name for name in slot.forms if NAMES[name] & accepted]


def _turned(names, turn):
    """Returns the names with another one first."""
    first = turn % max(len(names), 1)
    return [*names[first:], *names[:first]]


def _names_of(slot, form):
    """Returns what an input may be to be of a form."""
    if isinstance(slot, Made):
        return slot.forms
    if isinstance(slot, K) and form is Form.EQUAL:
        return slot.forms
    names = [name for name in _OPERANDS if NAMES[name] is form]
    if isinstance(slot, K):
        names = [
            x for x in names if x in _OF_CONSTANTS and x not in slot.without
        ]
        return [(x, step) for x in names for step in STEPS] or [("none", 0)]
    return names


_OPERANDS = (*FORMS, *OTHERS)
_OF_CONSTANTS = (
    *("random", "rows", "joined", "positions", "count", "sizes", "total"),
    *("counted", "mean", "derived", "opaque"),
)


def _is_not_known(kind, inputs):
    """Whether values are said to be DERIVED from what is OPAQUE."""
    return kind.mixed and OPAQUE in inputs


def _says_no_more(then, now):
    """Whether a claim is at most what holds anyway."""
    if then.role in (Role.DERIVED, Role.OPAQUE):
        return True
    if now.role is Role.ROWS and then == mixed_rows([now], now.axis):
        return True
    return then == now or (
        then.role is now.role
        and then.role not in (Role.ROWS, Role.SHAPE)
        and then.counted == now.counted
    )


def _dtypes(operation, position):
    """Returns the types that an operation takes for an input."""
    place = 0
    for each in operation.op_def.input_arg:
        count = 1
        if each.number_attr:
            count = operation.get_attr(each.number_attr)
        elif each.type_list_attr:
            count = len(operation.get_attr(each.type_list_attr))
        if place <= position < place + count:
            break
        place += count
    if not each.type_attr:
        return [tf.as_dtype(each.type)] if each.type else [tf.float64]
    for attribute in operation.op_def.attr:
        if attribute.name == each.type_attr:
            allowed = attribute.allowed_values.list.type
            return [tf.as_dtype(x) for x in allowed] or [tf.float64, tf.int32]
    return []


def _can_be(form, dtype):
    """Whether tensors of a type may be of a form."""
    is_float = dtype.is_floating or dtype.is_complex
    if form & (Form.MEAN | Form.DIVIDED):
        return is_float
    if form is Form.SHAPE:
        return dtype in (tf.int32, tf.int64)
    if form & (Form.PLACES | Form.COUNT | Form.TOTAL | Form.COUNTED):
        return is_float or dtype.is_integer
    return True
