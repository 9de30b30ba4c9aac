"""Values of each process, gathered by all."""

from typing import Any

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import broadcast_bytes
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.stored_arrays import Arrays
from keras_conflux._extensions.resume.stored_arrays import from_bytes
from keras_conflux._extensions.resume.stored_arrays import to_bytes


def gathered(what: str, own: Any) -> list[Any]:
    """Returns the values of all processes, in their order.

    Args:
        what: The name of the values. All must give the same.
        own: The values of this process, which are plain.
    """
    arrays: Arrays = {}
    content = to_bytes(plain_values.encode(own, arrays), arrays)
    lengths = all_gather_json(what, len(content))
    return [
        plain_values.decode(
            *from_bytes(broadcast_bytes(index, content, length))
        )
        for index, length in enumerate(lengths)
    ]
