"""Modules with the names that other programs import."""
