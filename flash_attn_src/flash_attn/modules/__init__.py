"""Modules: multi-head attention."""
