"""``tokenloom demo``: run.py tells the story; check.py and train.py are what the ranks do."""
