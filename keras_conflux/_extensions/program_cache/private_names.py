"""Names inside of Keras and TensorFlow that the cache needs."""

from keras_conflux._compat.private_names import PrivateName
from keras_conflux._compat.private_tensorflow_names import CONTEXT

UID = PrivateName("tensorflow.python.framework.ops:uid", "")

NAMES = (
    UID,
    PrivateName(
        f"{CONTEXT}._initialize_physical_devices",
        "self, reinitialize",
        ("_physical_devices",),
    ),
)
