"""Rewrites a checkpoint in another form without changing a weight."""
