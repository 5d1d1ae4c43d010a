"""``tokenloom bench mega``: the fused FP8 layer for inference, as a whole and by stages."""
