"""Runs the steps of all replicas."""
