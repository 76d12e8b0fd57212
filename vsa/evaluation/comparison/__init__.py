"""`vsa compare-attention`: attention methods on the same queries, keys and values, and in the same denoising runs."""
