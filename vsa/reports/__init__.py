"""`vsa report`: from run folders to a page, pictures and tables."""
