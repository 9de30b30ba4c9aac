"""Where the replicas of a step meet, or differ."""
