"""What is derived from the modules' weights, made once and again when a weight changes."""

from __future__ import annotations

import functools
import operator
import threading
import warnings
import weakref
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, cast

import torch
from torch import Tensor

from .._dtypes import CARRIERS
from .._packing import pack_values
from ._dtypes import NAMES

# PyTorch has no public way to hold a storage weakly; its multiprocessing uses this one.
_storages: Any = torch.UntypedStorage
_expired = _storages._expired
_free_weak_reference = _storages._free_weak_ref

__all__ = ["OPERANDS", "OperandCache", "lacks_version", "pack_on_host", "state_of"]

_LAYOUTS = {1: "FCS", 2: "FCRS", 3: "FCQRS"}


def lacks_version(weight: Tensor) -> bool:
    """Whether PyTorch counts no writes to a weight: it was made under ``inference_mode``.

    A warning says so of the first: such a model is many times slower than it need be.
    """
    if not weight.is_inference():
        return False
    _warn_of_inference()
    return True


@functools.cache
def _warn_of_inference() -> None:
    warnings.warn(
        "weight: a parameter was made under torch.inference_mode, where PyTorch counts no writes; "
        "it is packed in every call. Make the model outside of it, or take mt.convert's copy",
        stacklevel=2,
    )


@dataclass(frozen=True)
class _Entry:
    """An operand, and what of its tensor says that it still is that tensor's."""

    version: int
    shape: torch.Size
    stride: tuple[int, ...]
    storage: int
    """Address of the storage's record, which the weak reference keeps from being used again."""
    weak: int
    """PyTorch's own weak reference to the storage."""
    operand: Any
    finalizer: weakref.finalize[Any, Tensor] | None


class OperandCache:
    """Operands derived from parameters: filters in the kernels' layouts.

    A parameter is known by its storage and its version, not by its Python object: ``torch.compile``
    hands over other objects. An entry goes with its parameter. A write that PyTorch does not count
    (through ``.data``, or through a numpy array that shares the memory) goes unseen: ``forget``.
    What is derived of a tensor that was made under ``inference_mode`` has no version to be known
    by: nobody may ask for it.
    """

    def __init__(self) -> None:
        # Reentrant: a parameter may be collected, and expire, while this thread holds the lock.
        self._lock = threading.RLock()
        self._entries: dict[tuple[int, torch.dtype, Hashable], _Entry] = {}

    def __len__(self) -> int:
        """Counts what is derived of tensors that still exist."""
        with self._lock:
            self._sweep()
            return len(self._entries)

    def packed(self, weight: Tensor, groups: int) -> Tensor:
        """Returns a weight ``[K, C / groups, *taps]`` on the CPU, packed, flat."""
        operand: Tensor = self._get(weight, groups, lambda: pack_on_host(weight, groups))
        return operand

    def transposed(self, weight: Tensor) -> Tensor | None:
        """Returns a weight ``[K, C / groups, *taps]`` on a GPU as ``[K, *taps, C / groups]``.

        Returns:
            ``None`` if it cannot be kept: see ``derived``.
        """
        operand: Tensor | None = self.derived(weight, "KRSC", lambda: _transpose(weight))
        return operand

    def derived(self, tensor: Tensor, kind: Hashable, make: Callable[[], Any]) -> Any:
        """Returns what ``make`` makes of a parameter, made once.

        Args:
            tensor: The parameter.
            kind: Tells apart what is made of one parameter; no integer.
            make: Makes a tensor, or a list of tensors and ``None``.

        Returns:
            ``None`` if it cannot be kept: the parameter has no version, or a CUDA graph is
            captured, which would read it after it has gone.
        """
        if lacks_version(tensor):
            return None
        if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        return self._get(tensor, kind, make)

    def forget(self, tensor: Tensor) -> None:
        """Drops what was derived from a tensor."""
        with self._lock:
            address = tensor.data_ptr()
            for key in [key for key in self._entries if key[0] == address]:
                self._drop(key)

    def _get(self, tensor: Tensor, kind: Hashable, make: Callable[[], Any]) -> Any:
        key = (tensor.data_ptr(), tensor.dtype, kind)
        entry = self._entries.get(key)
        if (
            entry is not None
            and entry.version == tensor._version
            and entry.shape == tensor.shape
            and entry.stride == tensor.stride()
            and entry.storage == tensor.untyped_storage()._cdata
        ):
            return _used(entry.operand, tensor)
        version = tensor._version
        operand = _aside(tensor, make) if tensor.is_cuda else make()
        finalizer: weakref.finalize[Any, Tensor] | None = None
        if isinstance(tensor, torch.nn.Parameter):
            finalizer = weakref.finalize(tensor, self._drop, key)
            finalizer.atexit = False
        storage: Any = tensor.untyped_storage()
        entry = _Entry(
            version,
            tensor.shape,
            tensor.stride(),
            storage._cdata,
            storage._weak_ref(),
            operand,
            finalizer,
        )
        with self._lock:
            self._sweep()
            self._drop(key)
            self._entries[key] = entry
        return _used(operand, tensor)

    def _sweep(self) -> None:
        for key, entry in list(self._entries.items()):
            if _expired(entry.weak):
                self._drop(key)

    def _drop(self, key: tuple[int, torch.dtype, Hashable]) -> None:
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return
            _free_weak_reference(entry.weak)
            if entry.finalizer is not None:
                entry.finalizer.detach()


_version: Final = operator.attrgetter("_version")


def state_of(tensors: Sequence[Tensor]) -> Any:
    """Returns what changes with the tensors' values; ``None`` if one does not say."""
    try:
        return [*map(_version, tensors), *map(Tensor.data_ptr, tensors)]
    except RuntimeError:
        # PyTorch counts no writes to a tensor that was made under inference_mode.
        return None


def pack_on_host(weight: Tensor, groups: int) -> Tensor:
    """Returns a weight ``[K, C / groups, *taps]`` on the CPU packed, flat."""
    kind = NAMES[weight.dtype]
    values = weight.detach()
    # numpy has no bfloat16: its bits.
    array = values.view(torch.int16).numpy() if kind == "bfloat16" else values.numpy()
    carried = array.view(CARRIERS.get(kind, array.dtype))
    packed = pack_values(carried, kind, _LAYOUTS[weight.dim() - 2], groups=groups)
    # PyTorch's memory begins at a cache line. In numpy's, vectors of 512 bits would cross lines.
    tensor = torch.empty(packed.data.shape, dtype=weight.dtype)
    bits = tensor.view(torch.int16) if kind == "bfloat16" else tensor
    bits.numpy()[...] = packed.data
    return tensor


def _transpose(weight: Tensor) -> Tensor:
    return weight.detach().movedim(1, -1).clone(memory_format=torch.contiguous_format)


def _aside(tensor: Tensor, make: Callable[[], Any]) -> Any:
    """Returns what ``make`` makes of a tensor on a GPU, finished: any stream may read it next.

    While PyTorch warms up for a CUDA graph, what this thread allocates is the graph's: another
    thread makes it.
    """
    written: Any = cast(Any, torch.cuda).current_stream(tensor.device).record_event()

    def run() -> Any:
        stream: Any = cast(Any, torch.cuda.Stream)(tensor.device)
        stream.wait_event(written)
        with torch.cuda.stream(stream):
            made = make()
        stream.synchronize()
        return made

    with ThreadPoolExecutor(1) as other:
        return other.submit(run).result()


def _used(operand: Any, tensor: Tensor) -> Any:
    """Has PyTorch's allocator keep memory of a GPU until the current stream has read it."""
    if tensor.is_cuda:
        for part in operand if isinstance(operand, list) else [operand]:
            if part is not None:
                part.record_stream(torch.cuda.current_stream(tensor.device))
    return operand


#: The operands of every module in the process.
OPERANDS = OperandCache()
