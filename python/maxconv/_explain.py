"""Which kernel a convolution runs on, and why, as the kernels' own dispatch says it."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from ._checks import check_dtype
from ._dtypes import CPU_BYTES, DTYPE_BYTES, INPUT_BYTES, UINT8
from ._fields import BLOCKED_IMAGES, Kernel, Layout, encode_scalars
from ._library_files import explain_file
from ._native import Call, Library
from ._signature import filters_missing
from ._targets import TARGETS
from ._tuned import use_table

if TYPE_CHECKING:
    from pathlib import Path

    from ._problem import ConvProblem

__all__ = [
    "DEVICES",
    "EXPLAINED_LAYOUTS",
    "explain_choice",
]

#: What can be asked: this machine's CPU, its first GPU, and GPUs that need not be here.
DEVICES = ("cpu", "gpu", *TARGETS)

#: Layouts of an activation that can be asked about.
EXPLAINED_LAYOUTS = ("NHWC", *BLOCKED_IMAGES)


def explain_choice(
    problem: ConvProblem,
    *,
    kernel: Kernel = Kernel.AUTO,
    dtype: object = "float32",
    device: str = "cpu",
    multiprocessors: int | None = None,
    fused_output: bool = True,
    layout: str = "NHWC",
) -> tuple[str, str]:
    """Returns the kernel that runs a problem, and the reason.

    The answer comes from the registry itself (``operations/conv/registry.mojo``), through a library
    without kernels that is compiled once for each storage type and kept in the cache.

    Args:
        problem: The convolution; all sizes known.
        kernel: A kernel to ask for, or ``AUTO``.
        dtype: Storage type of the activation. The output has it too, but on a GPU beside int8 and
            8-bit floats it is bfloat16.
        device: One of ``DEVICES``: this machine's CPU, its first GPU, or the architecture of a GPU
            that need not be here.
        multiprocessors: Of the GPU that ``device`` gives the architecture of; ``None`` stands for
            those of the product in ``TARGETS``.
        fused_output: Whether something stands behind the convolution that the graph compiler fuses
            with it: elementwise work, or the graph's end. ``False`` where another operation reads
            its output as it is; some tiles are compiled for that case alone.
        layout: Of activation and output: ``"NHWC"``, ``"NC/4HW4"`` of int8 on a GPU, or any of
            ``EXPLAINED_LAYOUTS`` on a CPU.

    Raises:
        ValueError: A size is symbolic, ``dtype``, ``device`` or ``layout`` is not supported, MAX
            finds no GPU here, or ``kernel`` cannot take the problem: the message says why.
        LibraryError: The library cannot be compiled; see ``maxconv.library_path``.
    """
    storage = check_dtype("dtype", dtype, CPU_BYTES if device == "cpu" else INPUT_BYTES)
    if not problem.is_static:
        raise ValueError(f"problem: {problem} has symbolic sizes; all must be known")
    if layout not in EXPLAINED_LAYOUTS:
        raise ValueError(f"layout: {layout!r} is not one of {', '.join(EXPLAINED_LAYOUTS)}")
    interleaved = layout in BLOCKED_IMAGES
    if interleaved:
        _check_blocks(problem, storage, layout, on_gpu=device != "cpu")
    if fused_output and device != "cpu" and not interleaved:
        out_dtype = storage if storage in (*DTYPE_BYTES, UINT8) else "bfloat16"
        missing = filters_missing(problem, storage, out_dtype, kernel)
        problem = replace(problem, filters=problem.filters + missing)
    geometry = problem.geometry(
        kernel=kernel, filter_layout=Layout.INTERLEAVED if interleaved else Layout.KRSC
    )
    described = _described(device, multiprocessors)
    explainer = _explainer(storage)
    return explainer.explain(
        problem, geometry, described or explainer.first_gpu(), fused_output=fused_output
    )


def _check_blocks(problem: ConvProblem, dtype: str, layout: str, *, on_gpu: bool) -> None:
    """Raises ``ValueError`` where no kernel takes a layout, and where it cannot hold a problem."""
    from ._interleave import CPU_DTYPES, pairing_refusal

    if refusal := pairing_refusal(layout, layout, on_gpu=on_gpu):
        raise ValueError(f"layout: {refusal}")
    if on_gpu:
        return
    if dtype not in CPU_DTYPES:
        raise ValueError(f"layout: {layout} takes {', '.join(CPU_DTYPES)} on a CPU; here {dtype}")
    block, _ = BLOCKED_IMAGES[layout]
    channels, filters = int(problem.channels), int(problem.filters)
    if channels % block or filters % block:
        raise ValueError(
            f"layout: {layout} holds multiples of {block} channels and filters; here {channels} "
            f"and {filters}"
        )


def _described(device: str, multiprocessors: int | None) -> tuple[int, int, int] | None:
    """Returns a device's compute capability, times ten, its multiprocessors and bytes of L2 cache.

    All are 0 for the CPU, the last where it is not known; ``None`` stands for the first GPU of this
    machine.
    """
    if device not in DEVICES:
        raise ValueError(f"device: {device!r} is not one of {', '.join(DEVICES)}")
    target = TARGETS.get(device)
    if target is not None:
        given = target.multiprocessors if multiprocessors is None else multiprocessors
        return target.capability, given, 0
    if multiprocessors is not None:
        raise ValueError(
            f"multiprocessors: {multiprocessors} given, but device {device} has its own; only one "
            f"of {', '.join(TARGETS)} takes them"
        )
    if device == "cpu":
        return 0, 0, 0
    _check_gpu()
    return None


def _check_gpu() -> None:
    from max.driver import accelerator_count

    if accelerator_count() == 0:
        raise ValueError(
            "device: MAX finds no GPU on this machine; name the architecture of one that need not "
            f"be here ({', '.join(TARGETS)})"
        )


class Explainer(Library):
    """What the registries of all devices choose."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._explain = self.function("explain", 7)
        self._gpu = self.function("gpu", 3)

    def explain(
        self,
        problem: ConvProblem,
        geometry: npt.NDArray[np.int64],
        device: tuple[int, int, int],
        *,
        fused_output: bool,
    ) -> tuple[str, str]:
        """Returns the kernel that runs a problem, and the reason.

        Args:
            problem: The convolution; all sizes known.
            geometry: The ops' operand of that name; a filter in ``Layout.INTERLEAVED`` stands
                between activations that are so too.
            device: A GPU's compute capability, times ten, its multiprocessors and the bytes of its
                L2 cache, or 0; zeros for this machine's CPU.
            fused_output: Whether the graph compiler fuses something behind.

        Raises:
            ValueError: No kernel takes the problem, or not the one that is asked for.
        """
        shapes = Call.of(
            cast("tuple[int, ...]", problem.input_shape),
            cast("tuple[int, ...]", problem.output_shape),
            0,
            geometry,
            encode_scalars(),
        ).shapes
        given = (shapes.ctypes.data, geometry.ctypes.data, *device, int(fused_output))
        kernel, _, reason = self.text(self.made(self._explain, *given)).partition(": ")
        return kernel, reason

    def first_gpu(self) -> tuple[int, int, int]:
        """Returns what ``explain`` takes of the first GPU.

        Raises:
            ValueError: The driver opens none.
        """
        described = np.zeros(3, np.int64)
        addresses = [described[place:].ctypes.data for place in range(len(described))]
        if failed := self._gpu(*addresses):
            raise self.error(failed)
        capability, multiprocessors, l2_bytes = map(int, described)
        return capability, multiprocessors, l2_bytes


@functools.cache
def _explainer(dtype: str) -> Explainer:
    use_table()
    return Explainer(explain_file(dtype))
