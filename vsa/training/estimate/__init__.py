"""What a run will take, before it takes it: memory by part, time of a step by part, and what fits on a kind of GPU."""
