"""The commands ``tokenloom bench``, ``tune``, ``plan`` and ``check-network``.

A bench is a file (``comm.py``, ``mega.py``, ``train.py``) that says who is measured, with what they do beside it
(``*_work.py``). ``harness.py`` lets them take turns, ``clock.py`` takes single samples. Tables, what is written below
them, setup, differences and charts have a file each. ``rivals/`` is what measures somebody else's code.
"""

from __future__ import annotations

from tokenloom.errors import TokenloomError


class PackageMissing(TokenloomError, ImportError):
    """A package is not installed, or not as an option needs it. The message says which one, and what to install."""
