"""The supervisor: spawn, probe, drain, react, exit."""
