"""The support bundle's own parts: what is left out of it, bounded reading, one file made whole."""
