"""Compiles a graph for a GPU that is not there, in a process of its own:
``python -m tests.blackwell_graphs ARCHITECTURE FOLDER [GRAPH]``.

GRAPH is ``block``, a ResNet block and a fused convolution, or ``narrow``, convolutions of int8 and
float8_e5m2. Writes to the folder what MAX compiled.
"""

from __future__ import annotations

import os
import sys

import numpy as np
import numpy.typing as npt
from max import driver
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType

import maxconv


def block() -> Graph:
    """Returns a convolution with bias, SiLU and residual, and the first block of a ResNet's stage,
    whose shortcut is a convolution alone."""
    gpu, kind = DeviceRef.GPU(), DType.bfloat16
    image = TensorType(kind, ("n", "h", "w", 64), gpu)

    def weights(taps: int) -> npt.NDArray[np.float32]:
        return np.ones((taps, taps, 64, 64), np.float32)

    bias = np.ones(64, np.float32)
    with Graph("blackwell", input_types=[image] * 2, kernel_library=maxconv.kernel_library()) as g:
        x, residual = (value.tensor for value in g.inputs)
        alone = maxconv.conv2d(x, weights(1))
        fused = maxconv.conv2d(
            x, weights(3), padding=1, bias=bias, activation="silu", residual=residual
        )
        inner = maxconv.conv2d(x, weights(1), bias=bias, activation="relu")
        middle = maxconv.conv2d(inner, weights(3), padding=1, bias=bias, activation="relu")
        outer = maxconv.conv2d(
            middle, weights(1), bias=bias, residual=alone, final_activation="relu"
        )
        g.output(fused, outer)
    return g


def narrow() -> Graph:
    """Returns convolutions with scale, bias and ReLU, of each type of 8 bits that tensor cores
    alone multiply."""
    gpu = DeviceRef.GPU()
    kinds = [DType.int8, DType.float8_e5m2]
    images = [TensorType(kind, ("n", "h", "w", 64), gpu) for kind in kinds]
    weights = np.ones((3, 3, 64, 32), np.float32)
    with Graph("narrow", input_types=images, kernel_library=maxconv.kernel_library()) as g:
        convolutions = [
            maxconv.conv2d(
                value.tensor,
                weights,
                bias=np.ones(32, np.float32),
                scale=0.5,
                activation="relu",
                out_dtype=DType.bfloat16,
            )
            for value in g.inputs
        ]
        g.output(*convolutions)
    return g


def main() -> None:
    """Compiles; the process ends with 1 if the graph does not."""
    architecture, folder, *wanted = sys.argv[1:]
    # Before MAX looks for a device.
    driver.set_virtual_device_api("cuda")
    driver.set_virtual_device_target_arch(architecture)
    driver.set_virtual_device_count(1)
    from max.engine import InferenceSession

    session = InferenceSession(devices=[driver.Accelerator()], export_mefs=folder)
    session.load(narrow() if wanted == ["narrow"] else block())
    # A virtual device cannot be taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
