"""Packages that an option needs, and tokenloom does not."""

from __future__ import annotations

from tokenloom.errors import TokenloomError


class PackageMissing(TokenloomError, ImportError):
    """A package is not installed, or not as an option needs it. The message says which one, and what to install."""
