"""The parts of training loops of the user's own.

They stand on the core, which imports nothing of them: here the user reduces,
and nothing is inferred.
"""
