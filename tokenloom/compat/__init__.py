"""Modules with the names and signatures that other programs import."""
