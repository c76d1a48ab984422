"""Layers: rotary position embedding."""
