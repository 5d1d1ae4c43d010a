"""``tokenloom check-network``: what a user runs on a cluster before trusting it.

``check.py`` is what every rank does, part by part, and what is shown of it.
"""
