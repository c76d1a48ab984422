"""Triton kernels by operation. These modules import Triton alone, never torch: the compile stage has no torch."""
