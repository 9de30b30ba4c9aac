"""What numbers are like, and whether they are finite."""
