"""Values that kernels and their callers agree on: the bits of `flags`, and what stands for an open window."""

from __future__ import annotations

# Which of the optional pointers are real. These are run-time bits and not constants, because one scalar branch for each
# program costs nothing and a second copy of every code object does. The rows of `modifiers` have bits of their own.
HAS_CU_SEQLENS_Q = 1
HAS_CU_SEQLENS_K = 2
HAS_SEQUSED_K = 4
HAS_LEFTPAD_K = 8
HAS_CACHE_BATCH_IDX = 32
HAS_ROTARY_SEQLENS = 64
HAS_DESCALE = 128
HAS_BLOCK_TABLE = 1024
HAS_SINKS = 4096
# The sinks have the element type of the result. Without it they are fp32.
SINKS_LIKE_OUT = 8192
# The bias of the scores is fp32. Without it the bias has the element type of q.
BIAS_IS_FP32 = 16384

# Which parts the mask of a kernel has: a block mask, ranges of keys for each query, ids, ranges of hidden queries for
# each key, a bit for each score in the place of ranges (kind `any` alone).
HAS_BLOCKS = 1 << 17
HAS_RANGES = 1 << 18
HAS_IDS = 1 << 19
HAS_HIDDEN = 1 << 20
HAS_BITS = 1 << 21

# Bytes of a block mask: hidden, visible where the other parts of a mask show it, visible whatever they hide.
HIDDEN_BLOCK, PARTIAL_BLOCK, WHOLE_BLOCK = 0, 1, 2

# The cache is FP8 and the queries have 16 bits. Without this flag the queries are FP8, too.
QUERY_HAS_16_BITS = 32768
# With QUERY_HAS_16_BITS: the queries and the result are fp16. Without this flag they are bf16.
QUERY_IS_FP16 = 65536

# The grid has the blocks of the packed rows. Without it every sequence has as many blocks as the longest.
PACKED_BLOCKS = 2048

# The lower bits of the argument `chunk` of `common.program_order`. The bits above them hold the first program of a
# launch, for a grid that is launched in pieces.
CHUNK_BITS = 4
CHUNK_MASK = (1 << CHUNK_BITS) - 1

# The constant PAGE_MODE: how a kernel finds the page of a key, 0 where keys do not lie in pages. Per block: no block of
# BLOCK_N keys crosses a page.
PAGE_PER_KEY = 1
PAGE_PER_BLOCK = 2

# Rotary embedding: pairs (0, 1), (2, 3), ... instead of (i, i + rotary_half). Query i has the angle of its own position
# instead of the first query's.
ROTARY_INTERLEAVED = 256
ROTARY_MOVES = 512

# An open window: wider than any sequence, and so small that the sum of a position, a shift and a window is an int32.
OPEN_WINDOW = 1 << 29

# Row strides are smaller than this, in units of 16 bytes, so that 128 rows of a tile span less than 2 GiB.
MAX_ROW_STRIDE = 1 << 20
# Rows of a bias are closer than this, in elements, so that 256 rows of a tile span less than 2 GiB in fp32.
MAX_BIAS_ROW = 1 << 21

# The rotary kernel reads a position offset per sequence.
HAS_OFFSETS = 2

NORM_HAS_BIAS = 1
NORM_HAS_RESIDUAL = 2
NORM_STORE_Z = 4
NORM_IS_RMS = 8

LOSS_HAS_LSE = 1
LOSS_IS_SPLIT = 2
