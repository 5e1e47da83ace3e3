"""All families of kernels, by name."""

from __future__ import annotations

from . import (
    barriers,
    clusters,
    convert,
    copies,
    floating,
    integer,
    logic,
    matrix,
    memory,
    warp,
    wgmma,
)
from .case import Family

__all__ = ["FAMILIES"]

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        integer,
        logic,
        floating,
        convert,
        warp,
        memory,
        matrix,
        wgmma,
        barriers,
        copies,
        clusters,
    )
}
