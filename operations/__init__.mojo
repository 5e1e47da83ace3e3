"""Convolutions for MAX graphs; loading this package registers its ops."""

from .registrations import (
    ConvCpu,
    ConvFusedInputCpu,
    ConvFusedInputGpu,
    ConvGpu,
    Explain,
)
from .pool_registrations import PoolCpu, PoolGpu
