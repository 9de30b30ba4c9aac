"""Keeps XLA's programs on disk, for the next start of a program."""
