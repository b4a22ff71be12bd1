"""Microbenchmarks of the GPU kernels: one module for each, listed in `__main__`."""
