"""Kernel sources become kernel stores, one for each GPU target."""
