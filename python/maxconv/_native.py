"""The kernels as shared libraries, for callers that have no MAX graph: PyTorch's ops.

A library (``_library_files``) runs with the shared libraries of MAX's wheel alone: no session, no
graph, no queue of MAX's. A call is prepared once, which decodes, checks and plans it, and then runs
on pointers.

A CPU has one library of all kernels. A GPU has one that chooses the kernel, which this machine's
CPU runs, one for each kernel, which is built when it is chosen first, one for the mean over pixels,
and one for group normalization. The benchmark has one more, of what multiplies on a CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ._dtypes import INPUT_BYTES, OUTPUT_BYTES
from ._fields import COPY_BYTES, GEOMETRY, STEM_CHANNELS, Kernel
from ._library import LibraryError
from ._library_files import (
    SUFFIX,
    Family,
    beside_file,
    chooser_file,
    host_file,
    kernel_file,
    peak_file,
)
from ._targets import BLACKWELL, HOPPER
from ._tuned import known_features
from .activations import ActivationSpec

__all__ = [
    "Beside",
    "Call",
    "Chooser",
    "GpuKernel",
    "GpuTarget",
    "GroupNorm",
    "Host",
    "Library",
    "Mean",
    "Multiplier",
    "Prepared",
    "any_host",
    "beside",
    "chooser",
    "host",
    "kernel",
    "multiplier",
    "prepare_gpu",
]

#: What a library loads of MAX's wheel.
_RUNTIME: Final = ("libKGENCompilerRTShared", "libAsyncRTMojoBindings")

#: The kernels for tensor cores, by the GPU's architecture.
_TENSOR_CORES: Final = {HOPPER: Kernel.SM90, BLACKWELL: Kernel.SM100}

T = TypeVar("T")
B = TypeVar("B", bound="Beside")


class GpuTarget(NamedTuple):
    """A GPU, as far as the choice of a kernel looks at it."""

    architecture: str
    """What compilers call it: ``sm_90a``."""
    capability: int
    """Its compute capability, times ten."""
    multiprocessors: int
    l2_bytes: int = 0
    """Of its L2 cache; 0 where it is not known."""


@dataclass(frozen=True)
class Call:
    """What a call is, without its pointers."""

    shapes: npt.NDArray[np.int64]
    """``[N, D, H, W, C]`` of the input and of the output."""
    filter_elements: int
    geometry: npt.NDArray[np.int64]
    scalars: npt.NDArray[np.float32]

    @classmethod
    def of(
        cls,
        input_shape: tuple[int, ...],
        output_shape: tuple[int, ...],
        filter_elements: int,
        geometry: npt.NDArray[np.int64],
        scalars: npt.NDArray[np.float32],
    ) -> Call:
        """Returns a call.

        Args:
            input_shape: ``[N, *spatial, C]``.
            output_shape: ``[N, *spatial, K]``.
            filter_elements: Of the filter in its layout.
            geometry: The ops' operand of that name.
            scalars: The ops' operand of that name.
        """
        shapes = np.array([*_five(input_shape), *_five(output_shape)], np.int64)
        return cls(shapes, filter_elements, geometry, scalars)

    def pointers(self) -> tuple[int, int, int, int]:
        """Returns what the libraries' functions take for it."""
        return (
            self.shapes.ctypes.data,
            self.filter_elements,
            self.geometry.ctypes.data,
            self.scalars.ctypes.data,
        )


def _five(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns ``[N, D, H, W, C]`` of a shape of any rank."""
    return (shape[0], *(1,) * (5 - len(shape)), *shape[1:])


class Library:
    """A loaded library; its functions return 0, or the address of a sentence."""

    def __init__(self, path: Path) -> None:
        _load_runtime()
        self._functions = ctypes.CDLL(str(path))
        self._free = self.function("free", 1, None)

    def function(self, name: str, parameters: int, result: Any = ctypes.c_void_p) -> Any:
        """Returns a C function whose parameters are all of 64 bits."""
        function = getattr(self._functions, f"maxconv_{name}")
        function.argtypes = [ctypes.c_void_p] * parameters
        function.restype = result
        return function

    def made(self, function: Any, *arguments: int) -> int:
        """Calls a function whose last parameter says where to write its result.

        Raises:
            ValueError: It refused; the message is its sentence.
        """
        result = ctypes.c_int64()
        failed = function(*arguments, ctypes.addressof(result))
        if failed:
            raise self.error(failed)
        return result.value

    def error(self, text: int) -> ValueError:
        """Returns the error whose text a function returned, and frees the text."""
        return ValueError(self.text(text))

    def text(self, address: int) -> str:
        """Returns a text that a function made, and frees it there."""
        message = ctypes.string_at(address).decode()
        self._free(address)
        return message


class Prepared:
    """A call without its pointers; what the library keeps of it goes with this object."""

    def __init__(self, library: Host | GpuKernel, handle: int) -> None:
        self.library = library
        self.function = library.run
        """What runs it; takes the handle and what ``run`` takes."""
        self.handle = handle
        """The library's, of the call."""

    def __del__(self) -> None:
        """Gives the memory back."""
        self.library.release(self.handle)

    def run(self, *arguments: int) -> None:
        """Convolves.

        Args:
            arguments: The addresses of activation, filter, bias, residual, scale and output, 0 for
                what is not there. Then, on a CPU, how many threads may run and the address of
                ``GOMP_parallel``; on a GPU the ``CUstream``, and nothing is waited for.

        Raises:
            ValueError: No kernel takes the call, or the driver refuses; the message says why.
        """
        failed = self.function(self.handle, *arguments)
        if failed:
            raise self.library.error(failed)


class Host(Library):
    """All kernels of this machine's CPU."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._prepare = self.function("prepare", 5)
        self.release = self.function("release", 1, None)
        self.run = self.function("run", 9)
        self._name = self.function("name", 4)
        self._explain = self.function("explain", 3)
        self._transpose = self.function("transpose", 8)
        self.mean = self.function("mean", 9)
        """The mean over pixels; takes images, pixels, channels, the address of four float32 (a
        factor, a summand, steps in 1, zero point), whether the input is float32 whatever the
        library's type, the addresses of input and output, how many threads may run and the address
        of ``GOMP_parallel``; returns 0, or the address of a sentence."""

    def name(self, prepared: Prepared, cut: Sequence[int], threads: int) -> None:
        """Has later runs of a call cut the problem by numbers, not as the kernel itself chooses.

        Args:
            prepared: What ``prepare`` of this library returned, of a call that asks for a kernel.
            cut: The numbers of the kernel's cut.
            threads: How many may run; later runs have as many.

        Raises:
            ValueError: The kernel cannot run the problem, or not so; the message says why.
        """
        numbers = (ctypes.c_int64 * len(cut))(*cut)
        address = ctypes.addressof(numbers)
        if failed := self._name(prepared.handle, address, len(cut), threads):
            raise self.error(failed)

    def explain(self, prepared: Prepared, threads: int) -> tuple[str, str]:
        """Returns the kernel that runs a call, and why, without running it.

        Args:
            prepared: What ``prepare`` of this library returned.
            threads: How many may run.

        Raises:
            ValueError: No kernel takes the call; the message says why.
        """
        text = self.text(self.made(self._explain, prepared.handle, threads))
        kernel, _, reason = text.partition(": ")
        return kernel, reason

    def transpose(self, *arguments: int) -> None:
        """Transposes matrices ``[rows, columns]`` of a batch.

        Args:
            arguments: The addresses of the matrices and of where to write them, how many there are,
                rows, columns, bytes of an element (2 or 4), how many threads may run and the
                address of ``GOMP_parallel``.

        Raises:
            ValueError: Elements have another size.
        """
        failed = self._transpose(*arguments)
        if failed:
            raise self.error(failed)

    def prepare(self, call: Call) -> Prepared:
        """Decodes and checks a call.

        Raises:
            ValueError: The geometry is not one that the kernels take.
        """
        return Prepared(self, self.made(self._prepare, *call.pointers()))


class Multiplier(Library):
    """What multiplies a type on this machine's CPU, with operands that stay in registers."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._unit = self.function("unit", 3)
        self._multiply = self.function("multiply", 4)

    def unit(self, threads: int, parallel: int) -> str:
        """Returns the instruction that multiplies, for people.

        Args:
            threads: How many may run.
            parallel: The address of ``GOMP_parallel``.
        """
        return self.text(self.made(self._unit, threads, parallel))

    def multiply(self, chunks: int, threads: int, parallel: int) -> int:
        """Multiplies as fast as the threads can.

        Args:
            chunks: Steps of each task of a thread; the time is proportional to them.
            threads: How many may run.
            parallel: The address of ``GOMP_parallel``.

        Returns:
            How many products were computed, and added up.
        """
        return self.made(self._multiply, chunks, threads, parallel)


class Chooser(Library):
    """The choice of a GPU's kernel."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._choose = self.function("choose", 9)
        self._kernels = self.function("kernels", 1, ctypes.c_int64)

    def choose(self, call: Call, target: GpuTarget, *, aligned: bool) -> Kernel:
        """Returns the kernel that runs a call.

        Args:
            call: The call.
            target: The GPU.
            aligned: Whether all addresses are multiples of ``COPY_BYTES``.

        Raises:
            ValueError: The geometry or the types are not what the kernels take.
        """
        device = (target.capability, target.multiprocessors, target.l2_bytes)
        return Kernel(self.made(self._choose, *call.pointers(), aligned, *device))

    def kernels(self, capability: int) -> list[Kernel]:
        """Returns the kernels that may be chosen on the GPUs of a compute capability, times ten."""
        chosen = self._kernels(capability)
        return [kernel for kernel in Kernel if chosen >> kernel & 1]


class _OnGpu(Library):
    """A library that runs on GPUs, each of which it opens once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._open = self.function("open", 2)
        self._devices: dict[int, int] = {}
        self._lock = threading.Lock()

    def device(self, index: int) -> int:
        """Returns the handle of a GPU.

        Args:
            index: Of the GPU, among those that the process sees.

        Raises:
            ValueError: There is no such GPU.
        """
        found = self._devices.get(index)
        if found is None:
            with self._lock:
                if index not in self._devices:
                    self._devices[index] = self.made(self._open, index)
                found = self._devices[index]
        return found


class GpuKernel(_OnGpu):
    """One kernel of a GPU."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._prepare = self.function("prepare", 7)
        self.release = self.function("release", 1, None)
        self.run = self.function("run", 8)

    def prepare(self, index: int, call: Call, *, aligned: bool) -> Prepared:
        """Decodes, checks and plans a call for which this kernel was chosen.

        Args:
            index: Of the GPU, among those that the process sees.
            call: The call.
            aligned: What the choice was told.

        Raises:
            ValueError: The kernel does not take the call, or there is no such GPU.
        """
        device = self.device(index)
        return Prepared(self, self.made(self._prepare, device, *call.pointers(), aligned))


class Beside(_OnGpu):
    """What a GPU computes beside convolutions."""

    root: ClassVar[str]
    """Of its library."""


class Mean(Beside):
    """The mean over pixels on a GPU."""

    root = "mean"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.mean = self.function("mean", 7)
        """Enqueues the mean; takes a device's handle, images, pixels, channels, the addresses of
        ``[images, pixels, channels]`` and ``[images, channels]``, and the ``CUstream``; returns 0,
        or the address of a sentence."""


class GroupNorm(Beside):
    """Group normalization on a GPU."""

    root = "group_norm"

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._workspace = self.function("group_norm_workspace", 8)
        self._normalize = self.function("group_norm", 16)
        integer, number = ctypes.c_void_p, ctypes.c_double
        self._normalize.argtypes = [*[integer] * 11, number, integer, number, number, integer]

    def workspace(
        self,
        index: int,
        input: int,
        output: int,
        images: int,
        pixels: int,
        channels: int,
        groups: int,
    ) -> int:
        """Returns how many float32 elements ``run`` needs beside the operands.

        Args:
            index: As ``run`` takes it, like the others.
            input: The same.
            output: The same.
            images: The same.
            pixels: The same.
            channels: The same.
            groups: The same.

        Raises:
            ValueError: The shape is not one that the kernels take, or there is no such GPU.
        """
        shape = (images, pixels, channels, groups)
        return self.made(self._workspace, self.device(index), input, output, *shape)

    def run(
        self,
        index: int,
        input: int,
        weight: int,
        bias: int,
        output: int,
        workspace: int,
        images: int,
        pixels: int,
        channels: int,
        groups: int,
        epsilon: float,
        activation: ActivationSpec,
        stream: int,
        *,
        wide: bool,
    ) -> None:
        """Enqueues the normalization of each image's groups of channels; nothing is waited for.

        Args:
            index: Of the GPU, among those that the process sees.
            input: The address of ``[images, pixels, channels]``.
            weight: The address of ``[channels]``, or 0, as ``bias`` then is.
            bias: The same.
            output: The address of ``[images, pixels, channels]``.
            workspace: The address of as many float32 elements as ``workspace`` says.
            images: How many.
            pixels: Of an image.
            channels: Of a pixel.
            groups: Of channels; they divide them.
            epsilon: Added to the variance.
            activation: What follows.
            stream: The ``CUstream``.
            wide: Whether weight and bias are float32, and not of the input's dtype.

        Raises:
            ValueError: The shape is not one that the kernels take, or the driver refuses; the
                message says why.
        """
        failed = self._normalize(
            self.device(index),
            *(input, weight, bias, wide, output, workspace),
            *(images, pixels, channels, groups, epsilon),
            *(int(activation.kind), *activation.parameters),
            stream,
        )
        if failed:
            raise self.error(failed)


@functools.cache
def _load_runtime() -> None:
    """Loads this environment's runtime of Mojo.

    A library names the folder of the one that it was built in, which may be gone.
    """
    folders = [Path(sys.prefix) / "lib"]
    spec = importlib.util.find_spec("max")
    if spec is not None and spec.submodule_search_locations:
        folders.insert(0, Path(spec.submodule_search_locations[0]).parent / "modular" / "lib")
    for name in _RUNTIME:
        for folder in folders:
            if (folder / f"{name}{SUFFIX}").is_file():
                ctypes.CDLL(str(folder / f"{name}{SUFFIX}"), ctypes.RTLD_GLOBAL)
                break


_lock = threading.Lock()
_locks: dict[Hashable, threading.Lock] = {}
_libraries: dict[Hashable, Any] = {}


def _loaded(key: Hashable, kind: Callable[[Path], T], file: Callable[[], Path]) -> T:
    """Returns a loaded library, built now if it is missing, by one of the threads that ask."""
    with _lock:
        lock = _locks.setdefault(key, threading.Lock())
    with lock:
        if key not in _libraries:
            _libraries[key] = kind(file())
        library: T = _libraries[key]
        return library


def host(family: Family, *, whole: bool = False) -> Host:
    """Returns the kernels of this machine's CPU, built now if they are missing.

    They use what was tuned (``_tuned``).

    Args:
        family: The operands' types.
        whole: Whether calls name kernels; otherwise there are those that dispatch chooses from.

    Raises:
        LibraryError: They cannot be built; see ``maxconv.library_path``.
    """
    features = known_features()
    if whole:
        features = None
    key = ("host", family, features)
    return _loaded(key, Host, lambda: host_file(family, features=features))


def any_host() -> Host | None:
    """Returns a library of this machine's CPU that is loaded already, for what all of them do."""
    return next((found for found in list(_libraries.values()) if isinstance(found, Host)), None)


def multiplier(dtype: str) -> Multiplier:
    """Returns what multiplies a type on this machine's CPU, built now if it is missing.

    Args:
        dtype: Of activation and filter.

    Raises:
        LibraryError: It cannot be built; see ``maxconv.library_path``.
    """
    return _loaded(("peak", dtype), Multiplier, lambda: peak_file(dtype))


def chooser(family: Family, while_building: Callable[[], None] | None = None) -> Chooser:
    """Returns the choice of a GPU's kernel, built now if it is missing.

    Args:
        family: The operands' types.
        while_building: What a thread may do meanwhile.

    Raises:
        LibraryError: It cannot be built; see ``maxconv.library_path``.
    """
    family = family.for_choice()
    if while_building is not None and ("choose", family) not in _libraries:
        threading.Thread(target=while_building).start()
    return _loaded(("choose", family), Chooser, lambda: chooser_file(family))


def kernel(code: Kernel, family: Family, architecture: str) -> GpuKernel:
    """Returns a kernel of a GPU, built now if it is missing.

    Args:
        code: Which.
        family: The operands' types.
        architecture: What compilers call the GPU: ``sm_90a``.

    Raises:
        LibraryError: It cannot be built; see ``maxconv.library_path``.
    """
    key = (code, family, architecture)
    return _loaded(key, GpuKernel, lambda: kernel_file(code, family, architecture))


def beside(kind: type[B], dtype: str, architecture: str) -> B:
    """Returns what a GPU computes beside convolutions, built now if it is missing.

    Args:
        kind: What.
        dtype: Of input and output.
        architecture: What compilers call the GPU: ``sm_90a``.

    Raises:
        LibraryError: It cannot be built; see ``maxconv.library_path``.
    """
    key = (kind, dtype, architecture)
    return _loaded(key, kind, lambda: beside_file(kind.root, dtype, architecture))


def prepare_gpu(
    family: Family, index: int, target: GpuTarget, call: Call, *, aligned: bool
) -> Prepared:
    """Returns a call on a GPU, prepared; libraries that are missing are built now.

    Args:
        family: The operands' types.
        index: Of the GPU, among those that the process sees.
        target: What it is.
        call: The call.
        aligned: Whether all addresses are multiples of ``COPY_BYTES``.

    Raises:
        ValueError: No kernel takes the call, or there is no such GPU.
        LibraryError: A library cannot be built; see ``maxconv.library_path``.
    """
    choice = chooser(family, while_building=lambda: _build_likely(family, target, call))
    code = choice.choose(call, target, aligned=aligned)
    return kernel(code, family, target.architecture).prepare(index, call, aligned=aligned)


def _likely_kernel(family: Family, target: GpuTarget, call: Call) -> Kernel | None:
    """Returns the kernel for tensor cores that takes a call's pixels, if it has one group."""
    likely = _TENSOR_CORES.get(target.architecture)
    if likely is None or call.geometry[GEOMETRY.index("groups")] != 1:
        return None
    *_, channels, _, _, _, _, filters = map(int, call.shapes)
    pixels = channels * INPUT_BYTES[family.dtype], filters * OUTPUT_BYTES[family.output]
    whole = all(size % COPY_BYTES == 0 for size in pixels)
    if likely is Kernel.SM90 and not whole and channels > STEM_CHANNELS:
        return Kernel.UNALIGNED
    return likely


def _build_likely(family: Family, target: GpuTarget, call: Call) -> None:
    """Builds a kernel that the choice is likely to name."""
    likely = _likely_kernel(family, target, call)
    if likely is None:
        return
    # Whoever needs the kernel gets the error.
    with contextlib.suppress(LibraryError):
        kernel(likely, family, target.architecture)
