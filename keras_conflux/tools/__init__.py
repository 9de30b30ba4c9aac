"""What is used from the command line."""
