"""The ways in which one tensor is all-reduced, one class for each."""
