"""The parts that several extensions use."""
