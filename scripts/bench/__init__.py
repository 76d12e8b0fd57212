"""What `python -m scripts.bench` measures, how, and against whom."""
