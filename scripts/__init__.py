"""Tools for development: benchmark, tune and check kernels, from a checkout."""
