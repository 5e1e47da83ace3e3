"""Convolutions for MAX graphs and PyTorch.

In a MAX graph::

    with Graph("net", input_types=[...], kernel_library=maxconv.kernel_library()) as graph:
        y = maxconv.conv2d(x, w, padding=(1, 1, 1, 1), bias=b, activation="relu")

``maxconv.nn`` has modules for ``max.experimental.nn``, ``maxconv.torch`` functions, modules and a
converter for PyTorch. Importing this package imports neither MAX nor PyTorch; the first use of a
name does.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ._version import __version__

if TYPE_CHECKING:
    from max.graph.type import ConvInputLayout, FilterLayout

    from ._blocks import deinterleave, interleave
    from ._calibration import Calibration, Quantization, quantize, quantize_filter
    from ._explain import explain_choice
    from ._library import OPERATIONS, LibraryError, kernel_library, library_path
    from ._norm import group_norm, rms_norm
    from ._ops import conv1d, conv2d, conv2d_transpose, conv3d
    from ._override import override_max
    from ._packing import PackedFilter, pack_filter
    from ._pooling import avg_pool, global_avg_pool, max_pool
    from ._problem import ConvProblem
    from ._quantize import quantize_linear

__all__ = [
    "OPERATIONS",
    "Calibration",
    "ConvInputLayout",
    "ConvProblem",
    "FilterLayout",
    "LibraryError",
    "PackedFilter",
    "Quantization",
    "__version__",
    "avg_pool",
    "conv1d",
    "conv2d",
    "conv2d_transpose",
    "conv3d",
    "deinterleave",
    "explain_choice",
    "global_avg_pool",
    "group_norm",
    "interleave",
    "kernel_library",
    "library_path",
    "max_pool",
    "override_max",
    "pack_filter",
    "quantize",
    "quantize_filter",
    "quantize_linear",
    "rms_norm",
]

_MODULES = {
    "OPERATIONS": "maxconv._library",
    "Calibration": "maxconv._calibration",
    "ConvInputLayout": "max.graph.type",
    "ConvProblem": "maxconv._problem",
    "FilterLayout": "max.graph.type",
    "LibraryError": "maxconv._library",
    "PackedFilter": "maxconv._packing",
    "Quantization": "maxconv._calibration",
    "avg_pool": "maxconv._pooling",
    "conv1d": "maxconv._ops",
    "conv2d": "maxconv._ops",
    "conv2d_transpose": "maxconv._ops",
    "conv3d": "maxconv._ops",
    "deinterleave": "maxconv._blocks",
    "explain_choice": "maxconv._explain",
    "global_avg_pool": "maxconv._pooling",
    "group_norm": "maxconv._norm",
    "interleave": "maxconv._blocks",
    "kernel_library": "maxconv._library",
    "library_path": "maxconv._library",
    "max_pool": "maxconv._pooling",
    "override_max": "maxconv._override",
    "pack_filter": "maxconv._packing",
    "quantize": "maxconv._calibration",
    "quantize_filter": "maxconv._calibration",
    "quantize_linear": "maxconv._quantize",
    "rms_norm": "maxconv._norm",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'maxconv' has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
