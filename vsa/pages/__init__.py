"""Charts, tables and self-contained pages of `vsa report` and `vsa compare-attention`."""
