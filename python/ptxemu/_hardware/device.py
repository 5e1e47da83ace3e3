"""What a machine is before anything runs on it: its size, its memory, the rules that it holds."""

from __future__ import annotations

from dataclasses import dataclass

from .memory import Memory
from .tensormap import TensorMaps

__all__ = ["SHARED_LIMIT", "Device", "Rules"]

#: Shared memory of a block, in bytes, by architecture ("CUDA C++ Programming Guide", 20.1).
SHARED_LIMIT = {"sm_90a": 227 * 1024, "sm_100a": 227 * 1024}


@dataclass(frozen=True)
class Rules:
    """Rules of the ISA that the hardware or its assembler is seen to do without.

    ``Machine``'s arguments of the same names say what each rule is.
    """

    tensor_load_waits: bool = True
    barrier_fences: bool = True
    register_fences: bool = True


@dataclass(frozen=True)
class Device:
    """What a launch knows of its machine.

    Attributes:
        arch: What PTX is compiled for.
        sms: Multiprocessors; each runs one block at a time.
        seed: Of the order of events.
        rules: Those that are held.
        shared_limit: Bytes of shared memory that a block may have.
        memory: Global memory.
        tensor_maps: Those that kernels were passed.
    """

    arch: str
    sms: int
    seed: int
    rules: Rules
    shared_limit: int
    memory: Memory
    tensor_maps: TensorMaps
