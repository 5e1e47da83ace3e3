"""The kernels as a shared library, for callers that have no MAX graph: PyTorch's ops.

A library is built once a user by ``mojo build``, for the types of a convolution's operands, and is
kept in the cache of the kernels (``_library``). It runs with the shared libraries of MAX's wheel
alone: no session, no graph, no queue of MAX's. A call is prepared once, which decodes and checks
its geometry, and then runs on pointers.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
import sys
import threading
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ._library import OPERATIONS, cached, fingerprint, run_or_raise

__all__ = ["Family", "Library", "Prepared", "library", "library_file"]

#: The folder of the Mojo file with the library's C functions.
SOURCE: Final = (Path(__file__).parent / "library").resolve()

_SUFFIX: Final = ".dylib" if sys.platform == "darwin" else ".so"


class Family(NamedTuple):
    """The types that a library is built for, by the package's names."""

    dtype: str
    """Of activation and filter."""
    bias: str
    """Of the bias."""
    output: str
    """Of residual and output."""
    scaled: bool
    """Whether each filter has a factor."""


class Prepared:
    """A call without its pointers; what the library keeps of it goes with this object."""

    def __init__(self, library: Library, handle: int) -> None:
        self._library = library
        self._handle = handle

    def __del__(self) -> None:
        """Gives the memory back."""
        self._library._release(self._handle)

    def run(self, *arguments: int) -> None:
        """Convolves.

        Args:
            arguments: The addresses of activation, filter, bias, residual, scale and output, 0 for
                what is not there; how many threads may run; the address of ``GOMP_parallel``.

        Raises:
            ValueError: No kernel takes the call; the message says why.
        """
        failed = self._library._run(self._handle, *arguments)
        if failed:
            raise self._library._error(failed)


class Library:
    """The C functions of a loaded library."""

    def __init__(self, path: Path) -> None:
        functions = ctypes.CDLL(str(path))
        self._prepare = functions.maxconv_prepare
        self._prepare.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 3]
        self._prepare.restype = ctypes.c_void_p
        self._release = functions.maxconv_release
        self._release.argtypes = [ctypes.c_void_p]
        self._release.restype = None
        self._free = functions.maxconv_free
        self._free.argtypes = [ctypes.c_void_p]
        self._free.restype = None
        self._run = functions.maxconv_run
        self._run.argtypes = [*[ctypes.c_void_p] * 7, ctypes.c_int64, ctypes.c_void_p]
        self._run.restype = ctypes.c_void_p

    def prepare(
        self,
        input_shape: tuple[int, ...],
        output_shape: tuple[int, ...],
        filter_elements: int,
        geometry: npt.NDArray[np.int64],
        scalars: npt.NDArray[np.float32],
    ) -> Prepared:
        """Decodes and checks what a call is; the shapes are ``[N, *spatial, channels]``.

        Raises:
            ValueError: The geometry is not one that the kernels take.
        """
        shapes = np.array([*_five(input_shape), *_five(output_shape)], np.int64)
        made = ctypes.c_void_p()
        failed = self._prepare(
            *(shapes.ctypes.data, filter_elements, geometry.ctypes.data, scalars.ctypes.data),
            ctypes.addressof(made),
        )
        if failed:
            raise self._error(failed)
        assert made.value is not None
        return Prepared(self, made.value)

    def _error(self, text: int) -> ValueError:
        """Returns the error whose text a function returned, and frees the text."""
        message = ctypes.string_at(text).decode()
        self._free(text)
        return ValueError(message)


def _five(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns ``[N, D, H, W, C]`` of a shape of any rank."""
    return (shape[0], *(1,) * (5 - len(shape)), *shape[1:])


_lock = threading.Lock()
_libraries: dict[Family, Library] = {}


def library(family: Family) -> Library:
    """Returns a loaded library, built now if it is missing; of threads that ask at once, one does.

    Raises:
        LibraryError: It cannot be built; see ``maxconv.library_path``.
    """
    with _lock:
        if family not in _libraries:
            _libraries[family] = Library(library_file(family))
        return _libraries[family]


def library_file(family: Family) -> Path:
    """Returns a library for this machine's CPU, from the cache or made now.

    Raises:
        LibraryError: See ``maxconv.library_path``.
    """

    def make(file: Path) -> None:
        defines = [f"{name}={value}" for name, value in family._asdict().items()]
        options = [part for define in defines for part in ("-D", define)]
        source = str(SOURCE / "host.mojo")
        run_or_raise(
            SOURCE,
            file,
            *("build", "--emit", "shared-lib", "-I", str(OPERATIONS.parent), *options, source),
        )

    name = functools.partial(fingerprint, OPERATIONS, SOURCE, of=f"{family} {_host_cpu()}")
    what = f"compiling maxconv's kernels for PyTorch, {family.dtype}"
    return cached(f"libmaxconv{_SUFFIX}", name, make, what)


@functools.cache
def _host_cpu() -> str:
    """Returns a name that two CPUs share only if code for one runs on the other."""
    described = platform.machine() + platform.processor()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        processor = cpuinfo.read_text(errors="replace").split("\n\n")[0]
        kinds = ("vendor_id", "cpu family", "model", "flags", "Features", "CPU ")
        described += "".join(
            line for line in processor.splitlines() if line.startswith(kinds) and "MHz" not in line
        )
    return hashlib.sha256(described.encode()).hexdigest()[:16]
