"""The devices that there are, and those that TensorFlow takes."""
