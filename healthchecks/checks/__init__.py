"""One check a file; each judges facts and returns results."""
