"""`keras.distribution` on TensorFlow."""
