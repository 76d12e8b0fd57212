"""Studies with clips of the world: run from a checkout, for example as `python -m benchmarks.world.score RUN`."""
