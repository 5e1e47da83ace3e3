"""The instructions: importing this package fills ``table``."""

from . import (
    asynchronous,
    cluster,
    control,
    convert,
    floating,
    integer,
    launchcontrol,
    logic,
    matrix,
    mbarrier,
    memory,
    synchronize,
    tensorcore,
    tensormemory,
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
    "launchcontrol",
    "logic",
    "matrix",
    "mbarrier",
    "memory",
    "synchronize",
    "tensorcore",
    "tensormemory",
    "warp",
    "wgmma",
]
