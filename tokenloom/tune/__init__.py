"""Choices made by measurement."""
