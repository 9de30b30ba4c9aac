"""Prints which processes a launcher has started.

    srun --ntasks=3 python tests/processes/print_cluster.py
    mpirun -n 3 python tests/processes/print_cluster.py

It needs no TensorFlow: the package's own __init__, which imports it, is left
out.
"""

import dataclasses
import json
import pathlib
import sys
import types

package = types.ModuleType("keras_conflux")
root = pathlib.Path(__file__).resolve().parents[2]
package.__path__ = [str(root / "keras_conflux")]
sys.modules["keras_conflux"] = package

from keras_conflux._cluster.launchers import find_cluster  # noqa: E402
from keras_conflux._extensions.launchers import known  # noqa: E402

known.install()
cluster = find_cluster()
# One call, so that lines of several processes do not mix.
line = json.dumps(cluster and dataclasses.asdict(cluster))
sys.stdout.write(f"{line}\n")
