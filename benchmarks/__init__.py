"""Results by subject, and the studies that made them; no part of the installed package."""
