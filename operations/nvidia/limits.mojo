"""Sizes and limits of NVIDIA GPUs that the kernels of several generations
share.
"""

comptime WARP = 32
"""Threads of a warp."""

comptime WARPGROUP = 128
"""Threads of a warpgroup."""

comptime MAX_SHARED_BYTES = 227 * 1024
"""Shared memory that a block may have (compute capability 9.0 and 10.0)."""

comptime PATTERN_BYTES = 1024
"""Bytes after which the 128-byte swizzle repeats: 8 rows."""

comptime MMA_K_BYTES = 32
"""Bytes of a row that one instruction of the tensor cores multiplies (PTX ISA,
"wgmma.mma_async", "tcgen05.mma", shapes)."""

comptime MAX_MMA_N = 256
"""Columns of such an instruction, at most."""

comptime MAX_BOX = 256
"""Elements of a TMA box along one dimension, at most."""

comptime MAX_CLUSTER = 8
"""Blocks of a cluster that every device can place."""

comptime MAX_INDEX = 1 << 31
"""The limit of coordinates, and of the numbers of tiles and blocks."""

comptime MAX_BLOCKS = 1 << 30
"""Blocks of a grid along x, at most, where each takes tiles in turn."""

comptime MAX_GRID_ROWS = 65535
"""Blocks of a grid along y, at most."""
