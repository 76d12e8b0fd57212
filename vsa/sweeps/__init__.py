"""Sweeps: points of a comparison, the queue that trains them, and the record and display of their runs."""
