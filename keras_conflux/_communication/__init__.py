"""What replicas exchange: one tensor, then trees of tensors."""
