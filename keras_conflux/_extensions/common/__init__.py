"""What several extensions use."""
