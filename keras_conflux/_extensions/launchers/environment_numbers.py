"""Numbers in environment variables."""

from collections.abc import Mapping

from keras_conflux._common.errors import ClusterError


def integer(environ: Mapping[str, str], name: str) -> int | None:
    """Returns the number from 0 in a variable, `None` if it is not set."""
    text = environ.get(name, "").strip()
    if not text:
        return None
    if not (text.isascii() and text.isdecimal()):
        raise ClusterError(
            f"Expected the environment variable {name} to be a number from "
            f"0. Got {text!r}."
        )
    return int(text)


def rank_and_count(
    environ: Mapping[str, str], rank_name: str, count_name: str
) -> tuple[int, int] | None:
    """Returns which process this is, and how many; `None` if none says so."""
    rank = integer(environ, rank_name)
    count = integer(environ, count_name)
    if rank is None and count is None:
        return None
    if rank is None or count is None:
        given = count_name if rank is None else rank_name
        missing = rank_name if rank is None else count_name
        raise ClusterError(
            f"The environment variable {given} is set, but {missing} is not. "
            "A launcher sets both: start the program through it, set "
            f"{missing} as well, or unset {given}."
        )
    if rank >= count:
        raise ClusterError(
            f"Expected {rank_name} to be below {count_name}. Got "
            f"{rank_name}={rank} and {count_name}={count}."
        )
    return rank, count
