"""What `fit`, `evaluate` and `predict` do for a replicated model."""
