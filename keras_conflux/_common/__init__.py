"""Errors, and trees of tensors."""
