"""Layers whose activations are computed again for the backward pass."""
