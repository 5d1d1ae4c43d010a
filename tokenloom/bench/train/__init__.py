"""``tokenloom bench train``: a training step of ExpertParallelMoE, checked, and beside baselines."""
