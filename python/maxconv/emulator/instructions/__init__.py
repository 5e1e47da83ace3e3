"""The instructions: importing this package fills ``table``."""

from . import (
    asynchronous,
    cluster,
    control,
    convert,
    floating,
    integer,
    logic,
    matrix,
    mbarrier,
    memory,
    synchronize,
    warp,
    wgmma,
)

__all__ = [
    "asynchronous",
    "cluster",
    "control",
    "convert",
    "floating",
    "integer",
    "logic",
    "matrix",
    "mbarrier",
    "memory",
    "synchronize",
    "warp",
    "wgmma",
]
