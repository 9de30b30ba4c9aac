"""Attention as one fused kernel, in the XLA programs of replicas."""
