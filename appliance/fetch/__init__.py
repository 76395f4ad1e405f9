"""Fetches a checkpoint from a hub: the only part of the appliance that uses a network."""
