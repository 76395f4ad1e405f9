"""Compares what two served checkpoints say: perplexity, agreement, divergence, and small tasks."""
