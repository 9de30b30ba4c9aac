"""Updates of optimizers that are traced once, for many variables."""
