"""Convolutions for MAX graphs; loading this package registers its ops."""

from .registrations import (
    ConvCpu,
    ConvFusedInputCpu,
    ConvFusedInputGpu,
    ConvGpu,
)
from .interleaved_registrations import (
    ConvInterleavedCpu,
    ConvInterleavedGpu,
    ConvInterleavedUnfusedCpu,
    ConvInterleavedUnfusedGpu,
)
from .pool_registrations import PoolCpu, PoolGpu
from .unfused_registrations import ConvUnfusedCpu, ConvUnfusedGpu
from .norm_registrations import (
    GroupNormGpu,
    GroupNormUnfusedGpu,
    RmsNormGpu,
    RmsNormUnfusedGpu,
)
