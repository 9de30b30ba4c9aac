"""What makes replicas faster, or lets them go on, and what they do without."""
