"""Studies with toy clips: run from a checkout, for example as `python -m benchmarks.toy.score RUN`."""
