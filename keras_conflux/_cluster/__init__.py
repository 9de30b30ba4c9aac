"""The processes that train together."""
