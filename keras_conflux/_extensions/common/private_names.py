"""Names inside of Keras and TensorFlow that extensions need, by extension."""

import keras

from keras_conflux._compat.private_keras_names import OPTIMIZER
from keras_conflux._compat.private_keras_names import TF_OPS
from keras_conflux._compat.private_keras_names import TF_OPTIMIZER
from keras_conflux._compat.private_keras_names import TF_TRAINER
from keras_conflux._compat.private_names import PrivateName
from keras_conflux._compat.private_names import version_numbers
from keras_conflux._compat.private_tensorflow_names import CONTEXT

# --- keras.distribution

_DISTRIBUTION = "keras.src.distribution.distribution_lib:"
_KNOWS_PROCESSES = (
    "Distribution"
    if version_numbers(keras.__version__) >= (3, 15)
    else "DataParallel"
)

OPTIMIZER_INIT = PrivateName(f"{TF_OPTIMIZER}.__init__", "self, args, kwargs")
TRAINER_INIT = PrivateName(f"{TF_TRAINER}.__init__", "self")
# Keras exports a second reference to this function.
SET_DISTRIBUTION = PrivateName("keras.distribution:set_distribution", "value")
SET_DISTRIBUTION_INSIDE = PrivateName(
    f"{_DISTRIBUTION}set_distribution", "value"
)
DATA_PARALLEL_INIT = PrivateName(
    f"{_DISTRIBUTION}DataParallel.__init__",
    "self, device_mesh, devices, auto_shard_dataset",
)

KERAS_DISTRIBUTION = (
    OPTIMIZER_INIT,
    TRAINER_INIT,
    SET_DISTRIBUTION,
    SET_DISTRIBUTION_INSIDE,
    DATA_PARALLEL_INIT,
    PrivateName(
        f"{_DISTRIBUTION}{_KNOWS_PROCESSES}.__init__",
        None,
        ("_is_multi_process",),
    ),
    PrivateName("keras.src.backend.tensorflow.distribution_lib:"),
)

# --- kernels

ATTENTION = PrivateName(
    f"{TF_OPS}.nn:dot_product_attention",
    "query, key, value, bias, mask, scale, is_causal, flash_attention, "
    "attn_logits_soft_cap",
)
GELU = PrivateName(f"{TF_OPS}.nn:gelu", "x, approximate")
EINSUM = PrivateName(f"{TF_OPS}.numpy:einsum", "subscripts, operands, kwargs")
EINSUM_DENSE_CALL = PrivateName(
    "keras.src.layers.core.einsum_dense:EinsumDense.call",
    "self, inputs, training",
)
CONV = PrivateName(
    f"{TF_OPS}.nn:conv",
    "inputs, kernel, strides, padding, data_format, dilation_rate",
)
SEPARABLE_CONV = PrivateName(
    f"{TF_OPS}.nn:separable_conv",
    "inputs, depthwise_kernel, pointwise_kernel, strides, padding, "
    "data_format, dilation_rate",
)

KERNELS = (
    ATTENTION,
    GELU,
    EINSUM,
    EINSUM_DENSE_CALL,
    CONV,
    SEPARABLE_CONV,
)

# --- memory

MEMORY = (
    PrivateName("tensorflow.compiler.xla.service.hlo_pb2:HloProto"),
    PrivateName(
        "keras.src.trainers.compile_utils:CompileLoss.__init__",
        "self, loss, loss_weights, reduction, output_names",
        ("_user_loss", "_user_loss_weights", "output_names", "reduction"),
    ),
    PrivateName(
        "keras.src.trainers.trainer:Trainer.compute_loss",
        "self, x, y, y_pred, sample_weight, training",
        ("_compile_loss",),
    ),
)

# --- optimizers

DECAY_WEIGHTS = PrivateName(
    f"{TF_OPTIMIZER}._apply_weight_decay", "self, variables"
)
UPDATE_VARIABLES = PrivateName(
    f"{TF_OPTIMIZER}._distributed_tf_update_step",
    "self, distribution, grads_and_vars, learning_rate",
)

UPDATE_STEP = PrivateName(
    f"{TF_OPTIMIZER}._backend_update_step",
    "self, grads, trainable_variables, learning_rate",
)
ITERATE = PrivateName(
    "keras.optimizers:Muon.zeropower_via_newtonschulz5",
    "self, x, steps",
)

OPTIMIZERS = (
    DECAY_WEIGHTS,
    ITERATE,
    UPDATE_STEP,
    UPDATE_VARIABLES,
    PrivateName(f"{OPTIMIZER}._use_weight_decay", "self, variable"),
)

# --- the program cache

UID = PrivateName("tensorflow.python.framework.ops:uid", "")

PROGRAM_CACHE = (
    UID,
    PrivateName(
        f"{CONTEXT}._initialize_physical_devices",
        "self, reinitialize",
        ("_physical_devices",),
    ),
)

# --- recomputation

_VARIABLE = "keras.src.backend.common.variables:Variable"
_LAYER = "keras.src.layers.layer:Layer"

REMAT = PrivateName(f"{TF_OPS}.core:remat", "f")
VARIABLE_VALUE = PrivateName(f"{_VARIABLE}.value", None, ("_value",))
VARIABLE_ASSIGN = PrivateName(
    f"{_VARIABLE}.assign", None, ("_convert_to_tensor", "_dtype", "add_update")
)
REMATERIALIZED_CALL = PrivateName(
    f"{_LAYER}.rematerialized_call",
    "self, layer_call, args, kwargs",
    ("_remat_mode", "mode", "activation"),
)

RECOMPUTATION = (
    REMAT,
    VARIABLE_VALUE,
    VARIABLE_ASSIGN,
    REMATERIALIZED_CALL,
    PrivateName(f"{_LAYER}._flatten_layers", "self, include_self, recursive"),
    PrivateName(f"{_LAYER}._get_call_context", "self", ("current_call_ctx",)),
    PrivateName("keras.src.layers.layer:CallContext", "entry_layer"),
    PrivateName("keras.src.backend:AutocastScope", "dtype"),
    PrivateName("keras.src.backend:get_autocast_scope", ""),
    PrivateName("keras.src.backend:get_stateless_scope", ""),
    PrivateName("keras.src.backend:in_stateless_scope", ""),
    PrivateName(
        "keras.src.backend.common.symbolic_scope:in_symbolic_scope", ""
    ),
    PrivateName("tensorflow.python.eager.record:VariableWatcher"),
    PrivateName("tensorflow.python.ops.while_v2:_WhileBodyGradFuncGraph"),
)

# --- resume

_DATA = "tensorflow.python.data.ops"
_COMPILED = "keras.src.trainers.compile_utils"
BUILD_METRICS = PrivateName(
    f"{_COMPILED}:CompileMetrics.build", "self, y_true, y_pred"
)
BUILD_LOSS = PrivateName(
    f"{_COMPILED}:CompileLoss.build", "self, y_true, y_pred"
)

RESUME = (
    BUILD_METRICS,
    BUILD_LOSS,
    PrivateName("keras.src.backend:compute_output_spec"),
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
    PrivateName(f"{CONTEXT}._set_global_seed", "self, seed", ("_rng",)),
    PrivateName("tensorflow:data.Dataset._inputs", "self"),
    PrivateName("tensorflow:data.Dataset._functions", "self"),
    PrivateName("tensorflow:data.Dataset._variant_tensor"),
    PrivateName(
        f"{_DATA}.structured_function:StructuredFunctionWrapper.__init__",
        None,
        ("_func",),
    ),
    PrivateName(f"{_DATA}.batch_op:_BatchDataset"),
    PrivateName(f"{_DATA}.batch_op:_ParallelBatchDataset"),
    PrivateName(
        f"{_DATA}.cache_op:CacheDataset.__init__", None, ("_filename",)
    ),
    PrivateName(f"{_DATA}.concatenate_op:_ConcatenateDataset"),
    PrivateName(f"{_DATA}.dataset_ops:_OptionsDataset"),
    PrivateName(f"{_DATA}.filter_op:_FilterDataset"),
    PrivateName(f"{_DATA}.map_op:_MapDataset"),
    PrivateName(f"{_DATA}.map_op:_ParallelMapDataset"),
    PrivateName(f"{_DATA}.prefetch_op:_PrefetchDataset"),
    PrivateName(f"{_DATA}.repeat_op:_RepeatDataset"),
)

# --- sharding

APPLY_FILTERED = PrivateName(
    f"{OPTIMIZER}._backend_apply_gradients", "self, grads, trainable_variables"
)
UPDATE_AVERAGES = PrivateName(
    f"{OPTIMIZER}._update_model_variables_moving_average",
    "self, trainable_variables",
)
PUSH_TAPE = PrivateName("tensorflow:GradientTape._push_tape", "self")

SHARDING = (APPLY_FILTERED, PUSH_TAPE, UPDATE_AVERAGES)

NAMES = (
    *KERAS_DISTRIBUTION,
    *KERNELS,
    *MEMORY,
    *OPTIMIZERS,
    *PROGRAM_CACHE,
    *RECOMPUTATION,
    *RESUME,
    *SHARDING,
)
