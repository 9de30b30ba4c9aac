"""Every name inside of Keras that the core replaces or reads.

The first table has the patch points: methods that get a second behaviour for
replicated objects. Methods are found from public classes, as the classes that
define them have other names and modules in other versions.
"""

import keras

from keras_conflux._compat.private_names import ListedName
from keras_conflux._compat.private_names import PrivateName
from keras_conflux._compat.private_names import PublicName

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

    OPTIMIZER_APPLY = PublicName(f"{_OPTIMIZER}.apply")
    LOSS_SCALE_APPLY = PublicName(f"{_LOSS_SCALE}.apply")
    MULTI_OPTIMIZER_APPLY = PublicName(
        "keras.optimizers:MultiOptimizer.apply", since=(3, 15)
    )
    LOSS_SCALE_BUILD = PublicName(f"{_LOSS_SCALE}.build")
    OPTIMIZER_SCALE_LOSS = PublicName(f"{_OPTIMIZER}.scale_loss")
    LOSS_SCALE_SCALE_LOSS = PublicName(f"{_LOSS_SCALE}.scale_loss")
    CLIP_GRADIENTS = PrivateName(f"{_OPTIMIZER}._clip_gradients", "self, grads")
    CHECK_FINITE = PublicName(f"{_LOSS_SCALE}.check_finite")
    SUM_GRADIENTS = PrivateName(
        f"{_OPTIMIZER}._all_reduce_sum_gradients", "self, grads_and_vars"
    )
    ADD_OPTIMIZER_VARIABLE = PublicName(
        f"{_OPTIMIZER}.add_variable_from_reference"
    )
    VARIABLE_KEY = PrivateName(f"{_OPTIMIZER}._var_key", "self, variable")
    OPTIMIZER_ASSIGN = PublicName(f"{_OPTIMIZER}.assign")
    OPTIMIZER_ASSIGN_ADD = PublicName(f"{_OPTIMIZER}.assign_add")
    OPTIMIZER_ASSIGN_SUB = PublicName(f"{_OPTIMIZER}.assign_sub")
    SCALE_LOSS = PrivateName(f"{_LOSS}scale_loss_for_distribution", "value")
    UNSCALE_LOSS = PrivateName(f"{_LOSS}unscale_loss_for_distribution", "value")
    REDUCE_VALUES = PrivateName(
        f"{_LOSS}reduce_values", "values, sample_weight, reduction"
    )
    APPLY_MASK = PrivateName(
        f"{_LOSS}apply_mask", "sample_weight, mask, dtype, reduction"
    )
    ASSIGN = PublicName("keras:Variable.assign")
    ASSIGN_ADD = PublicName("keras:Variable.assign_add")
    ASSIGN_SUB = PublicName("keras:Variable.assign_sub")
    VARIABLE_INITIALIZE = PrivateName(
        "keras:Variable._initialize", "self, value", "_value"
    )
    VARIABLE_HANDLE = PublicName("keras:Variable.handle")
    SYNCHRONIZED_MOMENTS = PrivateName(
        f"{TF_OPS}.nn:_compute_moments_sync", "x, axes, keepdims"
    )
    MEAN_UPDATE = PublicName("keras.metrics:Mean.update_state")
    SUM_UPDATE = PublicName("keras.metrics:Sum.update_state")
    NEXT_SEED = PublicName("keras.random:SeedGenerator.next")
    NORMAL = PrivateName(f"{_RANDOM}normal", _OF_MEAN)
    TRUNCATED_NORMAL = PrivateName(f"{_RANDOM}truncated_normal", _OF_MEAN)
    UNIFORM = PrivateName(f"{_RANDOM}uniform", _OF_RANGE)
    RANDINT = PrivateName(f"{_RANDOM}randint", _OF_RANGE)
    GAMMA = PrivateName(f"{_RANDOM}gamma", "shape, alpha, dtype, seed")
    BETA = PrivateName(f"{_RANDOM}beta", "shape, alpha, beta, dtype, seed")
    BINOMIAL = PrivateName(
        f"{_RANDOM}binomial", "shape, counts, probabilities, dtype, seed"
    )
    CATEGORICAL = PrivateName(
        f"{_RANDOM}categorical", "logits, num_samples, dtype, seed"
    )
    DROPOUT = PrivateName(
        f"{_RANDOM}dropout", "inputs, rate, noise_shape, seed"
    )
    SHUFFLE = PrivateName(f"{_RANDOM}shuffle", "x, axis, seed")
    COMPILE = PublicName("keras:Model.compile")
    METRICS_OR_LOGS = PrivateName(
        "keras:Model._get_metrics_result_or_logs", "self, logs"
    )
    RESOLVE_AUTO_JIT = PrivateName(
        "keras:Model._resolve_auto_jit_compile", "self"
    )
    TRAIN_STEP = PublicName("keras:Model.train_step")
    LAYER_CALL = PublicName("keras:Layer.__call__")
    BATCH_NORM_CALL = PublicName("keras.layers:BatchNormalization.call")
    BATCH_NORM_MOMENTS = PrivateName(
        "keras.layers:BatchNormalization._moments",
        "self, inputs, mask",
        "_reduction_axes",
    )
    MAKE_TRAIN_FUNCTION = PublicName("keras:Model.make_train_function")
    MAKE_TEST_FUNCTION = PublicName("keras:Model.make_test_function")
    MAKE_PREDICT_FUNCTION = PublicName("keras:Model.make_predict_function")
    MAKE_FUNCTION = PrivateName(
        "keras:Model._make_function", "self, step_function"
    )
    SYMBOLIC_BUILD = PrivateName(
        "keras:Model._maybe_symbolic_build", "self, iterator, data_batch"
    )
    FIT = PublicName("keras:Model.fit")
    EVALUATE = PublicName("keras:Model.evaluate")
    PREDICT = PublicName("keras:Model.predict")
    SAVE = PublicName("keras:Model.save")
    SAVE_WEIGHTS = PublicName("keras:Model.save_weights")
    SAVE_MODEL = PublicName("keras.saving:save_model")
    SAVE_MODELS = PublicName("keras.models:save_model")
    SAVE_THEIR_WEIGHTS = PublicName("keras.saving:save_weights")
    EXPORT = PublicName("keras:Model.export")
    SAVE_BACKUP = PrivateName(
        "keras.callbacks:BackupAndRestore._save_model", "self"
    )
    DELETE_BACKUP = PublicName("keras.callbacks:BackupAndRestore.on_train_end")
    ARRAY_DATASET = PrivateName(
        f"{_ADAPTERS}:ArrayDataAdapter.get_tf_dataset",
        "self",
        "_batch_size, _inputs, _num_samples, _shuffle",
    )
    ITERATOR_INIT = PrivateName(
        f"{_TF_ITERATOR}.__init__",
        "self, distribute_strategy, args, kwargs",
        "_distributed_dataset",
    )
    ENUMERATE_ITERATOR = PrivateName(
        f"{_TF_ITERATOR}._enumerate_iterator", "self", "steps_per_execution"
    )
    CATCH_END = PrivateName(f"{_TF_ITERATOR}.catch_stop_iteration", "self")


READ = (
    PrivateName(f"{_COMMON}.masking:get_keras_mask", "x"),
    PrivateName(f"{_COMMON}.masking:set_keras_mask", "x, mask"),
    PrivateName("keras.src.utils.rng_utils:get_random_seed", ""),
    PrivateName(
        "keras:Variable",
        mentions="_autocast, _convert_to_tensor, _dtype, _map_aggregation, "
        "_map_synchronization, _value",
    ),
    PrivateName(
        f"{_OPTIMIZER}",
        mentions="_accumulated_gradients, _distribution_strategy, "
        "_get_variable_index, _model_variables_moving_average, "
        "_trainable_variables",
    ),
    PrivateName(
        "keras:Model",
        mentions="_compile_loss, _compile_metrics, _distribute_strategy, "
        "_flatten_layers, _initial_epoch, _symbolic_build",
    ),
    PrivateName(
        "keras:StatelessScope.__enter__", "self", "set_global_attribute"
    ),
    PrivateName("keras.src.trainers.trainer:model_supports_jit", "model"),
    PrivateName("keras.src.utils.traceback_utils:_EXCLUDED_PATHS"),
    PrivateName("keras.src.utils.traceback_utils:filter_traceback", "fn"),
    PrivateName(f"{_ADAPTERS}:TFDatasetAdapter"),
    PrivateName(f"{_SLICING}:convert_to_sliceable", "arrays, target_backend"),
    PrivateName(
        f"{_SLICING}:slice_tensorflow_sparse_wrapper", "sparse_wrapper, indices"
    ),
    PrivateName(f"{_SLICING}:TensorflowSparseWrapper"),
    PrivateName(_TF_ITERATOR, mentions="data_adapter, _num_batches"),
    PrivateName("keras.callbacks:TensorBoard", mentions="_start_batch"),
    PrivateName(
        "keras.src.random.seed_generator:global_seed_generator",
        "",
        "get_global_attribute",
    ),
    PrivateName("keras.config:dtype_policy", "", "dtype_policy"),
    PrivateName(
        f"{_COMMON}.global_state:get_global_attribute",
        "name, default, set_to_default",
    ),
    PrivateName(f"{_COMMON}.global_state:set_global_attribute", "name, value"),
)
"""The names that are read or called, or on which attributes are set."""

NAMES = (
    *(x for x in vars(Patched).values() if isinstance(x, ListedName)),
    *READ,
)
"""All of them."""
