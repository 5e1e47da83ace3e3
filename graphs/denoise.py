"""A denoising network for photographs: how to write a network with maxconv.

``build_graph`` is all that there is to it: take the image, convolve, write what else happens with
MAX's own operations. A bias, an activation or a sum that follows a convolution costs no pass over
memory: MAX fuses it into the convolution's kernel. Sizes are symbolic, so that one compiled model
takes any number of photographs of any size.

The convolution is an argument only because maxconv's is a drop-in for ``max.graph.ops.conv2d``: the
demo builds the same network with both and compares them. The weights come from
``train_denoise.py``.

    python graphs/denoise.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Buffer
from max.dtype import DType
from max.engine import InferenceSession, Model
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from PIL import Image

import maxconv

Floats = npt.NDArray[np.float32]

PHOTO = Path(__file__).parent / "data" / "photo.png"
WEIGHTS = Path(__file__).parent / "data" / "denoise.npz"

#: Zeros (before, after) in height and in width that keep the size in a 3x3 convolution.
SAME = (1, 1, 1, 1)


class Layer(NamedTuple):
    """A 3x3 convolution: its filter ``[3, 3, C, K]`` and its bias ``[K]``."""

    filter: Floats
    bias: Floats


def load_weights(path: Path = WEIGHTS) -> list[Layer]:
    """Returns the trained layers, first to last."""
    with np.load(path) as file:
        count = sum(name.endswith(".weight") for name in file)
        arrays = [(file[f"conv{i}.weight"], file[f"conv{i}.bias"]) for i in range(count)]
    # PyTorch keeps a filter as [K, C, 3, 3]; MAX's default, and so maxconv's, is [3, 3, C, K].
    return [
        Layer(np.ascontiguousarray(weight.transpose(2, 3, 1, 0), dtype=np.float32), bias)
        for weight, bias in arrays
    ]


def build_graph(
    layers: Sequence[Layer], convolution: Callable[..., TensorValue] = maxconv.conv2d
) -> Graph:
    """Returns the network as a graph.

    Args:
        layers: The weights. They are constants of the graph: maxconv packs them here, once.
        convolution: ``maxconv.conv2d``, or a function that takes the same arguments.

    Returns:
        A graph from RGB pixels in [0, 1], ``[batch, height, width, 3]`` of float32, to the same
        with less noise. It is blind: it finds the strength of the noise by itself.
    """
    photos = TensorType(DType.float32, ("batch", "height", "width", 3), DeviceRef.CPU())
    with Graph("denoise", input_types=[photos], kernel_library=maxconv.kernel_library()) as graph:
        noisy = graph.inputs[0].tensor
        features = noisy
        for filter, bias in layers[:-1]:
            features = ops.relu(convolution(features, filter, padding=SAME, bias=bias))
        filter, bias = layers[-1]
        noise = convolution(features, filter, padding=SAME, bias=bias)
        graph.output(noisy - noise)
    return graph


def denoise(model: Model, noisy: Floats) -> Floats:
    """Runs the compiled network on one photograph, ``[height, width, 3]``."""
    (output,) = model.execute(Buffer.from_numpy(np.ascontiguousarray(noisy[np.newaxis])))
    assert isinstance(output, Buffer)
    denoised: Floats = output.to_numpy()[0]
    return denoised


def add_noise(photo: Floats, sigma: float, seed: int = 0) -> Floats:
    """Adds Gaussian noise to a photograph, ``[height, width, 3]``; the result is not clipped.

    Args:
        photo: Pixels in [0, 1].
        sigma: Standard deviation in steps of 8-bit pixels, 1/255.
        seed: Of the random numbers.
    """
    height, width, channels = photo.shape
    # Drawn colour by colour, as in training: the same seed is the same noise.
    noise = np.random.default_rng(seed).standard_normal((channels, height, width), np.float32)
    noisy: Floats = photo + noise.transpose(1, 2, 0) * np.float32(sigma / 255)
    return noisy


def psnr(clean: Floats, other: Floats) -> float:
    """Returns the peak signal-to-noise ratio in dB: 20 is grainy, 30 is good."""
    return -10 * float(np.log10(np.mean((clean - other) ** 2, dtype=np.float64)))


def main() -> None:
    """Denoises the repository's photograph."""
    photo = np.asarray(Image.open(PHOTO).convert("RGB"), dtype=np.float32) / np.float32(255)
    noisy = add_noise(photo, sigma=25)
    print("compiling: half a minute the first time", flush=True)
    model = InferenceSession(devices=[CPU()]).load(build_graph(load_weights()))
    denoise(model, noisy)  # The first call also starts MAX's threads.
    start = time.perf_counter()
    denoised = denoise(model, noisy)
    seconds = time.perf_counter() - start
    print(f"{psnr(photo, noisy):.2f} dB noisy, {psnr(photo, denoised):.2f} dB denoised")
    print(f"{photo.shape[1]}x{photo.shape[0]} pixels in {1e3 * seconds:.0f} ms")


if __name__ == "__main__":
    main()
