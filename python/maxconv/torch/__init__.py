"""Convolutions for PyTorch, for inference on CPUs and NVIDIA GPUs.

Functions with the arguments of ``torch.nn.functional`` and modules with the constructors and the
state of ``torch.nn``, which take an activation and a residual besides, and ``convert``, which puts
them into a model::

    import maxconv.torch as mt

    model, report = mt.convert(model.eval())
    print(report)

``torch.compile(model, backend="maxconv")`` puts them into the graphs that it compiles.

The first call of a dtype builds a shared library, half a minute once a user; later processes load
it. ``prepare`` builds it when you choose.
"""

from ._backend import register as _register
from ._constants import repack
from ._convert import convert
from ._functional import conv1d, conv2d, conv3d
from ._modules import Conv1d, Conv2d, Conv3d
from ._norm import group_norm
from ._operands import ConvOperands, conv_operands, pack_filter
from ._pooling import global_avg_pool
from ._prepare import prepare
from ._quantize import quantize
from ._quantize_report import QuantizationReport, QuantizedLayer
from ._report import ConversionReport, Left, Replaced, Untraced
from ._transposed import conv_transpose1d, conv_transpose2d, conv_transpose3d
from ._transposed_modules import ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvOperands",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "ConversionReport",
    "Left",
    "QuantizationReport",
    "QuantizedLayer",
    "Replaced",
    "Untraced",
    "conv1d",
    "conv2d",
    "conv3d",
    "conv_operands",
    "conv_transpose1d",
    "conv_transpose2d",
    "conv_transpose3d",
    "convert",
    "global_avg_pool",
    "group_norm",
    "pack_filter",
    "prepare",
    "quantize",
    "repack",
]

_register()
