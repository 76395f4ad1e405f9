"""What will be launched, and why it fits."""
