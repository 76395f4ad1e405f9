"""Makes NVFP4 checkpoints."""
