"""The memory of a model on each device, and a note where it runs out."""
