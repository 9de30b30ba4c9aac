"""Keeps what XLA has compiled on disk, for the next start of a program."""
