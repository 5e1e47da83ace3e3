"""Runs PTX on the CPU: kernels for Hopper and Blackwell, as Mojo emits them, without a GPU.

``Machine`` holds global memory; ``load`` reads a PTX text, ``launch`` runs a kernel to its end or
stops it where it does something that the hardware does not define::

    machine = Machine("sm_90a", sms=4, seed=1)
    x = machine.alloc(np.arange(64, dtype=np.float32))
    machine.load(ptx).launch("scale", grid=2, block=32, args=[x, 3.0])
    print(x.read())

``python -m ptxemu`` is the command line; ``ptxemu.tma`` is the model of TMA; ``ptxemu.trace`` says
what a trace holds. ``docs/ptxemu.md`` in the repository says what is checked, what is not known,
and how the modules build on each other.
"""

from ._errors import (
    BarrierError,
    BudgetError,
    DeadlockError,
    EmulatorError,
    FenceError,
    IllegalInstructionError,
    MemoryFaultError,
    Place,
    PtxSyntaxError,
    RaceError,
    UnfinishedError,
    UnsupportedError,
)
from ._hardware.tensormap import TensorMap
from ._machine import DevicePointer, Machine, Module
from .trace import Trace

__all__ = [
    "BarrierError",
    "BudgetError",
    "DeadlockError",
    "DevicePointer",
    "EmulatorError",
    "FenceError",
    "IllegalInstructionError",
    "Machine",
    "MemoryFaultError",
    "Module",
    "Place",
    "PtxSyntaxError",
    "RaceError",
    "TensorMap",
    "Trace",
    "UnfinishedError",
    "UnsupportedError",
]
