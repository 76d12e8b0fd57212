"""Benchmarks of `python -m scripts.bench`: problems, timing, checks and peers."""
