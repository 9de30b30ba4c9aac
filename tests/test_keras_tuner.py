"""Searches of KerasTuner, whose trials begin with `clear_session`."""

import keras
import keras_tuner
import numpy as np
import pytest
from conftest import MANY
from models import dense
from models import regression

import keras_conflux as kc

# KerasTuner asks threads for their names as Python did before 3.10.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

X, Y = regression(22)


def build(hp, replicate=lambda model: model):
    keras.utils.set_random_seed(0)
    rate = hp.Choice("rate", [0.1, 0.02])
    return replicate(dense(keras.optimizers.SGD(rate, momentum=0.9)))


def searched(folder, build, **options):
    """Returns the loss of each trial by its rate, and the best model."""
    search = keras_tuner.GridSearch(
        build, "val_loss", directory=folder, project_name="search", **options
    )
    search.search(
        X,
        Y,
        batch_size=8,
        epochs=2,
        shuffle=False,
        validation_data=(X[:9], Y[:9]),
        verbose=0,
    )
    losses = {
        trial.hyperparameters.get("rate"): trial.score
        for trial in search.oracle.get_best_trials(2)
    }
    return losses, search.get_best_models()[0]


@pytest.fixture(scope="module")
def on_one_device(tmp_path_factory):
    losses, best = searched(tmp_path_factory.mktemp("one"), build)
    return losses, best.predict(X, verbose=0)


def assert_same(found, expected):
    losses, best = found
    assert losses.keys() == expected[0].keys()
    for rate, loss in expected[0].items():
        np.testing.assert_allclose(losses[rate], loss, rtol=1e-5)
    assert len(best.variables[0].value.values) == MANY
    predicted = best.predict(X, verbose=0)
    np.testing.assert_allclose(predicted, expected[1], rtol=1e-4, atol=1e-6)


@pytest.mark.long
def test_models_that_are_replicated_where_they_are_built(
    tmp_path, on_one_device
):
    def replicated(hp):
        return build(hp, lambda model: kc.replicate(model, MANY))

    assert_same(searched(tmp_path, replicated), on_one_device)


@pytest.mark.long
def test_models_that_are_built_in_a_scope(tmp_path, on_one_device):
    strategy = kc.replicate(devices=MANY)
    found = searched(tmp_path, build, distribution_strategy=strategy)
    assert_same(found, on_one_device)
