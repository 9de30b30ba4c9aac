"""The files of callbacks: rows and events are there once, others' stay."""

import keras
import pytest
import tensorflow as tf
from test_resume import STEPS
from test_resume import Kill
from test_resume import Killed
from test_resume import linear

import keras_conflux as kc
from keras_conflux._extensions.resume import fit as resumed_fit


def log(folder, **options):
    return keras.callbacks.CSVLogger(folder / "log.csv", **options)


def board(folder, **options):
    return keras.callbacks.TensorBoard(folder / "tb", **options)


def train(folder, after=None, every=1, resume="r", epochs=2, **options):
    """Runs a script whose callbacks write files."""
    resumed_fit.ended_here.clear()  # as in a process of its own
    callbacks = [
        log(folder, append=resume != "r"),
        board(folder, update_freq="batch"),
        Kill(after),
        kc.Resume(folder / resume, every=every),
    ]
    return linear(*callbacks, epochs=epochs, **options)


def killed(*arguments, **options):
    with pytest.raises(Killed):
        train(*arguments, **options)


def events(folder):
    """Returns what TensorBoard shows, with what is there twice."""
    return sorted(
        (value.tag, event.step)
        for path in folder.rglob("*tfevents*")
        for event in tf.compat.v1.train.summary_iterator(str(path))
        for value in event.summary.value
        if value.tag != "keras"  # the model, which each attempt writes
    )


def rows(path):
    return [line.split(",")[0] for line in path.read_text().splitlines()]


def test_two_trainings_write_to_the_same_files(tmp_path):
    def script(after):
        train(tmp_path, resume="r")
        options = {"epochs": 4, "initial_epoch": 2}
        train(tmp_path, after, resume="second", **options)

    with pytest.raises(Killed):
        script(STEPS + 2)
    script(None)
    assert rows(tmp_path / "log.csv") == ["epoch", "0", "1", "2", "3"]
    # Each training counts its batches from 1, in files of its own.
    losses = [each for each in events(tmp_path) if each[0] == "batch_loss"]
    assert losses == sorted(2 * [("batch_loss", i + 1) for i in range(12)])


def test_events_of_other_trainings_stay(tmp_path):
    killed(tmp_path, after=STEPS + 2, every=4)
    others = [tmp_path / "tb" / name for name in ("train", "other/train")]
    for folder in others:
        with tf.summary.create_file_writer(str(folder)).as_default():
            tf.summary.scalar("other", 1.0, step=1)
    train(tmp_path)
    for folder in others:
        assert ("other", 1) in events(folder)


def test_events_that_others_go_on_writing_are_not_cut(tmp_path):
    writer = tf.summary.create_file_writer(str(tmp_path / "tb" / "train"))
    killed(tmp_path, after=STEPS + 2)
    with writer.as_default():
        tf.summary.scalar("other", 1.0, step=1)
    writer.flush()
    train(tmp_path)
    assert ("other", 1) in events(tmp_path)


def test_a_folder_that_moved(tmp_path):
    (tmp_path / "expected").mkdir()
    train(tmp_path / "expected")
    (tmp_path / "before").mkdir()
    killed(tmp_path / "before", after=STEPS + 4, every=STEPS)
    after = (tmp_path / "before").rename(tmp_path / "after")
    train(after)
    assert events(after) == events(tmp_path / "expected")
    assert rows(after / "log.csv") == ["epoch", "0", "1"]


def test_nothing_is_deleted(tmp_path):
    killed(tmp_path, after=STEPS + 3, every=STEPS - 1)
    (path,) = (tmp_path / "tb" / "train").glob("*tfevents*")
    before = [path.read_bytes(), (tmp_path / "log.csv").read_bytes()]
    train(tmp_path)
    (rest,) = path.parent.glob("undone.*")
    assert path.read_bytes() + rest.read_bytes() == before[0]
    assert (tmp_path / "log.csv.undone").read_bytes() == before[1]


def test_killed_before_the_first_checkpoint(tmp_path):
    (tmp_path / "log.csv").write_text("epoch,loss\n7,0.5\n")
    expected = tmp_path / "expected"
    options = {"every": "1h", "resume": "appends"}
    for after in (STEPS + 2, 2, 3):
        killed(tmp_path, after=after, **options)
    train(tmp_path, **options)
    assert rows(tmp_path / "log.csv") == ["epoch", "7", "0", "1"]
    assert rows(tmp_path / "log.csv.undone") == ["0"]
    expected.mkdir()
    train(expected)
    assert events(tmp_path / "tb") == events(expected)


def test_a_log_that_others_have_changed(tmp_path):
    path = tmp_path / "log.csv"
    for content in ("epoch,loss\n", "epoch,loss\n0,0.5\n1,0.5\n2,0.5\n"):
        killed(tmp_path, after=STEPS + 2)
        path.write_text(content)
        with pytest.warns(
            kc.ConfluxWarning, match="has been changed by others"
        ):
            train(tmp_path)
        assert path.read_text().startswith(content)
        assert rows(path)[-1] == "1"
        (tmp_path / "r").rename(tmp_path / f"done {len(content)}")
    killed(tmp_path, after=STEPS + 2)
    path.unlink()
    with pytest.warns(kc.ConfluxWarning, match="is missing"):
        train(tmp_path)
