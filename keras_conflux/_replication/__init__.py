"""A copy of every variable on each device."""
