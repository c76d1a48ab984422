"""Rows of queries and of keys that share a scale in INT8. A module of its own: it needs no Triton."""

from __future__ import annotations

# A program of the forward takes queries with one scale, and keys with one scale in each step.
QUERY_ROWS, KEY_ROWS = 128, 64
