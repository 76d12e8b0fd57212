"""`vsa certify`: what a model is with sparse attention, measured where its weights are."""
