"""Names inside of Keras and TensorFlow that resuming needs."""

from keras_conflux._compat.private_names import PrivateName
from keras_conflux._compat.private_tensorflow_names import CONTEXT

_DATA = "tensorflow.python.data.ops"
_COMPILED = "keras.src.trainers.compile_utils"
BUILD_METRICS = PrivateName(
    f"{_COMPILED}:CompileMetrics.build", "self, y_true, y_pred"
)
BUILD_LOSS = PrivateName(
    f"{_COMPILED}:CompileLoss.build", "self, y_true, y_pred"
)

NAMES = (
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
