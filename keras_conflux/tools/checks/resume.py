"""Whether a training that is killed goes on where it was."""

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from keras_conflux.tools.checks.progress import doing
from keras_conflux.tools.checks.table import Passed
from keras_conflux.tools.checks.table import Wrong

_TOLERANCE = 1e-4
"""On GPUs, where sums are added up in any order."""
_REPORT = "`keras-conflux env`, and report both: the package promises this"
_KILLED = """
import sys
import keras_conflux as kc
from keras_conflux.tools.checks import trainings
devices, folder = kc.devices(int(sys.argv[1])), sys.argv[2]
callbacks = [kc.Resume(folder, every=1), trainings.Kill(folder)]
trainings.trained(devices, False, callbacks)
"""


def check(options: argparse.Namespace) -> Passed:
    """Kills a training, takes it up again, and compares the result."""
    import keras_conflux as kc
    from keras_conflux.tools.checks import trainings

    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="conflux-check-", dir=directory))
    devices = kc.devices(options.devices)
    try:
        doing("a training that is killed")
        killed = subprocess.run(
            [sys.executable, "-c", _KILLED, str(len(devices)), str(folder)],
            capture_output=True,
            text=True,
        )
        if killed.returncode != -signal.SIGKILL:
            last = (killed.stderr.strip().splitlines() or ["it said nothing"])[
                -1
            ]
            raise Wrong(f"a training with kc.Resume failed: {last}", _REPORT)
        doing("the same training, resumed")
        resume = kc.Resume(folder)
        found = trainings.trained(devices, False, [resume, trainings.Kill()])
        at = resume.resumed_at
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    doing("a training that is not killed")
    expected = trainings.trained(devices, False)
    difference = trainings.largest_difference(found, expected)
    limit = _TOLERANCE if options.gpus else 0
    if at is None or not difference <= limit:
        raise Wrong(
            f"a training that was killed and resumed at {at} differs by "
            f"{difference:.1e} from one that was not",
            _REPORT,
        )
    epoch, step = at
    return Passed(
        f"a training was killed, went on in epoch {epoch}, step {step}, and "
        f"differs by {difference:.0e}",
        {"difference": difference},
    )
