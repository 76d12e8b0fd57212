"""FG-Attn: masks of small tiles; query tiles are computed in groups that share their keys."""
