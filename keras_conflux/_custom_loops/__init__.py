"""The parts of training loops of the user's own.

They stand on the core, which imports none of them. Here the user reduces.
"""
