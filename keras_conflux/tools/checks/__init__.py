"""The checks of `keras-conflux check`, each in a process of its own."""
