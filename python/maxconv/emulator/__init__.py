"""Runs PTX on the CPU: kernels for Hopper and Blackwell, as Mojo emits them, without a GPU.

``Machine`` holds global memory; ``load`` reads a PTX text, ``launch`` runs a kernel to its end or
stops it where it does something that the hardware does not define::

    machine = Machine("sm_90a", sms=4, seed=1)
    x = machine.alloc(np.arange(64, dtype=np.float32))
    machine.load(ptx).launch("scale", grid=2, block=32, args=[x, 3.0])
    print(x.read())

How it is built, from the text to the run:

* ``parser`` reads the text into ``syntax``'s dataclasses, with every register, label and symbol
  resolved in its scope; ``flow`` cuts functions into basic blocks and finds where paths meet
  again.
* ``kernel`` turns every instruction into a Python callable, once, by ``table``: one function a
  family in ``instructions/``, entered by the beginning of its opcode. What is unknown stops there,
  by name and line, before anything runs.
* ``registers`` are rows of 32 lanes. Literals, special registers and addresses are rows too, so
  that a step does nothing but compute rows under a mask.
* ``paths``: a warp's lanes run as one path; a branch on which they disagree makes two, which meet
  again at its immediate post-dominator. Both may run meanwhile, as the hardware's threads may.
* ``scheduler`` draws from the seed which path runs next and for how long, and when asynchronous
  operations happen: some only when nothing else can. What a kernel gets right under many seeds it
  does not get right by luck.
* ``memory`` keeps a shadow byte for every byte: written or not, being written, being read,
  outside of everything, part of an mbarrier. ``fences`` knows who wrote a word of shared memory
  and whether a proxy fence followed. ``barriers`` count arrivals and bytes. ``blocks`` and
  ``launch`` hold what blocks, clusters and grids share.
* ``tensormemory`` is a block's tensor memory, with a shadow of its own. ``matrices`` reads the
  descriptors of tcgen05's multiplies.
* ``trace`` records what happens when, by a scheduler and barriers of its own: a launch without a
  trace pays nothing for it. ``maxconv.emulate`` is the command line.

It does not know: tcgen05's block-scaled, sparse and weight-stationary multiplies and ``shift``,
calls of device functions, f64 rounding other than to nearest, textures. Between ordinary loads and
stores of different warps memory is sequentially consistent; a race between two of them is found
only by its result.
"""

from .errors import (
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
from .machine import DevicePointer, Machine, Module
from .tensormap import TensorMap
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
