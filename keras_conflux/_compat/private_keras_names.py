"""Every name inside of Keras that the package replaces or reads.

Read in Keras 3.14.0 and 3.15.1, where all parameters are the same, and in what
will be 3.16. The first table has the patch points: methods that get a second
behaviour for replicated objects.
"""

import keras

from keras_conflux._common.version_numbers import numbers
from keras_conflux._compat.private_names import PrivateName

_OPTIMIZER = "keras.src.optimizers.base_optimizer:BaseOptimizer"
_TF_OPTIMIZER = "keras.src.backend.tensorflow.optimizer:TFOptimizer"
_LOSS_SCALE = "keras.src.optimizers.loss_scale_optimizer:LossScaleOptimizer"
_VARIABLE = "keras.src.backend.common.variables:Variable"
_TF_ITERATOR = "keras.src.backend.tensorflow.trainer:TFEpochIterator"
_METRICS = "keras.src.metrics.reduction_metrics:"
_LOSS = "keras.src.losses.loss:"
_RANDOM = "keras.src.backend.tensorflow.random:"
_DISTRIBUTION = "keras.src.distribution.distribution_lib:"

if numbers(keras.__version__) >= (3, 16):
    _TRAINER = "keras.src.trainers.trainer:BaseTrainer"
    _TF_TRAINER = "keras.src.backend.tensorflow.trainer:Trainer"
    _TF_OPS = "keras.src.backend.tensorflow.ops"
else:
    _TRAINER = "keras.src.trainers.trainer:Trainer"
    _TF_TRAINER = "keras.src.backend.tensorflow.trainer:TensorFlowTrainer"
    _TF_OPS = "keras.src.backend.tensorflow"
_KNOWS_PROCESSES = (
    "Distribution" if numbers(keras.__version__) >= (3, 15) else "DataParallel"
)
_TF_VARIABLE = f"{_TF_OPS}.core:Variable"


class Patched:
    """The methods and functions that are replaced, with their parameters."""

    OPTIMIZER_APPLY = PrivateName(
        f"{_OPTIMIZER}.apply", "self, grads, trainable_variables"
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
    OPTIMIZER_SCALE_LOSS = PrivateName(f"{_OPTIMIZER}.scale_loss", "self, loss")
    LOSS_SCALE_SCALE_LOSS = PrivateName(
        f"{_LOSS_SCALE}.scale_loss", "self, loss"
    )
    CLIP_GRADIENTS = PrivateName(f"{_OPTIMIZER}._clip_gradients", "self, grads")
    CHECK_FINITE = PrivateName(f"{_LOSS_SCALE}.check_finite", "self, grads")
    SUM_GRADIENTS = PrivateName(
        f"{_TF_OPTIMIZER}._all_reduce_sum_gradients", "self, grads_and_vars"
    )
    ADD_OPTIMIZER_VARIABLE = PrivateName(
        f"{_TF_OPTIMIZER}.add_variable_from_reference",
        "self, reference_variable, name, initializer",
    )
    VARIABLE_KEY = PrivateName(f"{_TF_OPTIMIZER}._var_key", "self, variable")
    DECAY_WEIGHTS = PrivateName(
        f"{_TF_OPTIMIZER}._apply_weight_decay", "self, variables"
    )
    UPDATE_VARIABLES = PrivateName(
        f"{_TF_OPTIMIZER}._distributed_tf_update_step",
        "self, distribution, grads_and_vars, learning_rate",
    )
    OPTIMIZER_ASSIGN = PrivateName(
        f"{_TF_OPTIMIZER}.assign", "self, variable, value"
    )
    OPTIMIZER_ASSIGN_ADD = PrivateName(
        f"{_TF_OPTIMIZER}.assign_add", "self, variable, value"
    )
    OPTIMIZER_ASSIGN_SUB = PrivateName(
        f"{_TF_OPTIMIZER}.assign_sub", "self, variable, value"
    )
    OPTIMIZER_INIT = PrivateName(
        f"{_TF_OPTIMIZER}.__init__", "self, args, kwargs"
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
    DIRECT_ASSIGN = PrivateName(f"{_TF_VARIABLE}._direct_assign", "self, value")
    ASSIGN_ADD = PrivateName(f"{_VARIABLE}.assign_add", "self, value")
    ASSIGN_SUB = PrivateName(f"{_VARIABLE}.assign_sub", "self, value")
    VARIABLE_INT = PrivateName(f"{_VARIABLE}.__int__", "self")
    VARIABLE_FLOAT = PrivateName(f"{_VARIABLE}.__float__", "self")
    VARIABLE_INITIALIZE = PrivateName(
        f"{_TF_VARIABLE}._initialize", "self, value", ("_value",)
    )
    VARIABLE_HANDLE = PrivateName(f"{_TF_VARIABLE}.handle", None, ("handle",))
    SYNCHRONIZED_MOMENTS = PrivateName(
        f"{_TF_OPS}.nn:_compute_moments_sync",
        "x, axes, keepdims",
    )
    ATTENTION = PrivateName(
        f"{_TF_OPS}.nn:dot_product_attention",
        "query, key, value, bias, mask, scale, is_causal, flash_attention, "
        "attn_logits_soft_cap",
    )
    GELU = PrivateName(f"{_TF_OPS}.nn:gelu", "x, approximate")
    EINSUM = PrivateName(
        f"{_TF_OPS}.numpy:einsum", "subscripts, operands, kwargs"
    )
    EINSUM_DENSE_CALL = PrivateName(
        "keras.src.layers.core.einsum_dense:EinsumDense.call",
        "self, inputs, training",
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
    TRAINER_INIT = PrivateName(f"{_TF_TRAINER}.__init__", "self")
    TRAIN_STEP = PrivateName(f"{_TF_TRAINER}.train_step", "self, data")
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
        f"{_TF_TRAINER}.make_train_function",
        "self, force",
        ("train_function", "_make_function"),
    )
    MAKE_TEST_FUNCTION = PrivateName(
        f"{_TF_TRAINER}.make_test_function",
        "self, force",
        ("test_function", "_make_function"),
    )
    MAKE_PREDICT_FUNCTION = PrivateName(
        f"{_TF_TRAINER}.make_predict_function",
        "self, force",
        ("predict_function",),
    )
    MAKE_FUNCTION = PrivateName(
        f"{_TF_TRAINER}._make_function", "self, step_function"
    )
    SYMBOLIC_BUILD = PrivateName(
        f"{_TF_TRAINER}._maybe_symbolic_build", "self, iterator, data_batch"
    )
    FIT = PrivateName(
        f"{_TF_TRAINER}.fit", None, ("callbacks", "TFEpochIterator")
    )
    EVALUATE = PrivateName(
        f"{_TF_TRAINER}.evaluate", None, ("callbacks", "TFEpochIterator")
    )
    PREDICT = PrivateName(
        f"{_TF_TRAINER}.predict", None, ("callbacks", "TFEpochIterator")
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
    # Keras exports a second reference to this function.
    SET_DISTRIBUTION = PrivateName(
        "keras.distribution:set_distribution", "value"
    )
    SET_DISTRIBUTION_INSIDE = PrivateName(
        f"{_DISTRIBUTION}set_distribution", "value"
    )
    DATA_PARALLEL_INIT = PrivateName(
        f"{_DISTRIBUTION}DataParallel.__init__",
        "self, device_mesh, devices, auto_shard_dataset",
    )


READ = (
    PrivateName("keras.src.utils.rng_utils:get_random_seed", ""),
    PrivateName(
        f"{_DISTRIBUTION}{_KNOWS_PROCESSES}.__init__",
        None,
        ("_is_multi_process",),
    ),
    PrivateName(f"{_TF_VARIABLE}._map_aggregation", "self, aggregation"),
    PrivateName(
        f"{_TF_VARIABLE}._map_synchronization", "self, synchronization"
    ),
    PrivateName(
        f"{_OPTIMIZER}.build",
        None,
        (
            "_accumulated_gradients",
            "_model_variables_moving_average",
            "_trainable_variables",
        ),
    ),
    PrivateName(f"{_OPTIMIZER}._get_variable_index", "self, variable"),
    PrivateName(f"{_OPTIMIZER}._use_weight_decay", "self, variable"),
    PrivateName(
        "keras.src.backend.common.stateless_scope:StatelessScope.__enter__",
        "self",
        ("set_global_attribute",),
    ),
    PrivateName(f"{_TF_OPTIMIZER}.__init__", None, ("_distribution_strategy",)),
    PrivateName(f"{_TF_TRAINER}.__init__", None, ("_distribute_strategy",)),
    PrivateName(
        f"{_TF_TRAINER}._symbolic_build",
        "self, iterator, data_batch",
        ("_compile_loss", "_compile_metrics"),
    ),
    PrivateName("keras.src.trainers.trainer:model_supports_jit", "model"),
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
        "keras.callbacks:TensorBoard._close_writers", "self", ("_writers",)
    ),
    PrivateName("keras.callbacks:CallbackList._flush_futures", "self"),
    PrivateName(
        "keras.callbacks:EarlyStopping._set_monitor_op",
        "self",
        ("monitor_op", "min_delta"),
    ),
    PrivateName(
        "keras.src.trainers.epoch_iterator:EpochIterator._enumerate_iterator",
        "self",
        ("_get_iterator", "_steps_seen", "_current_iterator", "_num_batches"),
    ),
    PrivateName(
        "keras.src.trainers.data_adapters.py_dataset_adapter:PyDatasetAdapter.__init__",
        None,
        ("py_dataset",),
    ),
    PrivateName(
        "keras.src.saving.saving_lib:_save_state",
        "saveable, weights_store, assets_store, inner_path, visited_saveables",
    ),
    PrivateName(
        "keras.src.saving.saving_lib:H5IOStore.__init__",
        "self, path_or_io, archive, mode",
    ),
    PrivateName(
        "keras.src.saving.saving_lib:H5IOStore.make", "self, path, metadata"
    ),
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
    PrivateName("keras.src.backend.tensorflow.distribution_lib:"),
    PrivateName("keras.src.backend.common.masking:get_keras_mask", "x"),
    PrivateName("keras.src.backend.common.masking:set_keras_mask", "x, mask"),
)
"""What is read or called, and where attributes without a class are set."""


def all_names() -> list[PrivateName]:
    """Returns all names, of both tables."""
    patched = vars(Patched).values()
    return [*(x for x in patched if isinstance(x, PrivateName)), *READ]
