"""Names inside of Keras and TensorFlow that extensions need, by extension."""

from keras_conflux._compat.private_keras_names import TF_OPS
from keras_conflux._compat.private_keras_names import Patched
from keras_conflux._compat.private_names import Private
from keras_conflux._compat.private_names import Public
from keras_conflux._compat.private_tensorflow_names import CONTEXT

NAMES: dict[str, tuple[Private | Public, ...]] = {}

# --- keras.distribution

_TRAINER = Patched.FIT.owner

OPTIMIZER_INIT = Public("keras.optimizers:Optimizer.__init__")
# Models of layers do not call `Model.__init__`, which they inherit.
TRAINER_INIT = Private(
    f"{_TRAINER.__module__}:{_TRAINER.__qualname__}.__init__", "self"
)
# Keras exports a second reference to this function.
SET_DISTRIBUTION = Public("keras.distribution:set_distribution")
SET_DISTRIBUTION_INSIDE = Private(
    "keras.src.distribution.distribution_lib:set_distribution", "value"
)
DATA_PARALLEL_INIT = Public("keras.distribution:DataParallel.__init__")

NAMES["keras_distribution"] = (
    OPTIMIZER_INIT,
    TRAINER_INIT,
    SET_DISTRIBUTION,
    SET_DISTRIBUTION_INSIDE,
    DATA_PARALLEL_INIT,
    Private("keras.distribution:DataParallel", mentions="_is_multi_process"),
    Private("keras.src.backend.tensorflow.distribution_lib:"),
)

# --- kernels

ATTENTION = Private(
    f"{TF_OPS}.nn:dot_product_attention",
    "query, key, value, bias, mask, scale, is_causal, flash_attention, "
    "attn_logits_soft_cap",
)
GELU = Private(f"{TF_OPS}.nn:gelu", "x, approximate")
EINSUM = Private(f"{TF_OPS}.numpy:einsum", "subscripts, operands, kwargs")
EINSUM_DENSE_CALL = Public("keras.layers:EinsumDense.call")
CONV = Private(
    f"{TF_OPS}.nn:conv",
    "inputs, kernel, strides, padding, data_format, dilation_rate",
)

NAMES["kernels"] = (ATTENTION, GELU, EINSUM, EINSUM_DENSE_CALL, CONV)

# --- memory

NAMES["memory"] = (
    Private("tensorflow.compiler.xla.service.hlo_pb2:HloProto"),
    Private(
        "keras.src.trainers.compile_utils:CompileLoss.__init__",
        "self, loss, loss_weights, reduction, output_names",
        "_user_loss, _user_loss_weights, output_names, reduction",
    ),
)

# --- optimizers

DECAY_WEIGHTS = Private(
    "keras.optimizers:Optimizer._apply_weight_decay", "self, variables"
)
UPDATE_VARIABLES = Private(
    "keras.optimizers:Optimizer._distributed_tf_update_step",
    "self, distribution, grads_and_vars, learning_rate",
)

UPDATE_STEP = Private(
    "keras.optimizers:Optimizer._backend_update_step",
    "self, grads, trainable_variables, learning_rate",
)
ITERATE = Public("keras.optimizers:Muon.zeropower_via_newtonschulz5")

NAMES["optimizers"] = (
    DECAY_WEIGHTS,
    ITERATE,
    UPDATE_STEP,
    UPDATE_VARIABLES,
    Private("keras.optimizers:Optimizer._use_weight_decay", "self, variable"),
)

# --- the program cache

UID = Private("tensorflow.python.framework.ops:uid", "")

NAMES["program_cache"] = (
    UID,
    Private(
        f"{CONTEXT}._initialize_physical_devices",
        "self, reinitialize",
        "_physical_devices",
    ),
)

# --- recomputation

REMAT = Private(f"{TF_OPS}.core:remat", "f")
REMATERIALIZED_CALL = Public("keras:Layer.rematerialized_call")
DIFFERENTIATE = Private(
    "tensorflow.python.eager.imperative_grad:imperative_grad",
    "tape, target, sources, output_gradients, sources_raw, "
    "unconnected_gradients",
)

NAMES["recomputation"] = (
    REMAT,
    REMATERIALIZED_CALL,
    DIFFERENTIATE,
    Private("keras:Layer", mentions="_remat_mode"),
    Private("keras.src.backend.common.symbolic_scope:in_symbolic_scope", ""),
)

# --- resume

_MADE = "keras.src.trainers.compile_utils"
_SAVING = "keras.src.saving.saving_lib"
BUILD_METRICS = Private(f"{_MADE}:CompileMetrics.build", "self, y_true, y_pred")
BUILD_LOSS = Private(f"{_MADE}:CompileLoss.build", "self, y_true, y_pred")
_DATA = "tensorflow:data.Dataset"
DRAW = (
    Public(f"{_DATA}.__iter__", "self"),
    Public(f"{_DATA}.get_single_element", "self, name"),
    Public(f"{_DATA}.reduce", "self, initial_state, reduce_func, name"),
)

ENUMERATE_ITERATOR = Private(
    "keras.src.trainers.epoch_iterator:EpochIterator._enumerate_iterator",
    "self",
    "_get_iterator, _steps_seen, _current_iterator, _num_batches",
)

NAMES["resume"] = (
    BUILD_METRICS,
    BUILD_LOSS,
    *DRAW,
    Private("keras.src.backend:compute_output_spec"),
    Private("keras.callbacks:CallbackList", mentions="_futures"),
    ENUMERATE_ITERATOR,
    Private(
        "keras.src.trainers.data_adapters.py_dataset_adapter:PyDatasetAdapter.__init__",
        None,
        "py_dataset",
    ),
    Private(
        f"{_SAVING}:_save_state",
        "saveable, weights_store, assets_store, inner_path, visited_saveables",
    ),
    Private(f"{_SAVING}:H5IOStore.__init__", "self, path_or_io, archive, mode"),
    Private(f"{_SAVING}:H5IOStore.make", "self, path, metadata"),
    Private(f"{CONTEXT}._set_global_seed", "self, seed", "_rng"),
    Private("tensorflow:data.Dataset", mentions="_functions, _inputs"),
    Private(
        "tensorflow.python.data.ops.cache_op:CacheDataset.__init__",
        None,
        "_filename",
    ),
)

# --- sharding

APPLY_FILTERED = Private(
    "keras.optimizers:Optimizer._backend_apply_gradients",
    "self, grads, trainable_variables",
)
UPDATE_AVERAGES = Private(
    "keras.optimizers:Optimizer._update_model_variables_moving_average",
    "self, trainable_variables",
)
PUSH_TAPE = Private("tensorflow:GradientTape._push_tape", "self")
VARIABLE_VALUE = Public("keras:Variable.value")

NAMES["sharding"] = APPLY_FILTERED, PUSH_TAPE, UPDATE_AVERAGES, VARIABLE_VALUE
