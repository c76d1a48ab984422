"""Simulated cycles: the cost of each instruction, and a timeline of the waves of a compute unit."""
