"""Every name inside of Keras that the core replaces or reads.

Read in Keras 3.14.0 and 3.15.1, where all parameters are the same, and in the
coming 3.16. The first table has the patch points: methods that get a second
behaviour for replicated objects.
"""

import keras

from keras_conflux._compat.private_names import PrivateName
from keras_conflux._compat.private_names import version_numbers

OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"
TF_OPTIMIZER = "keras.src.backend.tensorflow.optimizer:TFOptimizer"
_LOSS_SCALE = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_VARIABLE = "keras.src.backend.common.variables:Variable"
_TF_ITERATOR = "keras.src.backend.tensorflow.trainer:TFEpochIterator"
_METRICS = "keras.src.metrics.reduction_metrics:"
_LOSS = "keras.src.losses.loss:"
_RANDOM = "keras.src.backend.tensorflow.random:"

if version_numbers(keras.__version__) >= (3, 16):
    _TRAINER = "keras.src.trainers.trainer:BaseTrainer"
    TF_TRAINER = "keras.src.backend.tensorflow.trainer:Trainer"
    TF_OPS = "keras.src.backend.tensorflow.ops"
else:
    _TRAINER = "keras.src.trainers.trainer:Trainer"
    TF_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
    TF_OPS = "keras.src.backend.tensorflow"
_TF_VARIABLE = f"{TF_OPS}.core:Variable"


class Patched:
    """The methods and functions that are replaced, with their parameters."""

    OPTIMIZER_APPLY = PrivateName(
        f"{OPTIMIZER}.apply", "self, grads, trainable_variables"
    )
    LOSS_SCALE_APPLY = PrivateName(
        f"{_LOSS_SCALE}.apply", "self, grads, trainable_variables"
    )
    MULTI_OPTIMIZER_APPLY = PrivateName(
        "keras.src.optimizers.multi_optimizer:MultiOptimizer.apply",
        "self, grads, trainable_variables",
        since=(3, 15),
    )
    LOSS_SCALE_BUILD = PrivateName(f"{_LOSS_SCALE}.build", "self, var_list")
    OPTIMIZER_SCALE_LOSS = PrivateName(f"{OPTIMIZER}.scale_loss", "self, loss")
    LOSS_SCALE_SCALE_LOSS = PrivateName(
        f"{_LOSS_SCALE}.scale_loss", "self, loss"
    )
    CLIP_GRADIENTS = PrivateName(f"{OPTIMIZER}._clip_gradients", "self, grads")
    CHECK_FINITE = PrivateName(f"{_LOSS_SCALE}.check_finite", "self, grads")
    SUM_GRADIENTS = PrivateName(
        f"{TF_OPTIMIZER}._all_reduce_sum_gradients", "self, grads_and_vars"
    )
    ADD_OPTIMIZER_VARIABLE = PrivateName(
        f"{TF_OPTIMIZER}.add_variable_from_reference",
        "self, reference_variable, name, initializer",
    )
    VARIABLE_KEY = PrivateName(f"{TF_OPTIMIZER}._var_key", "self, variable")
    OPTIMIZER_ASSIGN = PrivateName(
        f"{TF_OPTIMIZER}.assign", "self, variable, value"
    )
    OPTIMIZER_ASSIGN_ADD = PrivateName(
        f"{TF_OPTIMIZER}.assign_add", "self, variable, value"
    )
    OPTIMIZER_ASSIGN_SUB = PrivateName(
        f"{TF_OPTIMIZER}.assign_sub", "self, variable, value"
    )
    SCALE_LOSS = PrivateName(f"{_LOSS}scale_loss_for_distribution", "value")
    UNSCALE_LOSS = PrivateName(f"{_LOSS}unscale_loss_for_distribution", "value")
    REDUCE_VALUES = PrivateName(
        f"{_LOSS}reduce_values", "values, sample_weight, reduction"
    )
    APPLY_MASK = PrivateName(
        f"{_LOSS}apply_mask", "sample_weight, mask, dtype, reduction"
    )
    ASSIGN = PrivateName(f"{_VARIABLE}.assign", "self, value")
    ASSIGN_ADD = PrivateName(f"{_VARIABLE}.assign_add", "self, value")
    ASSIGN_SUB = PrivateName(f"{_VARIABLE}.assign_sub", "self, value")
    VARIABLE_INITIALIZE = PrivateName(
        f"{_TF_VARIABLE}._initialize", "self, value", ("_value",)
    )
    VARIABLE_HANDLE = PrivateName(f"{_TF_VARIABLE}.handle", None, ("handle",))
    SYNCHRONIZED_MOMENTS = PrivateName(
        f"{TF_OPS}.nn:_compute_moments_sync",
        "x, axes, keepdims",
    )
    MEAN_UPDATE = PrivateName(
        f"{_METRICS}Mean.update_state", "self, values, sample_weight"
    )
    SUM_UPDATE = PrivateName(
        f"{_METRICS}Sum.update_state", "self, values, sample_weight"
    )
    NEXT_SEED = PrivateName(
        "keras.src.random.seed_generator:SeedGenerator.next", "self, ordered"
    )
    NORMAL = PrivateName(f"{_RANDOM}normal", "shape, mean, stddev, dtype, seed")
    TRUNCATED_NORMAL = PrivateName(
        f"{_RANDOM}truncated_normal", "shape, mean, stddev, dtype, seed"
    )
    UNIFORM = PrivateName(
        f"{_RANDOM}uniform", "shape, minval, maxval, dtype, seed"
    )
    RANDINT = PrivateName(
        f"{_RANDOM}randint", "shape, minval, maxval, dtype, seed"
    )
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
    COMPILE = PrivateName(f"{_TRAINER}.compile")
    METRICS_OR_LOGS = PrivateName(
        f"{_TRAINER}._get_metrics_result_or_logs", "self, logs"
    )
    RESOLVE_AUTO_JIT = PrivateName(
        f"{_TRAINER}._resolve_auto_jit_compile", "self"
    )
    TRAIN_STEP = PrivateName(f"{TF_TRAINER}.train_step", "self, data")
    LAYER_CALL = PrivateName(
        "keras.src.layers.layer:Layer.__call__", "self, args, kwargs"
    )
    BATCH_NORM_CALL = PrivateName(
        "keras.layers:BatchNormalization.call", "self, inputs, training, mask"
    )
    BATCH_NORM_MOMENTS = PrivateName(
        "keras.layers:BatchNormalization._moments",
        "self, inputs, mask",
        ("_reduction_axes",),
    )
    MAKE_TRAIN_FUNCTION = PrivateName(
        f"{TF_TRAINER}.make_train_function",
        "self, force",
        ("train_function", "_make_function"),
    )
    MAKE_TEST_FUNCTION = PrivateName(
        f"{TF_TRAINER}.make_test_function",
        "self, force",
        ("test_function", "_make_function"),
    )
    MAKE_PREDICT_FUNCTION = PrivateName(
        f"{TF_TRAINER}.make_predict_function",
        "self, force",
        ("predict_function",),
    )
    MAKE_FUNCTION = PrivateName(
        f"{TF_TRAINER}._make_function", "self, step_function"
    )
    SYMBOLIC_BUILD = PrivateName(
        f"{TF_TRAINER}._maybe_symbolic_build", "self, iterator, data_batch"
    )
    FIT = PrivateName(
        f"{TF_TRAINER}.fit", None, ("callbacks", "TFEpochIterator")
    )
    EVALUATE = PrivateName(
        f"{TF_TRAINER}.evaluate", None, ("callbacks", "TFEpochIterator")
    )
    PREDICT = PrivateName(
        f"{TF_TRAINER}.predict", None, ("callbacks", "TFEpochIterator")
    )
    SAVE = PrivateName(
        "keras.src.models.model:Model.save",
        "self, filepath, overwrite, zipped, kwargs",
    )
    SAVE_WEIGHTS = PrivateName(
        "keras.src.models.model:Model.save_weights",
        "self, filepath, overwrite, max_shard_size",
    )
    EXPORT = PrivateName(
        "keras.src.models.model:Model.export",
        "self, filepath, format, verbose, input_signature, kwargs",
    )
    SAVE_BACKUP = PrivateName(
        "keras.src.callbacks.backup_and_restore:BackupAndRestore._save_model",
        "self",
    )
    DELETE_BACKUP = PrivateName(
        "keras.src.callbacks.backup_and_restore:BackupAndRestore.on_train_end",
        "self, logs",
    )
    ARRAY_DATASET = PrivateName(
        "keras.src.trainers.data_adapters.array_data_adapter"
        ":ArrayDataAdapter.get_tf_dataset",
        "self",
        ("_batch_size", "_inputs", "_num_samples", "_shuffle"),
    )
    ITERATOR_INIT = PrivateName(
        f"{_TF_ITERATOR}.__init__",
        "self, distribute_strategy, args, kwargs",
        ("_distributed_dataset",),
    )
    ENUMERATE_ITERATOR = PrivateName(
        f"{_TF_ITERATOR}._enumerate_iterator",
        "self",
        ("steps_per_execution",),
    )
    CATCH_END = PrivateName(f"{_TF_ITERATOR}.catch_stop_iteration", "self")


READ = (
    PrivateName("keras.src.backend:get_keras_mask", "x"),
    PrivateName("keras.src.backend:set_keras_mask", "x, mask"),
    PrivateName("keras.src.utils.rng_utils:get_random_seed", ""),
    PrivateName(f"{_TF_VARIABLE}._map_aggregation", "self, aggregation"),
    PrivateName(
        f"{_TF_VARIABLE}._map_synchronization", "self, synchronization"
    ),
    PrivateName(
        f"{OPTIMIZER}.build",
        None,
        (
            "_accumulated_gradients",
            "_model_variables_moving_average",
            "_trainable_variables",
        ),
    ),
    PrivateName(f"{TF_OPTIMIZER}.__init__", None, ("_distribution_strategy",)),
    PrivateName(f"{TF_TRAINER}.__init__", None, ("_distribute_strategy",)),
    PrivateName(
        f"{TF_TRAINER}._symbolic_build",
        "self, iterator, data_batch",
        ("_compile_loss", "_compile_metrics"),
    ),
    PrivateName(f"{_VARIABLE}.__init__", None, ("_autocast", "_dtype")),
    PrivateName(f"{OPTIMIZER}._get_variable_index", "self, variable"),
    PrivateName(
        "keras.src.backend.common.stateless_scope:StatelessScope.__enter__",
        "self",
        ("set_global_attribute",),
    ),
    PrivateName("keras.src.trainers.trainer:model_supports_jit", "model"),
    PrivateName("keras.src.utils.traceback_utils:_EXCLUDED_PATHS"),
    PrivateName("keras.src.utils.traceback_utils:filter_traceback", "fn"),
    PrivateName(f"{_TRAINER}.__init__", None, ("_initial_epoch",)),
    PrivateName(
        "keras.src.layers.layer:Layer._flatten_layers",
        "self, include_self, recursive",
    ),
    PrivateName("keras.src.trainers.data_adapters:ArrayDataAdapter"),
    PrivateName("keras.src.trainers.data_adapters:TFDatasetAdapter"),
    PrivateName(
        "keras.src.trainers.data_adapters.array_slicing:convert_to_sliceable",
        "arrays, target_backend",
    ),
    PrivateName(
        "keras.src.trainers.data_adapters.array_slicing"
        ":slice_tensorflow_sparse_wrapper",
        "sparse_wrapper, indices",
    ),
    PrivateName(
        "keras.src.trainers.data_adapters.array_slicing:TensorflowSparseWrapper"
    ),
    PrivateName(
        "keras.src.trainers.epoch_iterator:EpochIterator.__init__",
        None,
        ("data_adapter", "_num_batches"),
    ),
    PrivateName("keras.callbacks:TensorBoard.__init__", None, ("update_freq",)),
    PrivateName(
        "keras.callbacks:TensorBoard._init_profile_batch",
        None,
        ("_start_batch",),
    ),
    PrivateName("keras.src.random.seed_generator:draw_seed", "seed"),
    PrivateName(f"{_RANDOM}_cast_seed", "seed"),
    PrivateName(
        "keras.src.random.seed_generator:global_seed_generator",
        "",
        ("GLOBAL_SEED_GENERATOR",),
    ),
    PrivateName(
        "keras.src.dtype_policies.dtype_policy:dtype_policy",
        "",
        ("dtype_policy",),
    ),
    PrivateName(
        "keras.src.backend.common.global_state:get_global_attribute",
        "name, default, set_to_default",
    ),
    PrivateName(
        "keras.src.backend.common.global_state:set_global_attribute",
        "name, value",
    ),
)
"""The names that are read or called, or on which attributes are set."""

NAMES = (
    *(x for x in vars(Patched).values() if isinstance(x, PrivateName)),
    *READ,
)
"""All of them."""
