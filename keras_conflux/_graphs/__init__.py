"""Reads and rewrites what TensorFlow has traced, whatever it computes.

`effects` says what an operation does to state, `bodies` what functions,
branches and loops run, `resources` what a handle stands for, `walks` what leads
where, and `rewriting` copies operations and redirects readers. Nothing else of
the package is imported here.
"""
