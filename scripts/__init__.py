"""Development tools for a checkout: benchmarks, tuning and checks of kernels."""
