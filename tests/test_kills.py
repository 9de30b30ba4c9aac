"""Trainings that are killed for real, and whether the judge of them can fail.

`kills.py` draws many more, by hand.
"""

import signal

import pytest
from conftest import ON_GPU
from killed_training import FAULTS
from killed_training import Attempt
from killed_training import End
from killed_training import Training
from kills import Case
from kills import Judge
from kills import drawn

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(ON_GPU, reason="its processes are started on CPUs"),
]
TRAINING = Training(
    data="PyDataset",
    epochs=2,
    every=1,
    accumulation=2,
    steps_per_execution=1,
    dropout=True,
    validation=True,
    callbacks=("own", "csv"),
)
END = End(int(signal.SIGKILL), "on_train_batch_begin", 9)


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_a_fault_is_found(tmp_path, fault):
    case = Case("case", TRAINING, (Attempt(1, 0, END), Attempt(1, 0)))
    judge = Judge(tmp_path, fault)
    assert (judge.failure(case) is None) == (fault is None)
    assert judge.ends == {"SIGKILL, one by one: -9": 1}


@pytest.mark.parametrize("number", range(4))
def test_a_drawn_training(tmp_path, number):
    assert Judge(tmp_path).failure(drawn(0, number)) is None
