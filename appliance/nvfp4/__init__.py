"""The NVFP4 number format and the library that computes with it."""
