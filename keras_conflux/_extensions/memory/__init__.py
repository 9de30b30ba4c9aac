"""What a model needs on each device, and a note where memory runs out."""
