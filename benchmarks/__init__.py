"""Results by subject and the studies that produced them; not part of the installed package."""
