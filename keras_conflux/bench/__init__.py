"""Measures training and collectives: `python -m keras_conflux.bench`."""
