"""What ``tokenloom bench`` and ``tokenloom tune`` measure.

Each command has a folder (``comm/``, ``mega/``, ``train/``; ``tune.py``) with the same stages: what the operation is
given, how its samples are taken on a rank, how samples become rows, and ``run.py``, which puts them together.
``common/`` is shared by all of them; ``rivals/`` is everything that measures somebody else's code.
"""
