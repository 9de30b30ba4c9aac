"""`conflux bench` measures training and collectives on this machine."""

from typing import Any

from keras_conflux.bench import __main__ as bench


def add_to(subcommands: Any) -> None:
    """Adds this subcommand to the parser of the command line.

    Args:
        subcommands: What `ArgumentParser.add_subparsers` returned.
    """
    parser = subcommands.add_parser(
        "bench",
        help="measure training and collectives",
        description=(
            "Measures `fit` and collectives on this machine, each in a process "
            "of its own. `python -m keras_conflux.bench` is the same."
        ),
        allow_abbrev=False,
    )
    bench.add_options(parser)
    parser.set_defaults(main=bench.measure)
