"""Upstream's package of its Triton backend; `interface_v2` is the module that clients see in use."""
