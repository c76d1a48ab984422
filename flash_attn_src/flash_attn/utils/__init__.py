"""Utilities: the state of generation."""
