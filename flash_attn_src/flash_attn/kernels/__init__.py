"""Triton kernels, one operation a module, and what is known of them as data.

groups.py: the named tuples that kernels pass to device functions. scores.py: score modifiers. tiles.py: loads, products
and stores of tiles. common.py: program order, lengths and casts.
operations.py: one row an operation (its fields: operation.py). targets.py: one row a GPU target. variants.py: which
kernels exist ahead of time. tuning/: their tiles. launches.py: from a variant and a target to constants and compiler
options. splits.py: split-KV. These modules import at most Triton, never torch, because the compile stage has no torch.
"""
