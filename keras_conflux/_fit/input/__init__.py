"""The way from the user's data to batches on the devices."""
