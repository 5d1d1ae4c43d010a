"""Other people's code beside which ours is measured, each called as its own documentation says."""
