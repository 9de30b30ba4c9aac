"""The table of Keras' methods that differ for replicated models.

Each row puts a replacement in front of a method of Keras, which behaves as
before unless a replicated model, or a replica, is concerned.
"""

import functools

from keras_conflux._compat import private_tensorflow_names
from keras_conflux._compat.patching import look_up_late
from keras_conflux._compat.patching import patch
from keras_conflux._compat.patching import patch_all
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._fit import first_process
from keras_conflux._fit import trainer
from keras_conflux._fit import variables
from keras_conflux._fit.input import epoch_iterator
from keras_conflux._fit.numerics import choices
from keras_conflux._fit.numerics import draws
from keras_conflux._fit.numerics import given_tensors
from keras_conflux._fit.numerics import inner_graphs
from keras_conflux._fit.numerics import layers
from keras_conflux._fit.numerics import lengths
from keras_conflux._fit.numerics import losses
from keras_conflux._fit.numerics import tape
from keras_conflux._fit.numerics import updates
from keras_conflux._fit.numerics import writes

PATCHES = (
    # Optimizers.
    (Patched.OPTIMIZER_APPLY, updates.apply),
    (Patched.LOSS_SCALE_APPLY, updates.apply),
    (Patched.MULTI_OPTIMIZER_APPLY, updates.apply),
    (Patched.OPTIMIZER_SCALE_LOSS, updates.scale_loss),
    (Patched.LOSS_SCALE_SCALE_LOSS, updates.scale_loss),
    (Patched.TRAIN_STEP, updates.train_step),
    (Patched.CLIP_GRADIENTS, updates.reduce_accumulated),
    (Patched.CHECK_FINITE, updates.check_finite),
    (Patched.SUM_GRADIENTS, updates.skip_second_reduction),
    (Patched.ADD_OPTIMIZER_VARIABLE, variables.add_optimizer_variable),
    (Patched.LOSS_SCALE_BUILD, variables.build_loss_scale_optimizer),
    (Patched.VARIABLE_KEY, given_tensors.key),
    (Patched.OPTIMIZER_ASSIGN, updates.write),
    (Patched.OPTIMIZER_ASSIGN_ADD, updates.add),
    (Patched.OPTIMIZER_ASSIGN_SUB, updates.add),
    # Losses and metrics.
    (Patched.SCALE_LOSS, losses.scale),
    (Patched.UNSCALE_LOSS, losses.scale),
    (Patched.REDUCE_VALUES, losses.reduce_values),
    (Patched.APPLY_MASK, losses.apply_mask),
    (Patched.MEAN_UPDATE, losses.update_mean),
    (Patched.SUM_UPDATE, losses.update_mean),
    # Variables, normalization and random numbers.
    (Patched.ASSIGN, writes.assign),
    (Patched.ASSIGN_ADD, writes.add),
    (Patched.ASSIGN_SUB, writes.add),
    (Patched.VARIABLE_INITIALIZE, variables.initialize),
    (Patched.VARIABLE_HANDLE, variables.handle),
    (Patched.SYNCHRONIZED_MOMENTS, layers.synchronized_moments),
    (Patched.LAYER_CALL, layers.call),
    (Patched.BATCH_NORM_CALL, layers.call_batch_norm),
    (Patched.BATCH_NORM_MOMENTS, layers.masked_moments),
    (Patched.NEXT_SEED, draws.next_seed),
    (Patched.NORMAL, draws.by_rows),
    (Patched.TRUNCATED_NORMAL, draws.by_rows),
    (Patched.UNIFORM, draws.by_rows),
    (Patched.RANDINT, draws.by_rows),
    (Patched.GAMMA, draws.whole),
    (Patched.BETA, draws.whole),
    (Patched.BINOMIAL, draws.whole),
    (Patched.CATEGORICAL, draws.whole),
    (Patched.DROPOUT, draws.dropout),
    (Patched.SHUFFLE, draws.shuffle),
    # The trainer.
    (Patched.COMPILE, trainer.compile),
    (Patched.METRICS_OR_LOGS, trainer.metrics_or_logs),
    (Patched.RESOLVE_AUTO_JIT, trainer.resolve_auto_jit_compile),
    (Patched.FIT, trainer.fit),
    (Patched.EVALUATE, functools.partial(trainer.run, "evaluate")),
    (Patched.PREDICT, functools.partial(trainer.run, "predict")),
    (Patched.SYMBOLIC_BUILD, trainer.build),
    (Patched.SAVE, first_process.save),
    (Patched.SAVE_WEIGHTS, first_process.save),
    (Patched.EXPORT, first_process.save),
    (Patched.SAVE_MODEL, first_process.save),
    (Patched.SAVE_MODELS, first_process.save),
    (Patched.SAVE_THEIR_WEIGHTS, first_process.save),
    (Patched.BACKUP, first_process.save),
    (Patched.DELETE_BACKUP, first_process.save),
    (Patched.MAKE_TRAIN_FUNCTION, trainer.make_anew),
    (Patched.MAKE_TEST_FUNCTION, trainer.make_anew),
    (Patched.MAKE_FUNCTION, trainer.make_function),
    (Patched.MAKE_PREDICT_FUNCTION, trainer.make_predict_function),
    (Patched.ITERATOR_INIT, epoch_iterator.make),
    (Patched.ARRAY_DATASET, epoch_iterator.make_dataset),
    (Patched.ENUMERATE_ITERATOR, epoch_iterator.enumerate_step_groups),
    (Patched.CATCH_END, epoch_iterator.catch_end),
)


def install_functions() -> None:
    """Replaces functions that a program may import by name, at import."""
    patch(private_tensorflow_names.AVERAGE_LOSS, losses.compute_average)
    patch(private_tensorflow_names.SCALE_REGULARIZATION, losses.scale_penalty)
    patch(private_tensorflow_names.SEQUENCE_MASK, lengths.sequence_mask)
    look_up_late(Patched.FIT)


def install() -> None:
    """Puts the replacements in place. Called once, at the first use."""
    patch(private_tensorflow_names.TAPE_GRADIENT, tape.gradient)
    patch(private_tensorflow_names.TAPE_JACOBIAN, tape.jacobian)
    patch(private_tensorflow_names.TAPE_BATCH_JACOBIAN, tape.batch_jacobian)
    patch(private_tensorflow_names.FORWARD_OF_OPERATION, tape.left_alone)
    patch(private_tensorflow_names.CONDITION, choices.choose)
    patch(private_tensorflow_names.INDEXED_CASE, choices.choose)
    patch(private_tensorflow_names.LOOP, inner_graphs.while_loop)
    patch(private_tensorflow_names.FUNCTION_CALL, inner_graphs.call)
    patch(private_tensorflow_names.TO_TENSOR, lengths.to_tensor)
    patch(private_tensorflow_names.MERGE_CALL, layers.merge_call)
    for operation in private_tensorflow_names.DRAWS:
        patch(operation, draws.operation)
    patch_all(PATCHES)
