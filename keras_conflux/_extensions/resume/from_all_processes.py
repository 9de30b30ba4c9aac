"""What each process knows of itself, told to all."""

from typing import Any

from keras_conflux._cluster.agreement import all_gather_json
from keras_conflux._cluster.agreement import broadcast_bytes
from keras_conflux._extensions.resume import plain_values
from keras_conflux._extensions.resume.stored_arrays import Arrays
from keras_conflux._extensions.resume.stored_arrays import from_bytes
from keras_conflux._extensions.resume.stored_arrays import to_bytes


def gathered(what: str, own: Any) -> list[Any]:
    """Returns what each process has, in their order.

    Args:
        what: What this is, in words. All must say the same.
        own: What this process has: plain values.
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
