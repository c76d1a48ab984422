"""Wheels become a release, its notes and the package index."""
