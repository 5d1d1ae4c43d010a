"""Experts on their way to helpers."""
