"""The table of what Keras does otherwise for replicated models.

Each row puts a replacement in front of a method of Keras, which behaves as
before unless a replicated model, or a replica, is concerned.
"""

import functools

import keras

from keras_conflux._compat import keras_internals
from keras_conflux._compat.patching import patch
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._compat.private_names import numbers
from keras_conflux._fit import trainer
from keras_conflux._fit import variables
from keras_conflux._fit.input import epoch_iterator
from keras_conflux._fit.numerics import gradients
from keras_conflux._fit.numerics import layer_state
from keras_conflux._fit.numerics import losses
from keras_conflux._fit.numerics import mean_metrics
from keras_conflux._fit.numerics import random_seeds
from keras_conflux._fit.numerics import sync_batch_norm
from keras_conflux._replication import keras_distribution

PATCHES = (
    # Optimizers.
    (Patched.OPTIMIZER_APPLY, gradients.apply),
    (Patched.LOSS_SCALE_APPLY, gradients.apply),
    (Patched.MULTI_OPTIMIZER_APPLY, gradients.apply),
    (Patched.OPTIMIZER_SCALE_LOSS, gradients.scale_loss),
    (Patched.LOSS_SCALE_SCALE_LOSS, gradients.scale_loss),
    (Patched.CLIP_GRADIENTS, gradients.reduce_accumulated),
    (Patched.CHECK_FINITE, gradients.check_finite),
    (Patched.SUM_GRADIENTS, gradients.skip_second_reduction),
    (Patched.ADD_OPTIMIZER_VARIABLE, variables.add_optimizer_variable),
    (Patched.OPTIMIZER_INIT, variables.make_distributed),
    # Losses and metrics.
    (Patched.SCALE_LOSS, losses.scale),
    (Patched.UNSCALE_LOSS, losses.unscale),
    (Patched.REDUCE_VALUES, losses.reduce_values),
    (Patched.APPLY_MASK, losses.apply_mask),
    (Patched.MEAN_UPDATE, mean_metrics.update_mean),
    (Patched.SUM_UPDATE, mean_metrics.update_mean),
    # Variables, normalization and random numbers.
    (Patched.ASSIGN, layer_state.record_assign),
    (Patched.ASSIGN_ADD, layer_state.record_add),
    (Patched.ASSIGN_SUB, layer_state.record_add),
    (Patched.VARIABLE_INT, functools.partial(variables.to_number, int)),
    (Patched.VARIABLE_FLOAT, functools.partial(variables.to_number, float)),
    (Patched.VARIABLE_INITIALIZE, variables.make_distributed),
    (Patched.SYNCHRONIZED_MOMENTS, sync_batch_norm.synchronized_moments),
    (Patched.NEXT_SEED, random_seeds.next_seed),
    # The trainer.
    (Patched.TRAINER_INIT, variables.make_distributed),
    (Patched.COMPILE, trainer.compile),
    (Patched.RESOLVE_AUTO_JIT, trainer.resolve_auto_jit_compile),
    (Patched.FIT, trainer.fit),
    (Patched.EVALUATE, trainer.evaluate),
    (Patched.PREDICT, trainer.predict),
    (Patched.SYMBOLIC_BUILD, trainer.build),
    (Patched.MAKE_TRAIN_FUNCTION, trainer.make_train_function),
    (Patched.MAKE_TEST_FUNCTION, trainer.make_test_function),
    (Patched.MAKE_FUNCTION, trainer.make_function),
    (Patched.MAKE_PREDICT_FUNCTION, trainer.make_predict_function),
    (Patched.ITERATOR_INIT, trainer.make_iterator),
    (Patched.ENUMERATE_ITERATOR, epoch_iterator.enumerate_step_groups),
    # keras.distribution.
    (Patched.SET_DISTRIBUTION, keras_distribution.set_distribution),
    (Patched.SET_DISTRIBUTION_INSIDE, keras_distribution.set_distribution),
    (Patched.DATA_PARALLEL_INIT, keras_distribution.make_data_parallel),
)


def install() -> None:
    """Puts the replacements in place. Called once, at import."""
    keras_internals.provide_distribution(
        keras_distribution.distribute_tensor,
        keras_distribution.get_device_count,
        keras_distribution.initialize,
        keras_distribution.num_processes,
        keras_distribution.process_id,
    )
    version = numbers(keras.__version__)
    for point, replacement in PATCHES:
        if point.is_in(version):
            patch(point, replacement)
