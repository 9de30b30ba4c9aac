"""Callbacks for `fit`."""
