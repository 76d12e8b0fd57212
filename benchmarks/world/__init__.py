"""Studies in the world: run from a checkout as `python -m benchmarks.world.score RUN` and the like."""
