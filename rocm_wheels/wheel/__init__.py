"""Kernel stores become a wheel that is repaired and tested."""
