"""Keeps tensors channels last in modules that are not traced, where their code cannot tell.

Of PyTorch's modules there, group normalizations give contiguous tensors, and convolutions those of
their input's format. Their code is read instead of traced: a call of ``view`` or of what else may
depend on strides keeps PyTorch's formats, there and in what it calls.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.fx import GraphModule

from ._formats import asks_strides
from ._fuse_norms import is_on_gpu
from ._norm import GroupNorm
from ._reading import asks_order
from ._sites import is_own
from ._tracing import is_plain

__all__ = ["keep_channels_last"]


def keep_channels_last(model: nn.Module) -> None:
    """Has convolutions and group normalizations that are not traced return channels-last tensors.

    Args:
        model: The model, converted, which changes in place; on a CPU it stays as it is.
    """
    if not is_on_gpu(model):
        return
    for part in list(_indifferent(model)):
        if type(part) is nn.GroupNorm:
            # The state stays as it is, whoever else has the module.
            cast(Any, part).__class__ = GroupNorm
        elif cast(Any, part).channels_last == "input":
            cast(Any, part).channels_last = "always"


def _indifferent(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the convolutions and normalizations that only code calls which cannot tell formats."""
    asked: dict[nn.Module, bool] = {}

    def visit(module: nn.Module, asks: bool) -> None:
        """Reads the code of a module; ``asks``: whether that of what has it asks."""
        if isinstance(module, GraphModule):
            asks |= asks_strides(module)
        else:
            asks |= asks_order(type(module))
        for part in module._modules.values():
            if part is None or isinstance(part, torch.jit.ScriptModule):
                continue
            if is_own(part) or (type(part) is nn.GroupNorm and is_plain(part)):
                asked[part] = asked.get(part, False) or asks
            else:
                visit(part, asks)

    visit(model, False)
    return (part for part, asks in asked.items() if not asks)
