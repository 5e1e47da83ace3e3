"""The machine: global memory, tensor maps, modules."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ._errors import EmulatorError, UnsupportedError
from ._hardware.device import SHARED_LIMIT, Device, Rules
from ._hardware.grid import Shape
from ._hardware.memory import INVALID, UNWRITTEN, Memory
from ._hardware.tensormap import TensorMap, TensorMaps
from ._launch.kernel import Kernel, compile_function
from ._launch.launch import Launch
from ._text import syntax
from ._text.parser import parse
from ._text.syntax import Parameter
from .trace import Trace

__all__ = ["BUDGET", "DevicePointer", "Machine", "Module"]

#: The first address of global memory, and what lies between two allocations: bytes that fault.
_GLOBAL_BASE = 0x7_0000_0000
_ALIGN = 256
_GAP = 1024


#: Instructions of all warps after which a launch is stopped, unless it says how many.
BUDGET = 200_000_000


@dataclass(frozen=True)
class DevicePointer:
    """An array in the machine's global memory."""

    machine: Machine
    address: int
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    def __int__(self) -> int:
        return self.address

    @property
    def size(self) -> int:
        """Bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def read(self) -> npt.NDArray[Any]:
        """Returns a copy of the array as it is now."""
        memory = self.machine.device.memory
        first = self.address - memory.base
        data: npt.NDArray[Any] = memory.data[first : first + self.size].copy()
        return data.view(self.dtype).reshape(self.shape)


class Machine:
    """A GPU in numpy.

    Args:
        arch: What PTX is compiled for: ``sm_90a`` or ``sm_100a``.
        sms: Multiprocessors; each runs one block at a time.
        seed: Of the order in which warps run and asynchronous operations complete.
        tensor_load_waits: Whether a register that tcgen05.ld fills may be used only after
            tcgen05.wait::ld, as the ISA says. The assembler makes the hardware wait for it
            anyhow, and some compiled kernels, MAX's among them, rely on that.
        barrier_fences: Whether an mbarrier may be used by a copy only after fence.mbarrier_init
            or fence.proxy.async. The hardware is seen to manage with a barrier of the block,
            and MAX's matmul without a cluster relies on that.
        register_fences: Whether wgmma must not use registers that were written after the latest
            wgmma.fence. The assembler orders them, and LLVM moves the zeros that a sum starts
            from behind the fence, as in MAX's matmul.

    Attributes:
        device: What a launch knows of it.

    Raises:
        ValueError: An argument has no such value.
    """

    def __init__(
        self,
        arch: str = "sm_90a",
        sms: int = 132,
        seed: int = 0,
        tensor_load_waits: bool = True,
        barrier_fences: bool = True,
        register_fences: bool = True,
    ) -> None:
        if arch not in SHARED_LIMIT:
            raise ValueError(f"arch: {arch!r}; {', '.join(SHARED_LIMIT)} are allowed")
        if sms < 1:
            raise ValueError(f"sms: {sms}; at least 1 is allowed")
        self.device = Device(
            arch,
            sms,
            seed,
            Rules(tensor_load_waits, barrier_fences, register_fences),
            SHARED_LIMIT[arch],
            Memory("global memory", _GLOBAL_BASE, 0),
            TensorMaps(),
        )
        self._used = 0

    def alloc(self, array: npt.ArrayLike, written: bool = True) -> DevicePointer:
        """Copies an array into global memory, at a multiple of 256 bytes.

        Args:
            array: The values.
            written: Whether a kernel may read them before it has written there.
        """
        values = np.ascontiguousarray(array)
        address = self.reserve(values.tobytes())
        if not written:
            memory = self.device.memory
            first = address - memory.base
            memory.state[first : first + values.nbytes] = UNWRITTEN
        return DevicePointer(self, address, values.dtype, values.shape)

    def reserve(self, data: bytes) -> int:
        """Copies bytes into global memory; returns their address."""
        memory = self.device.memory
        first = -(-(self._used + _GAP) // _ALIGN) * _ALIGN
        self._used = first + len(data)
        if self._used > memory.size:
            memory.resize(2 * self._used, INVALID)
        memory.data[first : self._used] = np.frombuffer(data, np.uint8)
        memory.state[first : self._used] = 0
        return memory.base + first

    def load(self, ptx: str) -> Module:
        """Reads a PTX text and prepares its kernels.

        Raises:
            PtxSyntaxError: The text is no PTX.
            UnsupportedError: It is for another architecture, or has an instruction that the
                emulator does not have.
        """
        return Module(self, ptx)

    def argument(self, value: object, parameter: Parameter) -> bytes:
        """An argument's bytes. A tuple is a struct: its members, one after the other, and zeros.

        Raises:
            TypeError: The parameter cannot be made of it.
            ValueError: It has another size than the parameter.
        """
        size = parameter.size
        if isinstance(value, tuple):
            data = b"".join(self._bytes(entry, parameter, 0) for entry in value).ljust(size, b"\0")
        else:
            data = self._bytes(value, parameter, size)
        if len(data) != size:
            raise ValueError(f"args: {len(data)} bytes for {parameter.name} of {size} bytes")
        return data

    def _bytes(self, value: object, parameter: Parameter, size: int) -> bytes:
        """The bytes of an argument, or of a member of one, whose size is not known then."""
        if isinstance(value, TensorMap):
            data = self.device.tensor_maps.add(value)
        elif isinstance(value, DevicePointer):
            data = value.address.to_bytes(8, "little")
        elif isinstance(value, np.generic | np.ndarray):
            data = value.tobytes()
        elif isinstance(value, bytes | bytearray):
            data = bytes(value)
        elif isinstance(value, int) and size:
            data = (value % (1 << (8 * size))).to_bytes(size, "little")
        elif isinstance(value, float) and size in (4, 8):
            data = struct.pack("<f" if size == 4 else "<d", value)
        else:
            raise TypeError(
                f"args: {type(value).__name__} for {parameter.name} of {parameter.size} bytes; "
                "pointers, tensor maps, numpy values, numbers and bytes are allowed"
            )
        return data


@lru_cache(maxsize=16)
def _compile(ptx: str) -> tuple[syntax.Module, dict[str, Kernel]]:
    """Reads a text and builds its kernels, which depend on nothing else."""
    parsed = parse(ptx)
    variables = {variable.name: variable for variable in parsed.variables}
    functions = parsed.functions.values()
    return parsed, {
        entry.name: compile_function(entry, variables, parsed.lines) for entry in functions
    }


class Module:
    """A PTX text on a machine.

    Attributes:
        kernels: By name.
    """

    def __init__(self, machine: Machine, ptx: str) -> None:
        parsed, kernels = _compile(ptx)
        target = parsed.target.split(",")[0].split(" ")[0]
        arch = machine.device.arch
        if not _runs_on(target, arch):
            raise UnsupportedError(f".target {target}; the machine is {arch}")
        self.machine = machine
        self.addresses: dict[str, int] = {}
        for variable in parsed.variables:
            if variable.space in ("global", "const"):
                data = variable.initial or bytes(variable.size)
                self.addresses[variable.name] = machine.reserve(data)
        self.kernels = kernels

    def launch(
        self,
        name: str = "",
        grid: Sequence[int] | int = 1,
        block: Sequence[int] | int = 1,
        cluster: Sequence[int] | int = 1,
        shared_bytes: int = 0,
        args: Sequence[object] = (),
        budget: int = BUDGET,
        trace: Trace | None = None,
    ) -> int:
        """Runs a kernel to its end.

        Args:
            name: The kernel's; may be left out if there is but one.
            grid: Blocks, x first.
            block: Threads of a block, x first.
            cluster: Blocks of a cluster, x first.
            shared_bytes: Dynamic shared memory.
            args: One for each parameter: pointers, tensor maps, numbers, numpy values, bytes.
            budget: Instructions of all warps after which the kernel is stopped.
            trace: Gets what happens when; complete also if the kernel is stopped.

        Returns:
            Instructions that the warps ran.

        Raises:
            EmulatorError: What the kernel did wrong, with its line.
            TypeError: An argument cannot be passed.
            ValueError: The launch does not fit the kernel or the machine.
        """
        kernel = self._kernel(name)
        if len(args) != len(kernel.parameters):
            raise ValueError(f"args: {len(args)}; {kernel.name} has {len(kernel.parameters)}")
        data = bytearray(kernel.parameter_bytes)
        for value, parameter in zip(args, kernel.parameters, strict=True):
            passed = self.machine.argument(value, parameter)
            data[parameter.offset : parameter.offset + parameter.size] = passed
        sizes = _three(grid, "grid"), _three(block, "block"), _three(cluster, "cluster")
        shape, device = Shape(*sizes, shared_bytes), self.machine.device
        with np.errstate(all="ignore"):
            launch = Launch(device, kernel, self.addresses, shape, bytes(data), budget, trace)
            try:
                return launch.run()
            except EmulatorError as error:
                if trace is not None:
                    trace.fail(error)
                raise
            finally:
                if trace is not None:
                    trace.end()

    def _kernel(self, name: str) -> Kernel:
        if not name and len(self.kernels) == 1:
            return next(iter(self.kernels.values()))
        if name not in self.kernels:
            raise ValueError(f"name: {name!r}; the module has {', '.join(self.kernels)}")
        return self.kernels[name]


def _three(value: Sequence[int] | int, name: str) -> tuple[int, int, int]:
    entries = [value] if isinstance(value, int) else list(value)
    if not 1 <= len(entries) <= 3 or min(entries) < 1:
        raise ValueError(f"{name}: {value}; one to three positive numbers are allowed")
    x, y, z = [*entries, 1, 1][:3]
    return x, y, z


def _runs_on(target: str, arch: str) -> bool:
    """Whether a machine runs PTX for a target: its own or its family's, or an older plain one."""
    if target in (arch, arch[:-1] + "f"):
        return True
    number = target.removeprefix("sm_")
    return number.isdigit() and int(number) <= int(arch.removeprefix("sm_").rstrip("af"))
