"""``tokenloom demo``: run.py tells the story; check.py and train.py are what ranks do; model.py is what they train."""
