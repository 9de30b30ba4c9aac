"""The behaviour of `fit`, `evaluate` and `predict` for a replicated model."""
