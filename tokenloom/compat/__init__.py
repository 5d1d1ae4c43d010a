"""Modules with the names and signatures that other programs import."""

from tokenloom.compat.installation import install

__all__ = ["install"]
