"""All that the core knows of the insides of Keras and TensorFlow."""

from keras_conflux._compat import versions

versions.assert_installed()
