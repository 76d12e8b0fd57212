"""How long tests wait for what never comes."""

HANGS = 1200.0
"""Seconds after which a process of a test counts as hung: far above what any needs, also on a busy machine."""
