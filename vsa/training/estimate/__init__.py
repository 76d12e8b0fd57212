"""Estimate of a run: memory and step time by part, and the settings that fit on a kind of GPU."""
