"""Checks of the public functions' arguments.

Each check has a fast path that only answers "everything is right". Otherwise a slow path finds out what is wrong and
raises TypeError or ValueError naming the argument, what came and what was wanted.
"""

from flash_attn.call.arguments.attention import check_dense, check_packed, check_varlen
from flash_attn.call.arguments.diagnosis import (
    as_int,
    check_alike,
    check_index,
    check_num_splits,
    check_per_sequence,
    check_strided,
    check_whole,
    check_window,
    diagnose_switches,
    is_number,
)
from flash_attn.call.arguments.gradients import check_gradients
from flash_attn.call.arguments.kvcache import check_kvcache, check_places, check_tables
from flash_attn.call.arguments.latent import check_second_query
from flash_attn.call.arguments.names import renaming

__all__ = [
    "as_int",
    "check_alike",
    "check_dense",
    "check_gradients",
    "check_index",
    "check_kvcache",
    "check_num_splits",
    "check_packed",
    "check_per_sequence",
    "check_places",
    "check_second_query",
    "check_strided",
    "check_tables",
    "check_varlen",
    "check_whole",
    "check_window",
    "diagnose_switches",
    "is_number",
    "renaming",
]
