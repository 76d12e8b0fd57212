"""Studies on toy clips: run from a checkout as `python -m benchmarks.toy.score RUN` and the like."""
