"""Sweeps: points of a comparison, the queue that trains them, and the report over their runs."""
