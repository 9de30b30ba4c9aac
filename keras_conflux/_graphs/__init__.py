"""Reads and rewrites graphs that TensorFlow has traced, of any program.

`effects` knows an operation's effects on state, `bodies` the graphs of
functions, branches and loops, `resources` the variables of handles, `walks` the
paths in a graph, and `rewriting` copies operations and redirects readers.
Nothing else of the package is imported here.
"""
