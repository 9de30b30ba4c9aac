"""Is run when `keras-conflux` is typed; also `python -m keras_conflux_command`.

`import keras_conflux` imports TensorFlow, because it changes Keras there and
then. That takes seconds, and memory that a launcher of processes would hold for
nothing. So the command imports modules of the package without running the
package's own `__init__`. `keras-conflux env`, which needs that, runs it later.
"""

import importlib.util
import sys


def main() -> int:
    """Runs the subcommand that the command line names.

    Returns:
        The exit status.
    """
    spec = importlib.util.find_spec("keras_conflux")
    assert spec is not None  # it is of this distribution
    sys.modules["keras_conflux"] = importlib.util.module_from_spec(spec)
    from keras_conflux.tools.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(main())
