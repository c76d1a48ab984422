"""Attention kernels of other projects, from a checkout that the caller names. Nothing of them is in this repository."""
