"""Says what to install or set when the package cannot work as imported."""

import importlib.util


def assert_supported() -> None:
    """Raises unless TensorFlow is installed and is Keras' backend.

    Raises:
        ImportError: Saying what to type.
    """
    if importlib.util.find_spec("tensorflow") is None:
        raise ImportError(
            "keras_conflux needs TensorFlow, which is not installed. On a "
            "machine with NVIDIA GPUs type `pip install "
            "'keras-conflux[cuda]'`, elsewhere `pip install "
            "'keras-conflux[cpu]'`."
        )
    import keras

    if keras.backend.backend() != "tensorflow":
        raise ImportError(
            "keras_conflux works with Keras' TensorFlow backend, but the "
            f"active backend is {keras.backend.backend()!r}. Set the "
            "environment variable KERAS_BACKEND=tensorflow before Keras is "
            "first imported."
        )
