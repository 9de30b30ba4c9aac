"""Batches and data sets: cut, moved and prefetched."""
