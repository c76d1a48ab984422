"""The compiler of Triton kernels."""
