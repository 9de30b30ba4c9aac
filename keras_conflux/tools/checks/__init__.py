"""What `keras-conflux check` checks, each in a process of its own."""
