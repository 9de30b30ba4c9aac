"""Which devices there are, and which of them TensorFlow takes."""
