"""What `scripts/bench.py` measures, how, and against whom."""
