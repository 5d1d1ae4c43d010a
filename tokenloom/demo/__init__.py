"""``tokenloom demo``: run.py tells the story; check.py and train.py are what ranks do.

train_moe_lm.py is the program of examples/, by a symbolic link: there is one model and one training loop.
"""
