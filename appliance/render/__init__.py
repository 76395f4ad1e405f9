"""The plan as flags, environment and compose files."""
