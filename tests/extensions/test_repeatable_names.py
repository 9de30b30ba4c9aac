"""Functions that are traced for the cache on disk have the same names again."""

import threading

from tensorflow.python.framework import ops

from keras_conflux._extensions.program_cache.compat import repeatable_names


def names(program: str) -> list[int]:
    with repeatable_names(program):
        return [ops.uid() for _ in range(3)]


def test_names_depend_on_the_program_and_occur_once():
    first, other, again = names("a"), names("b"), names("a")
    assert len({*first, *other, *again}) == 9
    assert first == list(range(first[0], first[0] + 3))
    assert max(*first, *other, *again) < 2**63
    assert min(*first, *other, *again) > 2**30
    assert ops.uid() < 2**30


def test_other_threads_have_names_of_tensorflow():
    seen = []
    with repeatable_names("c"):
        first = ops.uid()
        thread = threading.Thread(target=lambda: seen.append(ops.uid()))
        thread.start()
        thread.join()
        assert ops.uid() == first + 1
    assert seen[0] < 2**30
