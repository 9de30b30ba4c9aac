"""Trainings that go on where they were interrupted."""
