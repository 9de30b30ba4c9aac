"""Every name inside of Keras that the core replaces or reads.

The first table has the patch points: methods that get a second behaviour for
replicated objects. Methods are found from public classes, as the classes that
define them have other names and modules in other versions.
"""

import keras

from keras_conflux._compat.private_names import ListedName
from keras_conflux._compat.private_names import Private
from keras_conflux._compat.private_names import Public

TF_OPS = keras.Variable.handle.fget.__module__.rpartition(".")[0]
"""The package of the backend's operations."""
_TF_ITERATOR = "keras.src.backend.tensorflow.trainer:TFEpochIterator"
_OPTIMIZER = "keras.optimizers:Optimizer"
_LOSS_SCALE = "keras.optimizers:LossScaleOptimizer"
_COMMON = "keras.src.backend.common"
_ADAPTERS = "keras.src.trainers.data_adapters"
_SLICING = f"{_ADAPTERS}.array_slicing"
_LOSS = "keras.src.losses.loss:"
_RANDOM = "keras.src.backend.tensorflow.random:"
_OF_MEAN = "shape, mean, stddev, dtype, seed"
_OF_RANGE = "shape, minval, maxval, dtype, seed"


class Patched:
    """The methods and functions that are replaced, with their parameters."""

    OPTIMIZER_APPLY = Public(f"{_OPTIMIZER}.apply")
    LOSS_SCALE_APPLY = Public(f"{_LOSS_SCALE}.apply")
    MULTI_OPTIMIZER_APPLY = Public(
        "keras.optimizers:MultiOptimizer.apply", since=(3, 15)
    )
    LOSS_SCALE_BUILD = Public(f"{_LOSS_SCALE}.build")
    OPTIMIZER_SCALE_LOSS = Public(f"{_OPTIMIZER}.scale_loss")
    LOSS_SCALE_SCALE_LOSS = Public(f"{_LOSS_SCALE}.scale_loss")
    CLIP_GRADIENTS = Private(f"{_OPTIMIZER}._clip_gradients", "self, grads")
    CHECK_FINITE = Public(f"{_LOSS_SCALE}.check_finite")
    SUM_GRADIENTS = Private(
        f"{_OPTIMIZER}._all_reduce_sum_gradients", "self, grads_and_vars"
    )
    ADD_OPTIMIZER_VARIABLE = Public(f"{_OPTIMIZER}.add_variable_from_reference")
    VARIABLE_KEY = Private(f"{_OPTIMIZER}._var_key", "self, variable")
    OPTIMIZER_ASSIGN = Public(f"{_OPTIMIZER}.assign")
    OPTIMIZER_ASSIGN_ADD = Public(f"{_OPTIMIZER}.assign_add")
    OPTIMIZER_ASSIGN_SUB = Public(f"{_OPTIMIZER}.assign_sub")
    SCALE_LOSS = Private(f"{_LOSS}scale_loss_for_distribution", "value")
    UNSCALE_LOSS = Private(f"{_LOSS}unscale_loss_for_distribution", "value")
    REDUCE_VALUES = Private(
        f"{_LOSS}reduce_values", "values, sample_weight, reduction"
    )
    APPLY_MASK = Private(
        f"{_LOSS}apply_mask", "sample_weight, mask, dtype, reduction"
    )
    ASSIGN = Public("keras:Variable.assign")
    ASSIGN_ADD = Public("keras:Variable.assign_add")
    ASSIGN_SUB = Public("keras:Variable.assign_sub")
    VARIABLE_INITIALIZE = Private(
        "keras:Variable._initialize", "self, value", "_value"
    )
    VARIABLE_HANDLE = Public("keras:Variable.handle")
    SYNCHRONIZED_MOMENTS = Private(
        f"{TF_OPS}.nn:_compute_moments_sync", "x, axes, keepdims"
    )
    MEAN_UPDATE = Public("keras.metrics:Mean.update_state")
    SUM_UPDATE = Public("keras.metrics:Sum.update_state")
    NEXT_SEED = Public("keras.random:SeedGenerator.next")
    NORMAL = Private(f"{_RANDOM}normal", _OF_MEAN)
    TRUNCATED_NORMAL = Private(f"{_RANDOM}truncated_normal", _OF_MEAN)
    UNIFORM = Private(f"{_RANDOM}uniform", _OF_RANGE)
    RANDINT = Private(f"{_RANDOM}randint", _OF_RANGE)
    GAMMA = Private(f"{_RANDOM}gamma", "shape, alpha, dtype, seed")
    BETA = Private(f"{_RANDOM}beta", "shape, alpha, beta, dtype, seed")
    BINOMIAL = Private(
        f"{_RANDOM}binomial", "shape, counts, probabilities, dtype, seed"
    )
    CATEGORICAL = Private(
        f"{_RANDOM}categorical", "logits, num_samples, dtype, seed"
    )
    DROPOUT = Private(f"{_RANDOM}dropout", "inputs, rate, noise_shape, seed")
    SHUFFLE = Private(f"{_RANDOM}shuffle", "x, axis, seed")
    COMPILE = Public("keras:Model.compile")
    METRICS_OR_LOGS = Private(
        "keras:Model._get_metrics_result_or_logs", "self, logs"
    )
    RESOLVE_AUTO_JIT = Private("keras:Model._resolve_auto_jit_compile", "self")
    TRAIN_STEP = Public("keras:Model.train_step")
    LAYER_CALL = Public("keras:Layer.__call__")
    BATCH_NORM_CALL = Public("keras.layers:BatchNormalization.call")
    BATCH_NORM_MOMENTS = Private(
        "keras.layers:BatchNormalization._moments",
        "self, inputs, mask",
        "_reduction_axes",
    )
    MAKE_TRAIN_FUNCTION = Public("keras:Model.make_train_function")
    MAKE_TEST_FUNCTION = Public("keras:Model.make_test_function")
    MAKE_PREDICT_FUNCTION = Public("keras:Model.make_predict_function")
    MAKE_FUNCTION = Private("keras:Model._make_function", "self, step_function")
    SYMBOLIC_BUILD = Private(
        "keras:Model._maybe_symbolic_build", "self, iterator, data_batch"
    )
    FIT = Public("keras:Model.fit")
    EVALUATE = Public("keras:Model.evaluate")
    PREDICT = Public("keras:Model.predict")
    SAVE = Public("keras:Model.save")
    SAVE_WEIGHTS = Public("keras:Model.save_weights")
    SAVE_MODEL = Public("keras.saving:save_model")
    SAVE_MODELS = Public("keras.models:save_model")
    SAVE_THEIR_WEIGHTS = Public("keras.saving:save_weights")
    EXPORT = Public("keras:Model.export")
    BACKUP = Private("keras.callbacks:BackupAndRestore._save_model", "self")
    DELETE_BACKUP = Public("keras.callbacks:BackupAndRestore.on_train_end")
    ARRAY_DATASET = Private(
        f"{_ADAPTERS}:ArrayDataAdapter.get_tf_dataset",
        "self",
        "_batch_size, _inputs, _num_samples, _shuffle",
    )
    ITERATOR_INIT = Private(
        f"{_TF_ITERATOR}.__init__",
        "self, distribute_strategy, args, kwargs",
        "_distributed_dataset",
    )
    ENUMERATE_ITERATOR = Private(
        f"{_TF_ITERATOR}._enumerate_iterator", "self", "steps_per_execution"
    )
    CATCH_END = Private(f"{_TF_ITERATOR}.catch_stop_iteration", "self")


READ = (
    Private(f"{_COMMON}.masking:get_keras_mask", "x"),
    Private(f"{_COMMON}.masking:set_keras_mask", "x, mask"),
    Private("keras.src.utils.rng_utils:get_random_seed", ""),
    Private(
        "keras:Variable",
        mentions="_autocast, _dtype, _map_aggregation, _map_synchronization, "
        "_value",
    ),
    Private(
        f"{_OPTIMIZER}",
        mentions="_accumulated_gradients, _distribution_strategy, "
        "_get_variable_index, _model_variables_moving_average, "
        "_trainable_variables",
    ),
    Private(
        "keras:Model",
        mentions="_compile_loss, _compile_metrics, _distribute_strategy, "
        "_flatten_layers, _initial_epoch, _symbolic_build",
    ),
    Private("keras:StatelessScope.__enter__", "self", "set_global_attribute"),
    Private("keras.src.trainers.trainer:model_supports_jit", "model"),
    Private("keras.src.utils.traceback_utils:_EXCLUDED_PATHS"),
    Private("keras.src.utils.traceback_utils:filter_traceback", "fn"),
    Private(f"{_ADAPTERS}:TFDatasetAdapter"),
    Private(f"{_SLICING}:convert_to_sliceable", "arrays, target_backend"),
    Private(
        f"{_SLICING}:slice_tensorflow_sparse_wrapper", "sparse_wrapper, indices"
    ),
    Private(f"{_SLICING}:TensorflowSparseWrapper"),
    Private(_TF_ITERATOR, mentions="data_adapter, _num_batches"),
    Private("keras.callbacks:TensorBoard", mentions="_start_batch"),
    Private(
        "keras.src.random.seed_generator:global_seed_generator",
        "",
        "get_global_attribute",
    ),
    Private("keras.config:dtype_policy", "", "dtype_policy"),
    Private(
        f"{_COMMON}.global_state:get_global_attribute",
        "name, default, set_to_default",
    ),
    Private(f"{_COMMON}.global_state:set_global_attribute", "name, value"),
)
"""The names that are read or called, or on which attributes are set."""

_PATCHED = [x for x in vars(Patched).values() if isinstance(x, ListedName)]
NAMES = (*_PATCHED, *READ)
"""All of them."""
