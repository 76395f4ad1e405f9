"""Control and weights side of the V100 NVFP4 appliance."""
