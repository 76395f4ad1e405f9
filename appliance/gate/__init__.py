"""Runs the checks by policy and gives the verdict."""
