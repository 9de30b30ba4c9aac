"""How Slurm abbreviates lists of nodes and of numbers."""

import itertools
import re

from keras_conflux._common.errors import ClusterError

# Commas in brackets belong to a name, as in `gpu[01-03,7],login1`.
_NAME = re.compile(r"(?:[^,\[\]]|\[[^\[\]]*\])+")
_PARTS = re.compile(r"\[([^\]]*)\]|([^\[]+)")
_REPEATED = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodes(nodes: str) -> list[str]:
    """Returns the names in a list of nodes.

    Args:
        nodes: Names separated by commas. A name may have ranges of numbers in
            brackets, at any place; leading zeros are kept.

    Returns:
        The names, in the order of the list.

    Raises:
        ClusterError: If the text is no list of nodes.

    Example:
        ```python
        expand_nodes("gpu[01-03,7],login1")
        # ["gpu01", "gpu02", "gpu03", "gpu7", "login1"]
        ```
    """
    names = _NAME.findall(nodes)
    if ",".join(names) != nodes or not names:
        raise _malformed(nodes)
    return [each for name in names for each in _expand_name(name, nodes)]


def expand_counts(counts: str) -> list[int]:
    """Returns the numbers in a list such as `"2(x3),1"`.

    Args:
        counts: Numbers separated by commas. `2(x3)` stands for `2,2,2`.

    Returns:
        The numbers, in the order of the list.

    Raises:
        ClusterError: If the text is no list of numbers.
    """
    found = [_REPEATED.fullmatch(part) for part in counts.split(",")]
    expanded = []
    for match in found:
        if match is None:
            raise ClusterError(
                "Expected Slurm to list numbers of tasks such as '2(x3),1'. "
                f"Got {counts!r}."
            )
        expanded += [int(match[1])] * int(match[2] or 1)
    return expanded


def _expand_name(name: str, nodes: str) -> list[str]:
    choices = [
        [text] if text else _expand_ranges(ranges, nodes)
        for ranges, text in _PARTS.findall(name)
    ]
    return ["".join(parts) for parts in itertools.product(*choices)]


def _expand_ranges(ranges: str, nodes: str) -> list[str]:
    expanded = []
    for part in ranges.split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (first.isdecimal() and last.isdecimal()):
            raise _malformed(nodes)
        numbers = range(int(first), int(last) + 1)
        expanded += [str(number).zfill(len(first)) for number in numbers]
    return expanded


def _malformed(nodes: str) -> ClusterError:
    return ClusterError(
        "Expected Slurm to list nodes such as 'gpu[01-03,7],login1'. Got "
        f"{nodes!r}. Give the addresses of all processes instead, in "
        "KERAS_DISTRIBUTION_JOB_ADDRESSES."
    )
