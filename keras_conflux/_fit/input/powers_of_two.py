"""Powers of two, which numbers of batches are rounded down to.

A graph is traced for each number of batches that are stacked, so these numbers
take few values.
"""


def power_of_two(maximum: int) -> int:
    """Returns the largest power of two up to `maximum`, at least 1."""
    return 1 << max(0, maximum.bit_length() - 1)
