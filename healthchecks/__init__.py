"""Facts, checks and probes that decide whether the machine may serve; no `appliance` in here."""
