"""Runs a family's cases on an NVIDIA GPU by the CUDA driver API, through ctypes.

    python -m tests.ptxemu.isa.driver OUT.npz

runs all families, each in a process of its own, and writes every output as an array
``family/case`` (CUDA driver API, "Module Management", "Execution Control", "Tensor Map Object
Management").
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from queue import Empty
from typing import Any

import numpy as np

from ptxemu.tma import Im2colDescriptor, TiledDescriptor

from .case import Argument, Array, Case, Map

__all__ = ["Driver", "DriverError", "is_present"]

_LIBRARIES = ("libcuda.so.1", "libcuda.so")

#: ``CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES``, ``..._NON_PORTABLE_CLUSTER_SIZE_ALLOWED``.
_DYNAMIC_SHARED = 8
#: ``CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION``.
_CLUSTER_DIMENSION = 4
#: ``CU_JIT_ERROR_LOG_BUFFER``, ``CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES``.
_ERROR_LOG, _ERROR_LOG_SIZE = 5, 6

#: Seconds that a case may take, the compilation of its text included.
_LIMIT = 30.0


class DriverError(RuntimeError):
    """A call of the driver failed."""


class _Attribute(ctypes.Structure):
    """``CUlaunchAttribute``: an identifier, padding to eight bytes, a union of 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("value", ctypes.c_uint * 16),
    )


class _Config(ctypes.Structure):
    """``CUlaunchConfig``."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("attribute_count", ctypes.c_uint),
    )


def is_present() -> bool:
    """Whether there is a driver and a Hopper GPU."""
    try:
        return Driver().capability == (9, 0)
    except (OSError, DriverError):
        return False


class Driver:
    """The first GPU, with a context."""

    def __init__(self) -> None:
        self.library = self._load()
        self._call("cuInit", 0)
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        major, minor = ctypes.c_int(), ctypes.c_int()
        # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, ..._MINOR.
        self._call("cuDeviceGetAttribute", ctypes.byref(major), 75, device)
        self._call("cuDeviceGetAttribute", ctypes.byref(minor), 76, device)
        self.capability = major.value, minor.value
        context = ctypes.c_void_p()
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)

    @staticmethod
    def _load() -> Any:
        for name in _LIBRARIES:
            try:
                return ctypes.CDLL(name)
            except OSError as error:
                last = error
        raise last

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self.library.cuGetErrorString(status, ctypes.byref(text))
            raise DriverError(f"{name}: {status} {(text.value or b'').decode()}")

    def load(self, ptx: str) -> Any:
        """Compiles a text; returns the module."""
        log = ctypes.create_string_buffer(16384)
        options = (ctypes.c_int * 2)(_ERROR_LOG, _ERROR_LOG_SIZE)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        module = ctypes.c_void_p()
        text = ctypes.c_char_p(ptx.encode())
        try:
            self._call("cuModuleLoadDataEx", ctypes.byref(module), text, 2, options, values)
        except DriverError as error:
            raise DriverError(f"{error}\n{log.value.decode()}") from error
        return module

    @contextmanager
    def array(self, values: Array) -> Iterator[Any]:
        """Global memory that holds an array."""
        pointer = ctypes.c_uint64()
        data = np.ascontiguousarray(values)
        self._call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(max(16, data.nbytes)))
        source = data.ctypes.data_as(ctypes.c_void_p)
        self._call("cuMemcpyHtoD_v2", pointer, source, ctypes.c_size_t(data.nbytes))
        try:
            yield pointer
        finally:
            self.library.cuMemFree_v2(pointer)

    def read(self, pointer: Any, like: Array) -> Array:
        """Copies global memory back."""
        found = np.empty_like(like)
        target = found.ctypes.data_as(ctypes.c_void_p)
        self._call("cuMemcpyDtoH_v2", target, pointer, ctypes.c_size_t(found.nbytes))
        return found

    def run(self, module: Any, case: Case) -> Array:
        """Runs a case; returns its output."""
        function = ctypes.c_void_p()
        self._call("cuModuleGetFunction", ctypes.byref(function), module, case.name.encode())
        if case.shared:
            self._call("cuFuncSetAttribute", function, _DYNAMIC_SHARED, case.shared)
        before = case.output()
        pointers: list[Any] = []
        managers = [*(self.array(values) for values in case.inputs), self.array(before)]
        for manager in managers:
            pointers.append(manager.__enter__())
        try:
            self._launch(function, case, [self._argument(e, pointers) for e in case.arguments])
            return self.read(pointers[-1], before)
        finally:
            for manager in managers:
                manager.__exit__(None, None, None)

    def _argument(self, entry: Argument, pointers: list[Any]) -> Any:
        if isinstance(entry, int):
            return pointers[entry]
        if isinstance(entry, Map):
            return self.tensor_map(entry.placed(pointers[entry.array].value))
        data = entry.placed([pointer.value for pointer in pointers])
        return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)

    def _launch(self, function: Any, case: Case, arguments: list[Any]) -> None:
        addresses = [ctypes.cast(ctypes.byref(entry), ctypes.c_void_p) for entry in arguments]
        parameters = (ctypes.c_void_p * len(arguments))(*addresses)
        attribute = _Attribute(_CLUSTER_DIMENSION)
        attribute.value[0:3] = _three(case.cluster)
        config = _Config()
        config.grid[:] = _three(case.grid)
        config.block[:] = (case.block, 1, 1)
        config.shared = case.shared
        config.attributes = ctypes.pointer(attribute)
        config.attribute_count = 1
        self._call("cuLaunchKernelEx", ctypes.byref(config), function, parameters, None)
        self._call("cuCtxSynchronize")

    def tensor_map(self, descriptor: TiledDescriptor | Im2colDescriptor) -> Any:
        """The driver's 128 bytes, at a multiple of 64."""
        room = ctypes.create_string_buffer(256)
        start = -ctypes.addressof(room) % 64
        tensor = (ctypes.c_uint64 * 16).from_buffer(room, start)
        rank = descriptor.tensor_rank

        def numbers(kind: Any, values: tuple[int, ...]) -> Any:
            return (kind * max(1, len(values)))(*values)

        common = [
            ctypes.byref(tensor),
            int(descriptor.data_type),
            ctypes.c_uint(rank),
            ctypes.c_void_p(descriptor.global_address),
            numbers(ctypes.c_uint64, descriptor.global_dim),
            numbers(ctypes.c_uint64, descriptor.global_strides),
        ]
        steps = numbers(ctypes.c_uint32, descriptor.element_strides)
        last = [
            int(descriptor.interleave),
            int(descriptor.swizzle),
            int(descriptor.l2_promotion),
            int(descriptor.oob_fill),
        ]
        if isinstance(descriptor, TiledDescriptor):
            box = numbers(ctypes.c_uint32, descriptor.box_dim)
            self._call("cuTensorMapEncodeTiled", *common, box, steps, *last)
        else:
            lower = numbers(ctypes.c_int, descriptor.pixel_box_lower_corner)
            upper = numbers(ctypes.c_int, descriptor.pixel_box_upper_corner)
            sizes = (
                ctypes.c_uint(descriptor.channels_per_pixel),
                ctypes.c_uint(descriptor.pixels_per_column),
            )
            self._call("cuTensorMapEncodeIm2col", *common, lower, upper, *sizes, steps, *last)
        return tensor


def _three(sizes: int | tuple[int, ...]) -> tuple[int, ...]:
    given = (sizes,) if isinstance(sizes, int) else sizes
    return (*given, 1, 1)[:3]


def _run_from(ptx: str, cases: list[Case], queue: Any) -> None:
    """Runs a text's cases, until one fails: a fault ends the process's context."""
    try:
        driver = Driver()
        module = driver.load(ptx)
        for case in cases:
            queue.put((driver.run(module, case), ""))
    except (DriverError, OSError) as error:
        queue.put((None, str(error)))


def _answer(process: Any, queue: Any) -> tuple[Array | None, str]:
    """The next output; a process that has died or hangs is given up."""
    stop = time.monotonic() + _LIMIT
    while time.monotonic() < stop:
        try:
            output, message = queue.get(timeout=0.5)
        except Empty:
            if not process.is_alive():
                return None, "its process has died"
        else:
            return output, message
    process.terminate()
    return None, f"no answer for {_LIMIT:.0f} s"


def outputs(ptx: str, cases: list[Case]) -> Iterator[tuple[Case, Array | None, str]]:
    """Every case of a text with its output, or with what went wrong."""
    context, done = get_context("spawn"), 0
    while done < len(cases):
        queue = context.Queue()
        process = context.Process(target=_run_from, args=(ptx, cases[done:], queue), daemon=True)
        process.start()
        failed = False
        while done < len(cases) and not failed:
            output, message = _answer(process, queue)
            failed = output is None
            yield cases[done], output, message
            done += 1
        process.join(5)


def record(path: Path) -> int:
    """Runs all families; returns how many cases failed or are not what the ISA says."""
    from . import probes
    from .families import FAMILIES

    found: dict[str, Array] = {}
    wrong = 0
    for name, family in {**FAMILIES, probes.FAMILY.name: probes.FAMILY}.items():
        started = time.perf_counter()
        for case, output, message in outputs(family.ptx, family.cases):
            if output is not None:
                found[f"{name}/{case.name}"] = output
                message = case.difference(output)
            if message:
                wrong += 1
                print(f"{name}: {case.name}: {message}", flush=True)
        seconds = time.perf_counter() - started
        print(f"{name}: {len(family.cases)} cases, {seconds:.1f} s", flush=True)
        arrays: dict[str, Any] = dict(found)
        np.savez_compressed(path, **arrays)
    return wrong


if __name__ == "__main__":
    print("wrong:", record(Path(sys.argv[1])))
