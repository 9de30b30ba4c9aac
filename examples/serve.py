"""Serves an exported model where neither Keras nor this package is.

    python examples/serve.py MODEL INPUTS.npy OUTPUTS.npy

MODEL is a folder that `model.export` made. Needs TensorFlow and numpy; a CPU
is enough. The other examples run it in a process of its own.
"""

import os
import sys

os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
sys.modules["keras"] = sys.modules["keras_conflux"] = None  # cannot be imported

import numpy as np
import tensorflow as tf


def main() -> None:
    folder, inputs, outputs = sys.argv[1:]
    model = tf.saved_model.load(folder)
    np.save(outputs, model.serve(tf.constant(np.load(inputs))))


if __name__ == "__main__":
    main()
