"""The decoder of a latent-diffusion VAE as a MAX graph: from latents to an image.

It is the decoder of diffusers' ``AutoencoderKL``, by default in the configuration of Stable
Diffusion 1.5 (Rombach et al. 2022, "High-Resolution Image Synthesis with Latent Diffusion Models"):
residual blocks of two 3x3 convolutions, each behind a group normalisation and a SiLU, attention in
the middle, and three upsamplings by two. Biases and sums run in the convolutions' kernels. The
products of the attention are convolutions too: of one tap, over one row of tokens.

Weights are arrays under diffusers' names. Which blocks there are a checkpoint says by its names and
shapes, so that other configurations are read as well, as SD3's and FLUX.1's of 16 latent channels
and no ``post_quant_conv``. Without a file the weights are random: the image then means nothing, the
time does.

    python graphs/vae_decoder.py
    python graphs/vae_decoder.py --weights vae/diffusion_pytorch_model.safetensors --latents z.npy
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from max.dtype import DType
from max.graph import DeviceRef, Graph, TensorType, TensorValue, ops
from max.graph.weights import WeightData, load_weights
from PIL import Image

import maxconv
from maxconv.graphs.common import add_options, device_ref, run_graph, settle_options

Floats: TypeAlias = npt.NDArray[np.float32]
#: Arrays by name; each is converted to float32.
Weights: TypeAlias = Mapping[str, npt.NDArray[Any]]

EPSILON = 1e-6
#: What Stable Diffusion 1.5 multiplies latents with, so that their deviation is about 1.
SCALING_FACTOR = 0.18215

ATTENTION = "decoder.mid_block.attentions.0"
#: The names of an attention's layers in checkpoints before diffusers 0.13, and since.
RENAMED = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}


@dataclass(frozen=True)
class Config:
    """What differs from one decoder to another; by default that of Stable Diffusion 1.5."""

    latents: int = 4
    """Channels of the latents."""
    channels: tuple[int, ...] = (512, 512, 256, 128)
    """Of the upsampling blocks: ``block_out_channels`` from the last to the first."""
    layers: int = 3
    """Residual blocks in each: ``layers_per_block + 1``."""
    attention: bool = True
    """Whether the middle has attention."""
    post_quant: bool = True
    """Whether a 1x1 convolution comes first."""

    @classmethod
    def of(cls, weights: Weights) -> Config:
        """Returns the configuration that a checkpoint's names and shapes tell."""
        ups = [re.match(r"decoder\.up_blocks\.(\d+)\.resnets\.(\d+)\.", name) for name in weights]
        blocks = 1 + max((int(up[1]) for up in ups if up), default=0)
        layers = 1 + max((int(up[2]) for up in ups if up), default=0)
        first = [f"decoder.up_blocks.{block}.resnets.0.conv1.weight" for block in range(blocks)]
        for name in ("decoder.conv_in.weight", *first):
            if name not in weights:
                raise ValueError(f"weights: {name} is missing; it is a filter [K, C, 3, 3]")
        return cls(
            latents=weights["decoder.conv_in.weight"].shape[1],
            channels=tuple(weights[name].shape[0] for name in first),
            layers=layers,
            attention=any(name.startswith(ATTENTION) for name in weights),
            post_quant="post_quant_conv.weight" in weights,
        )

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the name and the shape of every array, in the network's order."""
        made: dict[str, tuple[int, ...]] = {}

        def add(name: str, *shape: int) -> None:
            made[f"{name}.weight"], made[f"{name}.bias"] = shape, shape[:1]

        def add_resnet(name: str, channels: int, filters: int) -> None:
            add(f"{name}.norm1", channels)
            add(f"{name}.conv1", filters, channels, 3, 3)
            add(f"{name}.norm2", filters)
            add(f"{name}.conv2", filters, filters, 3, 3)
            if channels != filters:
                add(f"{name}.conv_shortcut", filters, channels, 1, 1)

        if self.post_quant:
            add("post_quant_conv", self.latents, self.latents, 1, 1)
        channels = self.channels[0]
        add("decoder.conv_in", channels, self.latents, 3, 3)
        add_resnet("decoder.mid_block.resnets.0", channels, channels)
        if self.attention:
            add(f"{ATTENTION}.group_norm", channels)
            for part in RENAMED.values():
                add(f"{ATTENTION}.{part}", channels, channels)
        add_resnet("decoder.mid_block.resnets.1", channels, channels)
        for block, filters in enumerate(self.channels):
            for layer in range(self.layers):
                add_resnet(f"decoder.up_blocks.{block}.resnets.{layer}", channels, filters)
                channels = filters
            if block < len(self.channels) - 1:
                add(f"decoder.up_blocks.{block}.upsamplers.0.conv", channels, channels, 3, 3)
        add("decoder.conv_norm_out", channels)
        add("decoder.conv_out", 3, channels, 3, 3)
        return made


@dataclass(frozen=True)
class Decoder:
    """The network's layers, each of which adds to the current graph."""

    weights: Weights
    groups: int

    def build(self, x: TensorValue, config: Config) -> TensorValue:
        """Adds the whole network: latents of the type it computes in, to float32 pixels."""
        if config.post_quant:
            x = self.convolve(x, "post_quant_conv")
        x = self.convolve(x, "decoder.conv_in")
        x = self.resnet(x, "decoder.mid_block.resnets.0")
        if config.attention:
            x = self.attend(x, ATTENTION)
        x = self.resnet(x, "decoder.mid_block.resnets.1")
        for block in range(len(config.channels)):
            for layer in range(config.layers):
                x = self.resnet(x, f"decoder.up_blocks.{block}.resnets.{layer}")
            if block < len(config.channels) - 1:
                name = f"decoder.up_blocks.{block}.upsamplers.0.conv"
                x = self.convolve(x, name, upsample=2)
        x = self.normalize(x, "decoder.conv_norm_out", activation="silu")
        return self.convolve(x, "decoder.conv_out", out_dtype=DType.float32)

    def resnet(self, x: TensorValue, name: str) -> TensorValue:
        """Adds a residual block; a 1x1 convolution is its shortcut where channels change."""
        y = self.normalize(x, f"{name}.norm1", activation="silu")
        y = self.convolve(y, f"{name}.conv1")
        y = self.normalize(y, f"{name}.norm2", activation="silu")
        if f"{name}.conv_shortcut.weight" in self.weights:
            x = self.convolve(x, f"{name}.conv_shortcut")
        return self.convolve(y, f"{name}.conv2", residual=x)

    def attend(self, x: TensorValue, name: str) -> TensorValue:
        """Adds attention of one head over all pixels; its input is added to the result."""
        _, height, width, channels = x.shape
        pixels = height * width
        tokens = self.normalize(x, f"{name}.group_norm")
        tokens = ops.reshape(tokens, (1, 1, pixels, channels))
        query, key = (self.convolve(tokens, f"{name}.{layer}") for layer in ("to_q", "to_k"))
        # A convolution of one tap is a product with a transposed matrix, its filter: keys as the
        # filter give the scores, and tokens as the filter give the values transposed, which are a
        # filter in turn.
        scores = maxconv.conv2d(
            query,
            ops.reshape(key, (pixels, 1, 1, channels)),
            filter_layout="KRSC",
            scale=int(channels) ** -0.5,
            out_dtype=DType.float32,
        )
        weight = ops.constant(self.array(f"{name}.to_v.weight"), DType.float32, x.device)
        values = maxconv.conv2d(
            ops.reshape(weight.cast(x.dtype), (1, 1, channels, channels)),
            ops.reshape(tokens, (pixels, 1, 1, channels)),
            filter_layout="KRSC",
        )
        # Each row of the softmax has the sum 1, so that the values' bias may be added behind it.
        attended = maxconv.conv2d(
            ops.softmax(scores).cast(x.dtype),
            ops.reshape(values, (channels, 1, 1, pixels)),
            filter_layout="KRSC",
            bias=self.array(f"{name}.to_v.bias"),
        )
        return self.convolve(ops.reshape(attended, x.shape), f"{name}.to_out.0", residual=x)

    def normalize(self, x: TensorValue, name: str, *, activation: str | None = None) -> TensorValue:
        """Adds a group normalization with what follows it."""
        return maxconv.group_norm(
            x,
            self.groups,
            self.array(f"{name}.weight"),
            self.array(f"{name}.bias"),
            EPSILON,
            activation=activation,
        )

    def convolve(
        self,
        x: TensorValue,
        name: str,
        *,
        residual: TensorValue | None = None,
        out_dtype: DType | None = None,
        upsample: int = 1,
    ) -> TensorValue:
        """Adds a convolution with its bias that keeps the size; see ``maxconv.conv2d``.

        A layer of ``[K, C]``, as an attention has them, is a filter of one tap.
        """
        filter = self.array(f"{name}.weight")
        return maxconv.conv2d(
            x,
            filter if filter.ndim == 4 else filter[:, :, np.newaxis, np.newaxis],
            padding=filter.shape[-1] // 2 if filter.ndim == 4 else 0,
            bias=self.array(f"{name}.bias"),
            filter_layout="FCRS",
            residual=residual,
            out_dtype=out_dtype,
            upsample=upsample,
        )

    def array(self, name: str) -> Floats:
        """Returns an array as float32."""
        return np.ascontiguousarray(self.weights[name], dtype=np.float32)


def build_graph(
    weights: Weights,
    *,
    groups: int = 32,
    dtype: DType = DType.float32,
    device: DeviceRef | None = None,
) -> Graph:
    """Returns the network as a graph.

    Args:
        weights: Arrays under diffusers' names, old or new; those of other parts are ignored.
        groups: Of the group normalisations, ``norm_num_groups``.
        dtype: What activations are stored in: float32, bfloat16 or float16.
        device: Where it runs, by default the CPU.

    Returns:
        A graph from one image's latents, ``[1, height, width, latents]`` of float32 with any sizes,
        to its RGB pixels between -1 and 1, ``[1, 8 * height, 8 * width, 3]`` of float32.

    Raises:
        ValueError: An array is missing or has another shape.
    """
    weights = {rename(name): array for name, array in weights.items()}
    config = Config.of(weights)
    check(weights, config, groups)
    device = device or DeviceRef.CPU()
    latents = TensorType(DType.float32, (1, "height", "width", config.latents), device)
    library = maxconv.kernel_library()
    with Graph("vae_decoder", input_types=[latents], kernel_library=library) as graph:
        decoder = Decoder(weights, groups)
        graph.output(decoder.build(graph.inputs[0].tensor.cast(dtype), config))
    return graph


def rename(name: str) -> str:
    """Returns diffusers' present name of an array that may have an old one."""
    layer, _, kind = name.removeprefix(f"{ATTENTION}.").rpartition(".")
    return f"{ATTENTION}.{RENAMED[layer]}.{kind}" if layer in RENAMED else name


def check(weights: Weights, config: Config, groups: int) -> None:
    """Raises ``ValueError`` for an array that is missing or has a shape that cannot be."""
    for name, shape in config.shapes().items():
        if name not in weights:
            raise ValueError(f"weights: {name} is missing; it has the shape {shape}")
        if weights[name].shape != shape:
            raise ValueError(f"weights: {name} has the shape {weights[name].shape}, not {shape}")
    for channels in config.channels:
        if groups < 1 or channels % groups:
            raise ValueError(f"groups: {groups} does not divide the {channels} channels of a block")


def random_weights(config: Config | None = None, seed: int = 0) -> dict[str, Floats]:
    """Returns weights drawn so that the activations keep their magnitude from layer to layer."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in (config or Config()).shapes().items():
        array = rng.standard_normal(shape, np.float32)
        if len(shape) > 1:
            # A SiLU leaves 0.36 of the mean square. The second convolution of a block is weaker:
            # sums of many blocks would otherwise grow from one to the next.
            gain = {"conv1": 2.8, "conv2": 0.7, "conv_out": 0.7}.get(name.split(".")[-2], 1.0)
            array *= np.float32(np.sqrt(gain / np.prod(shape[1:])))
        else:
            array = np.float32(0.1) * array + np.float32("norm" in name and "weight" in name)
        arrays[name] = array
    return arrays


def read_weights(path: Path) -> dict[str, npt.NDArray[Any]]:
    """Returns the arrays of a ``.safetensors`` or ``.npz`` file, those of 16 bits as float32."""
    if path.suffix not in (".safetensors", ".npz"):
        raise ValueError(f"weights: {path} must end in .safetensors or .npz")
    if not path.is_file():
        raise ValueError(f"weights: {path} is not a file")
    if path.suffix == ".npz":
        return dict(np.load(path))
    return {name: to_float32(weight.data()) for name, weight in load_weights([path]).items()}


def to_float32(data: WeightData) -> npt.NDArray[Any]:
    """Returns a weight as float32."""
    if data.dtype != DType.bfloat16:
        return np.from_dlpack(data.astype(DType.float32))
    # The upper half of a float32. numpy has no bfloat16, and MAX would compile a graph that casts.
    halves = data.to_buffer().view(DType.uint16).to_numpy()
    return (halves.astype(np.uint32) << 16).view(np.float32)


def read_latents(path: Path, channels: int) -> Floats:
    """Returns latents from a ``.npy`` file, with the channels last: ``[1, height, width, C]``."""
    latents = np.load(path)
    if latents.ndim == 3:
        latents = latents[np.newaxis]
    if latents.ndim != 4 or latents.shape[:2] != (1, channels):
        allowed = f"({channels}, height, width), with or without a 1 before it, is"
        raise ValueError(f"latents: {path} has the shape {latents.shape}; {allowed} allowed")
    return np.ascontiguousarray(latents.transpose(0, 2, 3, 1), dtype=np.float32)


def to_image(pixels: Floats) -> Image.Image:
    """Returns pixels between -1 and 1, ``[1, height, width, 3]``, as an image."""
    return Image.fromarray(np.rint(np.clip(pixels[0] / 2 + 0.5, 0, 1) * 255).astype(np.uint8))


def read_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Returns the program's arguments; a bad one raises ``ValueError``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--weights", type=Path, help=".safetensors or .npz; random without")
    parser.add_argument("--groups", type=int, default=32, help="norm_num_groups, default 32")
    parser.add_argument("--latents", type=Path, help=".npy, (channels, height, width); else random")
    parser.add_argument("--size", type=int, help="of random latents: 64 on a GPU, 16 on a CPU")
    parser.add_argument("--seed", type=int, default=0, help="of what is random, default 0")
    parser.add_argument("--out", type=Path, default=Path("decoded.png"), help="image to write")
    add_options(parser)
    args = parser.parse_args(words)
    settle_options(args)
    args.size = args.size if args.size is not None else (64 if args.device == "gpu" else 16)
    if args.size < 1:
        raise ValueError(f"size: {args.size} is not allowed; 1 and above are")
    return args


def main() -> None:
    """Decodes latents to an image file and prints the time."""
    try:
        args = read_arguments()
        weights = read_weights(args.weights) if args.weights else random_weights(seed=args.seed)
        channels = Config.of(weights).latents
        if args.latents:
            latents = read_latents(args.latents, channels)
        else:
            shape = (1, args.size, args.size, channels)
            latents = np.random.default_rng(args.seed).standard_normal(shape, np.float32)
            latents /= np.float32(SCALING_FACTOR)
        kind = DType[args.dtype]
        graph = build_graph(weights, groups=args.groups, dtype=kind, device=device_ref(args))
    except ValueError as error:
        sys.exit(f"vae_decoder.py: {error}")
    pixels, milliseconds = run_graph(graph, latents, args)
    image = to_image(pixels)
    image.save(args.out)
    if not args.weights:
        print("the weights are random: the image means nothing")
    how = "replayed" if args.replay else "executed"
    print(f"{args.out}: {image.width}x{image.height} in {milliseconds:.2f} ms, {how}")


if __name__ == "__main__":
    main()
