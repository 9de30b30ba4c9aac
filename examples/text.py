"""Tells what a sentence of Python's documentation is about, from its words.

    python examples/text.py [--epochs 4] [--devices 4]

The data are some 4,000 sentences: the docstrings of modules of the standard
library, in four areas. Strings go into the model, which splits them into
words itself, so the exported model takes strings as well.
"""

import ast
import importlib
import inspect
import os
import re

os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import tensorflow as tf
from digits import choose
from digits import serve

import keras_conflux as kc

AREAS = {
    "files": "os shutil pathlib tempfile zipfile tarfile glob filecmp _pyio",
    "network": "socket ssl smtplib ftplib imaplib poplib socketserver ipaddress"
    " http.client http.server http.cookiejar urllib.request urllib.parse",
    "numbers": "statistics fractions random numbers _pydecimal",
    "concurrency": "threading queue sched subprocess multiprocessing.pool"
    " multiprocessing.managers concurrent.futures._base asyncio.base_events"
    " asyncio.events asyncio.locks asyncio.queues asyncio.tasks",
}


def sentences(module: str) -> list[str]:
    """Returns the sentences of all docstrings of a module."""
    source = inspect.getsource(importlib.import_module(module))
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = []
    for node in ast.walk(ast.parse(source)):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        for paragraph in (text or "").split("\n\n"):
            found += re.split(r"(?<=[.:])\s+", " ".join(paragraph.split()))
    return [each for each in found if len(each.split()) > 4]


def load_data():
    """Returns (sentences, labels) to train with, and some to test."""
    labels = {
        sentence: label
        for label, modules in enumerate(AREAS.values())
        for module in modules.split()
        for sentence in sentences(module)
    }
    texts = np.random.default_rng(0).permutation(sorted(labels))
    data = np.char.encode(texts), np.array([labels[text] for text in texts])
    size = len(texts) * 4 // 5
    return [part[:size] for part in data], [part[size:] for part in data]


def build_model(texts: np.ndarray) -> keras.Model:
    layers = keras.layers
    words = layers.TextVectorization(max_tokens=4000, output_sequence_length=40)
    words.adapt(texts)
    model = keras.Sequential(
        [
            layers.Input((), dtype="string"),
            words,
            layers.Embedding(4000, 32, mask_zero=True),
            layers.GlobalAveragePooling1D(),
            layers.Dense(len(AREAS), activation="softmax"),
        ]
    )
    model.compile(
        keras.optimizers.Adam(1e-2),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )
    return model


def main() -> None:
    devices, epochs = choose(__doc__, epochs=4)
    train, (test_x, test_y) = load_data()
    dataset = tf.data.Dataset.from_tensor_slices(tuple(train)).cache()
    dataset = dataset.shuffle(len(train[0]), seed=0).batch(128)
    test = tf.data.Dataset.from_tensor_slices((test_x, test_y)).batch(128)

    keras.utils.set_random_seed(0)
    model = kc.replicate(build_model(train[0]), devices)
    model.fit(dataset, epochs=epochs)
    kc.assert_in_sync(model)

    _, accuracy = model.evaluate(test, verbose=0)
    print(f"test accuracy on {len(devices)} devices: {accuracy:.2%}")
    guess = np.bincount(test_y).max() / len(test_y)
    print(f"always the largest area: {guess:.2%}")
    serve(model, test_x)


if __name__ == "__main__":
    main()
