"""Statistics of numbers, and whether they are finite."""
