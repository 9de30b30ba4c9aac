"""`skip_out_of_memory`: goes on after a batch for which there is no memory."""
