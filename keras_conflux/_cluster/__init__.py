"""Which processes train together, and which of them this one is."""
