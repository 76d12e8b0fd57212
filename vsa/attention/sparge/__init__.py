"""SpargeAttn: kv blocks selected by top-p over block means; blocks whose tokens differ are always computed."""
