"""ResNet-50 as a MAX graph: a whole classifier made of maxconv's convolutions.

The network of He et al. 2016, "Deep Residual Learning for Image Recognition", with the stride of a
block in its 3x3 convolution, as torchvision has it (v1.5). Every batch normalisation is folded into
the filter before it when the graph is built, and what follows a convolution runs in its kernel:
the bias, the ReLU, and at a block's end the sum with the shortcut and the ReLU after that.

Weights are numpy arrays under the names of torchvision's ``state_dict``. A file of them::

    model = torchvision.models.resnet50(weights="DEFAULT")
    numpy.savez("resnet50.npz", **{k: v.numpy() for k, v in model.state_dict().items()})

Without a file the weights are random: the classes then mean nothing, the time does.

    python graphs/resnet50.py
    python graphs/resnet50.py photo.jpg --weights resnet50.npz
    python graphs/resnet50.py --device gpu --dtype bfloat16 --batch 64 --replay --profile
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from PIL import Image, ImageOps

import maxconv
from maxconv.graphs.common import add_options, device_ref, run_graph, settle_options

Floats: TypeAlias = npt.NDArray[np.float32]
#: Arrays by name; each is converted to float32.
Weights: TypeAlias = Mapping[str, npt.NDArray[Any]]

PHOTO = Path(__file__).parent / "data" / "photo.png"

#: Blocks and inner channels of the four stages; a block has EXPANSION times as many outside.
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
EXPANSION = 4
CLASSES = 1000
EPSILON = 1e-5

# What torchvision's pretrained weights expect of an image.
SIZE, RESIZED = 224, 256
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)


def build_graph(
    weights: Weights, *, dtype: DType = DType.float32, device: DeviceRef | None = None
) -> Graph:
    """Returns the network as a graph.

    Args:
        weights: Arrays of the names and shapes that ``shapes`` gives; others are ignored.
        dtype: What activations and filters are stored in: float32, bfloat16 or float16.
        device: Where it runs, by default the CPU.

    Returns:
        A graph from normalised RGB images, ``[batch, height, width, 3]`` of float32 with any sizes,
        to the scores (logits) of the classes, ``[batch, 1000]`` of float32.

    Raises:
        ValueError: An array is missing or has another shape.
    """
    check(weights)
    device = device or DeviceRef.CPU()
    images = TensorType(DType.float32, ("batch", "height", "width", 3), device)
    with Graph("resnet50", input_types=[images], kernel_library=maxconv.kernel_library()) as graph:
        x = graph.inputs[0].tensor.cast(dtype)
        x = convolve(x, weights, "conv1", "bn1", stride=2, activation="relu")
        x = maxconv.max_pool(x, 3, stride=2, padding=1)
        for stage, (blocks, _) in enumerate(STAGES, start=1):
            for block in range(blocks):
                stride = 2 if stage > 1 and block == 0 else 1
                x = bottleneck(x, weights, f"layer{stage}.{block}", stride)
        # A 1x1 convolution shares what is compiled already; a matmul would compile for as long as
        # half of the network.
        scores = maxconv.conv2d(
            maxconv.global_avg_pool(x),
            weights["fc.weight"].astype(np.float32)[:, :, None, None],
            bias=weights["fc.bias"].astype(np.float32),
            filter_layout="FCRS",
            out_dtype=DType.float32,
        )
        graph.output(ops.reshape(scores, (x.shape[0], CLASSES)))
    return graph


def bottleneck(x: TensorValue, weights: Weights, name: str, stride: int) -> TensorValue:
    """Adds a block: 1x1, 3x3 with the stride, 1x1; its input is added to the result."""
    y = convolve(x, weights, f"{name}.conv1", f"{name}.bn1", activation="relu")
    y = convolve(y, weights, f"{name}.conv2", f"{name}.bn2", stride=stride, activation="relu")
    shortcut = x
    if f"{name}.downsample.0.weight" in weights:
        down = f"{name}.downsample"
        shortcut = convolve(x, weights, f"{down}.0", f"{down}.1", stride=stride)
    return convolve(
        y, weights, f"{name}.conv3", f"{name}.bn3", residual=shortcut, final_activation="relu"
    )


def convolve(
    x: TensorValue,
    weights: Weights,
    conv: str,
    norm: str,
    *,
    stride: int = 1,
    activation: str | None = None,
    residual: TensorValue | None = None,
    final_activation: str | None = None,
) -> TensorValue:
    """Adds a convolution with the batch normalisation that follows it, and what follows that.

    Args:
        x: The input, channels last.
        weights: All arrays.
        conv: The convolution's name in ``weights``.
        norm: The batch normalisation's.
        stride: In height and width.
        activation: See ``maxconv.conv2d``.
        residual: See ``maxconv.conv2d``.
        final_activation: See ``maxconv.conv2d``.
    """
    filter, bias = fold(weights, conv, norm)
    return maxconv.conv2d(
        x,
        filter,
        stride=stride,
        padding=filter.shape[-1] // 2,
        bias=bias,
        filter_layout="FCRS",
        activation=activation,
        residual=residual,
        final_activation=final_activation,
    )


def fold(weights: Weights, conv: str, norm: str) -> tuple[Floats, Floats]:
    """Returns the filter ``[K, C, R, S]`` and the bias ``[K]`` of a convolution and its norm.

    With fixed statistics a batch normalisation is ``y * scale + shift`` for each channel of the
    convolution's output, and that is another filter and a bias.
    """
    gamma, beta, mean, variance = (
        weights[f"{norm}.{name}"].astype(np.float64)
        for name in ("weight", "bias", "running_mean", "running_var")
    )
    scale = gamma / np.sqrt(variance + EPSILON)
    filter = weights[f"{conv}.weight"] * scale[:, np.newaxis, np.newaxis, np.newaxis]
    return filter.astype(np.float32), (beta - mean * scale).astype(np.float32)


def shapes() -> dict[str, tuple[int, ...]]:
    """Returns the name and the shape of every array of the network, in the network's order."""
    made: dict[str, tuple[int, ...]] = {}

    def add(conv: str, norm: str, filters: int, channels: int, size: int) -> None:
        made[f"{conv}.weight"] = (filters, channels, size, size)
        for name in ("weight", "bias", "running_mean", "running_var"):
            made[f"{norm}.{name}"] = (filters,)

    channels = STAGES[0][1]
    add("conv1", "bn1", channels, 3, 7)
    for stage, (blocks, inner) in enumerate(STAGES, start=1):
        outer = inner * EXPANSION
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            add(f"{name}.conv1", f"{name}.bn1", inner, channels, 1)
            add(f"{name}.conv2", f"{name}.bn2", inner, inner, 3)
            add(f"{name}.conv3", f"{name}.bn3", outer, inner, 1)
            if block == 0:
                add(f"{name}.downsample.0", f"{name}.downsample.1", outer, channels, 1)
            channels = outer
    made["fc.weight"] = (CLASSES, channels)
    made["fc.bias"] = (CLASSES,)
    return made


def check(weights: Weights) -> None:
    """Raises ``ValueError`` where an array of the network is missing or has another shape."""
    for name, shape in shapes().items():
        if name not in weights:
            raise ValueError(f"weights: {name} is missing; it has the shape {shape}")
        if weights[name].shape != shape:
            raise ValueError(f"weights: {name} has the shape {weights[name].shape}, not {shape}")


def random_weights(seed: int = 0) -> dict[str, Floats]:
    """Returns weights drawn so that the activations keep their magnitude from layer to layer."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes().items():
        if len(shape) > 1:
            # A ReLU follows each convolution, but not the classifier.
            gain = 2.0 if len(shape) == 4 else 1.0
            array = rng.standard_normal(shape, np.float32) * np.sqrt(gain / np.prod(shape[1:]))
        elif name.endswith(("running_var", "weight")):
            array = rng.uniform(0.5, 1.5, shape)
            # Sums of many blocks would otherwise grow from one to the next.
            array *= 0.25 if name.endswith("bn3.weight") else 1.0
        else:
            array = 0.1 * rng.standard_normal(shape, np.float32)
        arrays[name] = array.astype(np.float32)
    return arrays


def preprocess(photo: Image.Image) -> Floats:
    """Returns the middle of a photograph as the network wants it, ``[1, 224, 224, 3]``."""
    photo = photo.convert("RGB")
    scale = RESIZED / min(photo.size)
    photo = photo.resize((round(photo.width * scale), round(photo.height * scale)))
    left, top = (photo.width - SIZE) // 2, (photo.height - SIZE) // 2
    photo = photo.crop((left, top, left + SIZE, top + SIZE))
    pixels = (np.asarray(photo, dtype=np.float32) / 255 - MEAN) / DEVIATION
    return pixels[np.newaxis].astype(np.float32)


def probabilities(scores: Floats) -> Floats:
    """Returns the probabilities of the classes, ``[batch, 1000]``, from their scores."""
    powers = np.exp(scores - scores.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Returns the program's arguments; a bad one raises ``ValueError``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("photo", nargs="?", type=Path, default=PHOTO)
    parser.add_argument("--weights", type=Path, metavar="NPZ", help="weights; random without")
    parser.add_argument("--seed", type=int, default=0, help="of the random weights")
    parser.add_argument("--batch", type=int, default=1, help="how often the photo is classified")
    add_options(parser)
    args = parser.parse_args(words)
    settle_options(args)
    if args.batch < 1:
        raise ValueError(f"batch: {args.batch} is not allowed; 1 and above are")
    return args


def main() -> None:
    """Classifies a photograph and prints the five best classes and the time."""
    try:
        args = read_arguments()
        with Image.open(args.photo) as photo:
            images = preprocess(ImageOps.exif_transpose(photo)).repeat(args.batch, axis=0)
        weights = dict(np.load(args.weights)) if args.weights else random_weights(args.seed)
        graph = build_graph(weights, dtype=DType[args.dtype], device=device_ref(args))
    except ValueError as error:
        sys.exit(f"resnet50.py: {error}")
    scores, milliseconds = run_graph(graph, images, args)
    found = probabilities(scores)[0]
    if not args.weights:
        print("the weights are random: the classes mean nothing")
    for index in np.argsort(found)[::-1][:5]:
        print(f"class {index:3d}: {100 * found[index]:5.2f} %")
    how = "replayed" if args.replay else "executed"
    print(f"{args.batch} of {SIZE}x{SIZE} in {milliseconds:.2f} ms, {how}")


if __name__ == "__main__":
    main()
