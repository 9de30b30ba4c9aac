"""Values of variables that are lost when XLA's programs get no memory.

TensorFlow gives a program the memory of the variables that it writes. If there
is none for its other needs, that memory is freed, and the variables still point
to it. So they get new handles without a value. The old ones are kept for ever.
"""

from typing import Any

import tensorflow as tf

from keras_conflux._compat import error_texts
from keras_conflux._compat import tensorflow_internals
from keras_conflux._compat import tensorflow_tracing
from keras_conflux._graphs import effects
from keras_conflux._graphs import resources
from keras_conflux._replication import state
from keras_conflux._replication import traced_functions

KIND = "GPU"
"""The kind of the devices whose memory may be full."""
_WHY = "lost when a device ran out of memory"


def after(error: BaseException, program: Any) -> None:
    """Empties variables on GPUs that an XLA program has lost."""
    if not error_texts.is_of_a_full_device(error):
        return
    lost = [each for each in _written(program) if KIND in each.device]
    if lost:
        empty(lost)
        error.add_note(
            "The values of the variables are lost: TensorFlow gave their "
            "memory to the program that needed more. Make the model anew. Or "
            "load its weights and the states of its optimizer and seeds, and "
            "call `model.reset_metrics()`, before it is used again."
        )


def are_missing(error: BaseException) -> bool:
    """Whether an error says that a value is lost."""
    return _WHY in str(error)


def _written(program: Any) -> list[tf.Variable]:
    """Returns the variables that a program writes, each copy for itself.

    A graph lists those of one replica where replicas share a trace.
    """
    handles: dict[int, Any] = {}
    for graph in tensorflow_tracing.traces_of(program):
        handles |= {id(x): x for x, found in effects.writes(graph) if found}
    known = resources.variables_behind(handles.values()).values()
    copies = {id(x): x for each in known for x in state.copies(each)}
    return [x for x in copies.values() if id(x.handle) in handles]


def empty(variables: list[tf.Variable]) -> None:
    """Leaves variables without values, until they are assigned."""
    traced_functions.note_swap(variables, ())
    for variable in variables:
        tensorflow_internals.take_value(variable, _WHY)
