"""FG-Attn: masks of small tiles, whose query tiles are computed in groups that share their keys."""
