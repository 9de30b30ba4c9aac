"""Features besides the core: faster replicas, and trainings that go on."""
