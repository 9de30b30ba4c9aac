"""What training loops of the user's own are made of."""
