"""Measures training and collectives: `python -m examples.benchmarks`."""
