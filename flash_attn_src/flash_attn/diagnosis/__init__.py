"""Describes an installation, finds out whether it works, and gives a remedy if it does not."""
