"""What the tensors of a step are with respect to the global batch."""
