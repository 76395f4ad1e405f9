"""Measures a running appliance."""
