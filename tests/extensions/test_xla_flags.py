"""The flags of XLA that choose how products are computed on GPUs."""

import os

import pytest
import tensorflow as tf
from models import dense
from models import regression

import keras_conflux as kc
from keras_conflux._extensions.common import xla_flags

PRODUCTS = (
    "--xla_gpu_enable_cublaslt=true "
    "--xla_disable_hlo_passes=gemm-workspace-rewriter "
    "--xla_gpu_enable_triton_gemm=false"
)
METADATA = "importlib.metadata.version"


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """A TensorFlow for GPUs that has the flags, and a JAX that has them."""
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setattr(tf, "__version__", "2.21.0")
    monkeypatch.setattr(METADATA, {"jaxlib": "0.10.2"}.get)


@pytest.mark.parametrize("given", [{}, {"XLA_FLAGS": "--mine --own=1"}])
def test_they_are_set_once_and_removed(given):
    environ = dict(given)
    for _ in range(2):  # as in a child process
        xla_flags.choose_products(environ)
        before = given.get("XLA_FLAGS", "")
        assert environ["XLA_FLAGS"] == f"{before} {PRODUCTS}".lstrip()
    environ["XLA_FLAGS"] += " --later"
    xla_flags.remove_products(environ)
    assert environ["XLA_FLAGS"] == f"{before} --later".lstrip()
    alone = {}
    xla_flags.choose_products(alone)
    xla_flags.remove_products(alone)
    assert alone == {}
    xla_flags.remove_products(alone)
    assert alone == {}


@pytest.mark.parametrize(
    "given",
    [
        {"KERAS_CONFLUX_XLA_FLAGS": "0"},
        {"XLA_FLAGS": "--xla_gpu_enable_cublaslt=false"},
        {"XLA_FLAGS": "--xla_disable_hlo_passes=mine"},
        {"XLA_FLAGS": "/my/flags"},
    ],
)
def test_what_the_user_has_set_stays(given):
    environ = dict(given)
    xla_flags.choose_products(environ)
    assert environ == given


def test_kernels_of_triton_that_the_user_wants():
    environ = {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}
    xla_flags.choose_products(environ)
    assert environ["XLA_FLAGS"] == (
        f"--xla_gpu_enable_triton_gemm=true {PRODUCTS.rpartition(' ')[0]}"
    )
    xla_flags.remove_products(environ)
    assert environ == {"XLA_FLAGS": "--xla_gpu_enable_triton_gemm=true"}


def test_versions_that_may_not_have_them(monkeypatch):
    environ = {}
    for version in ("0.7.1", "0.12.0", "1.0"):
        monkeypatch.setattr(METADATA, {"jaxlib": version}.get)
        xla_flags.choose_products(environ)
    monkeypatch.setattr(METADATA, {"jaxlib": "0.11.2"}.get)
    for version in ("2.20.0", "2.22.0"):
        monkeypatch.setattr(tf, "__version__", version)
        xla_flags.choose_products(environ)
    monkeypatch.setattr(tf, "__version__", "2.21.0")
    monkeypatch.setattr(tf.test, "is_built_with_cuda", lambda: False)
    xla_flags.choose_products(environ)
    assert environ == {}


def test_a_process_that_a_training_starts_does_not_get_them(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", PRODUCTS)
    model = kc.replicate(dense(jit_compile=True), 1)
    model.fit(*regression(8), verbose=0)
    assert "XLA_FLAGS" not in os.environ
