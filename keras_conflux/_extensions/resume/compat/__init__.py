"""What resuming needs of the insides of Keras and TensorFlow."""
