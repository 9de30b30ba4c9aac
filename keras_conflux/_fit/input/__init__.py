"""From the user's data to batches on the devices."""
