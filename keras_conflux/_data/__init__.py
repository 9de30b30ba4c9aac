"""Batches and data sets: cut and moved."""
