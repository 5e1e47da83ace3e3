"""What differs between the benchmark of a CPU and that of a GPU: all of it stands here.

The clock differs too. On a CPU it is the host's, around each call (``entrant.HostRun``). On a GPU a
kernel's time is that of replays of a captured graph between two events on the device, and a call's
that of the host from the first launch until the device has done the last (``gpu.clock``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from maxconv._dtypes import DTYPE_BYTES, FLOAT8, FLOAT8_WIDE, INT8, UINT8

from .entrant import BARE, BFLOAT16, FUSED, MAX, MAXCONV, TORCH, TORCH_COMPILE
from .timing import Protocol

__all__ = [
    "ACTIVATIONS",
    "CPU",
    "DEVICES",
    "GPU",
    "LAUNCHES",
    "LIMITS",
    "MAX_TOLERANCE",
    "ROTATED_NBYTES",
    "ROUNDED_BETWEEN",
    "TOLERANCE",
    "Device",
    "Limits",
    "is_narrow",
    "launches",
    "out_type",
]

#: Names of the fused work's activation.
ACTIVATIONS = {"relu": "ReLU", "silu": "SiLU"}

#: Launches of a graph that is replayed on a GPU, and of a call that is made without one.
LAUNCHES = 32

#: Seconds that the launches of a graph take together, at the least that a GPU can, from which there
#: are fewer than ``LAUNCHES`` of them where hundreds of problems are timed; and the fewest.
_ENOUGH_S, _FEWEST_LAUNCHES = 1.5e-3, 4

#: Bytes of the operands that a GPU's launches take in turn: more than its L2 cache holds.
ROTATED_NBYTES = 256 << 20

#: How far an element may lie from the reference, as a share of ``1 + |reference|``. The data makes
#: outputs of about 1. float32 sums of 10^4 products in another order differ by some 10^-6. A type
#: of 16 bits rounds by half a unit of its last place, 2^-9 or 2^-12, and up to three times where
#: convolution, activation and addition are operations of their own.
#: Outputs of 8-bit operands are bfloat16. A bare one of int8 is exact but for its one rounding, and
#: must be equal. Hopper's tensor cores keep about 14 bits of a sum of float8 products: the 800
#: additions of the longest sums may lose 800 * 2^-14 of it.
#: uint8 has steps of 1/32: outputs of a CPU are rounded to half of one, and to a whole one more
#: where torch adds a residual by another operator.
TOLERANCE = {
    "float32": 1e-4,
    "bfloat16": 2.0**-6,
    "float16": 2.0**-9,
    INT8: 2.0**-6,
    UINT8: 2.0**-4,
    FLOAT8: 2.0**-4,
    FLOAT8_WIDE: 2.0**-4,
}

#: The same for MAX's own convolutions, which on a CPU sum in the storage type: less exact in 16
#: bits, but no other computation.
MAX_TOLERANCE = {"float32": 1e-4, "bfloat16": 2.0**-2, "float16": 2.0**-5}


#: How many times as far torch may be off where work is fused: it rounds what the convolution's
#: kernel stores, and without its compiler the sum with the bias and the activation too. These may
#: be large beside the result, if the residual has the other sign.
ROUNDED_BETWEEN = 4


def is_narrow(dtype: str) -> bool:
    """Returns whether a storage type of activation and filter has 8 bits."""
    return dtype not in DTYPE_BYTES


def out_type(dtype: str) -> str:
    """Returns the storage type of outputs."""
    return BFLOAT16 if is_narrow(dtype) and dtype != UINT8 else dtype


@dataclass(frozen=True)
class Limits:
    """What a GPU's data sheet promises."""

    flops: float
    """Floating-point operations a second of 16-bit types on tensor cores, without sparsity."""
    nbytes: float
    """Bytes a second of its memory."""

    def seconds(self, flops: float, nbytes: float, dtype: str = BFLOAT16) -> float:
        """Returns the least time in which so much can be computed and moved."""
        return max(self.computing(flops, dtype), nbytes / self.nbytes)

    def computing(self, flops: float, dtype: str) -> float:
        """Returns the least time of the products; those of 8 bits take half of it."""
        return flops / self.flops / (2 if is_narrow(dtype) else 1)


#: By the name that the driver gives: NVIDIA's data sheets of the H100 SXM and the H200 SXM.
LIMITS = {
    "NVIDIA H100 80GB HBM3": Limits(989.4e12, 3.35e12),
    "NVIDIA H200": Limits(989.4e12, 4.8e12),
}


def launches(flops: float, nbytes: float, sets: int, *, many: bool) -> int:
    """Returns how many launches of a problem a GPU's graph holds.

    A graph of long launches needs fewer of them: the time between two replays hardly counts.

    Args:
        flops: Floating-point operations of the problem.
        nbytes: Bytes that it moves.
        sets: Sets of operands that take turns, each at least once.
        many: Whether there are hundreds of problems.
    """
    if not many:
        return LAUNCHES
    least = LIMITS["NVIDIA H200"].seconds(flops, nbytes)
    return max(sets, min(LAUNCHES, max(_FEWEST_LAUNCHES, math.ceil(_ENOUGH_S / least))))


@dataclass(frozen=True)
class Device:
    """How one kind of device is measured."""

    name: str
    dtypes: tuple[str, ...]
    """Storage types, the default first."""
    activation: str
    """That of the fused work: ``activation(convolution + bias) + residual``."""
    works: Mapping[str, tuple[str, ...]]
    """The contenders, and what each is timed with."""
    full: Protocol
    models: Protocol
    """For whole models, whose calls are longer."""
    many: Protocol
    """For hundreds of problems."""
    of_many: tuple[str, ...]
    """The contenders of hundreds of problems, unless others are asked for."""
    narrow_dtypes: tuple[str, ...] = ()
    """Storage types of 8 bits of activation and filter."""
    narrow_works: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """``works`` in those."""


_CPU_FULL = Protocol(
    pause_s=0.01,
    rest=0.0,
    longest_pause_s=0.01,
    calls=10,
    discarded=3,
    burst_s=0.1,
    rounds=30,
    fewest_rounds=5,
    budget_s=1.0,
    slow_s=2.0,
)

CPU = Device(
    name="cpu",
    dtypes=("float32", "bfloat16", "float16"),
    activation="relu",
    works={
        MAXCONV: (BARE, FUSED),
        "torch": (BARE, FUSED),
        "torch.compile": (BARE, FUSED),
        MAX: (BARE,),
    },
    full=_CPU_FULL,
    models=Protocol(
        pause_s=0.01,
        rest=0.0,
        longest_pause_s=0.01,
        calls=10,
        discarded=3,
        burst_s=0.5,
        rounds=10,
        fewest_rounds=3,
        budget_s=6.0,
        slow_s=10.0,
    ),
    many=_CPU_FULL,
    of_many=(MAXCONV, TORCH, TORCH_COMPILE, MAX),
    narrow_dtypes=(UINT8,),
    narrow_works={MAXCONV: (BARE, FUSED), TORCH: (BARE, FUSED)},
)

_GPU_FULL = Protocol(
    pause_s=0.02,
    rest=6.0,
    longest_pause_s=0.25,
    calls=3,
    discarded=0,
    burst_s=0.3,
    rounds=5,
    fewest_rounds=3,
    budget_s=3.0,
    slow_s=0.2,
)

GPU = Device(
    name="gpu",
    dtypes=("bfloat16", "float16"),
    activation="silu",
    works={
        MAXCONV: (BARE, FUSED),
        "torch": (BARE, FUSED),
        "torch.compile": (FUSED,),
        "cudnn": (FUSED,),
        MAX: (BARE, FUSED),
    },
    full=_GPU_FULL,
    models=Protocol(
        pause_s=0.02,
        rest=6.0,
        longest_pause_s=0.25,
        calls=200,
        discarded=0,
        burst_s=0.1,
        rounds=8,
        fewest_rounds=3,
        budget_s=3.0,
        slow_s=2.0,
    ),
    many=replace(_GPU_FULL, pause_s=0.002, rest=3.0),
    of_many=(MAXCONV, TORCH, TORCH_COMPILE),
    narrow_dtypes=(INT8, FLOAT8, FLOAT8_WIDE),
    narrow_works={MAXCONV: (BARE, FUSED), BFLOAT16: (BARE, FUSED)},
)

#: By the name that ``--device`` takes.
DEVICES = {device.name: device for device in (CPU, GPU)}
