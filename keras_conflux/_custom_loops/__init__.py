"""The parts of training loops of the user's own."""
