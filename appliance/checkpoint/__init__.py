"""Checkpoint files as bytes, names and shapes."""
