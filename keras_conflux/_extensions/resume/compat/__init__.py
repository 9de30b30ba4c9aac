"""The insides of Keras and TensorFlow that resuming needs."""
