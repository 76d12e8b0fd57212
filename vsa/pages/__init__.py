"""What the pages of `vsa report` and `vsa compare-attention` share: charts, tables, and one file that loads nothing."""
