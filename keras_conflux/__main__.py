"""The command line of the package: `python -m keras_conflux`."""

import sys

from keras_conflux.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
