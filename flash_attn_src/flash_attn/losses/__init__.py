"""Losses: cross entropy."""
