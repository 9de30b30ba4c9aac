"""The collectives between replicas, of one tensor and of trees of tensors."""
