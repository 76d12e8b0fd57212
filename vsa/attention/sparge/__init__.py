"""SpargeAttn: kv blocks chosen by a share of the softmax of block means, where means stand for their blocks."""
