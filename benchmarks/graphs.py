"""Times the networks of ``graphs/`` beside PyTorch's, in one process and in turns, as a table.

PyTorch runs the same weights eagerly and compiled: on a CPU with frozen weights, on a GPU in mode
``reduce-overhead``. What each way computes is compared with PyTorch's float32.

    python benchmarks/graphs.py resnet50 --device cpu
    python benchmarks/graphs.py resnet50 --device gpu --batch 64
    python benchmarks/graphs.py vae_decoder --device gpu --size 128
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import Graph
from torch import Tensor, nn

from maxconv.bench.device import DEVICES
from maxconv.bench.entrant import time_calls
from maxconv.bench.resnet import resnet50 as torch_resnet50
from maxconv.bench.timing import interleave
from maxconv.graphs import resnet50, vae_decoder
from maxconv.graphs.common import DTYPES, device_ref, make_run, settle_options

# MAX would take nearly all of a GPU's memory, of which PyTorch needs some.
os.environ.setdefault("MODULAR_DEVICE_CONTEXT_MEMORY_MANAGER_SIZE_PERCENT", "50")

Floats: TypeAlias = npt.NDArray[np.float32]
Run: TypeAlias = Callable[[], Any]
Weights: TypeAlias = Mapping[str, Floats]


@dataclass(frozen=True)
class Network:
    """A network, as a graph and as PyTorch's module, and its input."""

    images: Floats
    """``[N, H, W, C]``."""
    weights: Weights
    graph: Callable[..., Graph]
    module: Callable[[Weights], nn.Module]
    """Returns PyTorch's, with these weights, float32 on the CPU."""


def read_resnet50(weights: Weights) -> nn.Module:
    """Returns ResNet-50, without names that PyTorch does not need."""
    model = torch_resnet50()
    model.load_state_dict({name: torch.from_numpy(a) for name, a in weights.items()}, strict=False)
    return model


class Decoder(nn.Module):
    """The part of diffusers' ``AutoencoderKL`` that decodes."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        from diffusers import AutoencoderKL

        # Stable Diffusion 1.5's, as vae_decoder.Config has it by default.
        config = vae_decoder.Config()
        channels = config.channels[::-1]
        model = AutoencoderKL(
            in_channels=3,
            out_channels=3,
            down_block_types=("DownEncoderBlock2D",) * len(channels),
            up_block_types=("UpDecoderBlock2D",) * len(channels),
            block_out_channels=channels,
            layers_per_block=config.layers - 1,
            latent_channels=config.latents,
        )
        self.post_quant_conv, self.decoder = model.post_quant_conv, model.decoder
        self.load_state_dict({name: torch.from_numpy(array) for name, array in weights.items()})

    def forward(self, latents: Tensor) -> Tensor:
        """Decodes latents, ``[N, C, H, W]``."""
        image: Tensor = self.decoder(self.post_quant_conv(latents))
        return image


def network(args: argparse.Namespace) -> Network:
    """Returns the network that the arguments name."""
    rng = np.random.default_rng(0)
    if args.network == "resnet50":
        shape = (args.batch, resnet50.SIZE, resnet50.SIZE, 3)
        weights = resnet50.random_weights()
        images = rng.standard_normal(shape, np.float32)
        return Network(images, weights, resnet50.build_graph, read_resnet50)
    latents = rng.standard_normal((1, args.size, args.size, 4), np.float32)
    latents /= np.float32(vae_decoder.SCALING_FACTOR)
    return Network(latents, vae_decoder.random_weights(), vae_decoder.build_graph, Decoder)


def graph_ways(network: Network, args: argparse.Namespace) -> dict[str, Run]:
    """Returns functions that run the graph, by the name of the way."""
    device: Device = Accelerator() if args.device == "gpu" else CPU()
    graph = network.graph(network.weights, dtype=DType[args.dtype], device=device_ref(args))
    begin = time.perf_counter()
    model = InferenceSession(devices=[device]).load(graph)
    print(f"compiled by MAX in {time.perf_counter() - begin:.1f} s", flush=True)
    x = Buffer.from_numpy(network.images).to(device)
    ways: dict[str, Run] = {"maxconv, executed": make_run(model, x, device, replay=False)}
    if args.device == "gpu":
        ways["maxconv, replayed"] = make_run(model, x, device, replay=True)
    return ways


def torch_ways(network: Network, args: argparse.Namespace) -> dict[str, Run]:
    """Returns functions that run PyTorch's network, by the name of the way."""
    on_gpu = args.device == "gpu"
    dtype = getattr(torch, args.dtype)
    model = network.module(network.weights).eval()
    model = model.to(torch_device(args), dtype, memory_format=torch.channels_last)
    x = torch_images(network, args).to(dtype)
    torch._inductor.config.freezing = True
    mode = "reduce-overhead" if on_gpu else "default"
    compiled = torch.compile(model, mode=mode)

    def run(network: Callable[[Tensor], Tensor]) -> Run:
        def once() -> Tensor:
            with torch.inference_mode():
                result = network(x)
                if on_gpu:
                    torch.cuda.synchronize()
                return result

        return once

    return {"torch, eager": run(model), f"torch.compile, {mode}": run(compiled)}


def torch_device(args: argparse.Namespace) -> torch.device:
    """Returns PyTorch's name of the device."""
    return torch.device("cuda" if args.device == "gpu" else "cpu")


def torch_images(network: Network, args: argparse.Namespace) -> Tensor:
    """Returns the input as PyTorch has it: channels last, as a view."""
    return torch.from_numpy(network.images).permute(0, 3, 1, 2).to(torch_device(args))


def exact(network: Network, args: argparse.Namespace) -> Floats:
    """Returns what PyTorch computes in float32."""
    model = network.module(network.weights).eval().to(torch_device(args))
    with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
        return floats(model(torch_images(network, args)))


def floats(result: Tensor | Buffer) -> Floats:
    """Returns a result, an image's with its channels last."""
    if isinstance(result, Buffer):
        return np.array(result.to(CPU()).to_numpy(), np.float32)
    order = (0, 2, 3, 1) if result.ndim == 4 else (0, 1)
    return np.array(result.permute(*order).float().cpu().numpy())


def distance(result: Floats, expected: Floats) -> float:
    """Returns the length of the difference in parts of that of ``expected``."""
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(result - wide) / np.linalg.norm(wide))


def read_arguments() -> argparse.Namespace:
    """Returns the program's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("network", choices=("resnet50", "vae_decoder"))
    parser.add_argument("--device", choices=("cpu", "gpu"), help="a GPU if there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument("--batch", type=int, default=1, help="images of resnet50")
    parser.add_argument("--size", type=int, default=64, help="of vae_decoder's latents")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing for each way")
    parser.set_defaults(replay=False)
    args = parser.parse_args()
    settle_options(args)
    return args


def main() -> None:
    """Times all ways and prints the table."""
    args = read_arguments()
    timed = network(args)
    ways = {**graph_ways(timed, args), **torch_ways(timed, args)}
    expected = exact(timed, args)
    distances = {}
    for name, run in ways.items():
        for _ in range(3):
            result = run()
        distances[name] = distance(floats(result), expected)
    protocol = replace(DEVICES[args.device].models, budget_s=args.seconds, rounds=10)
    timings = interleave({name: partial(time_calls, run) for name, run in ways.items()}, protocol)
    best = min(t.median_s for name, t in timings.items() if name.startswith("torch"))
    print(f"{args.network}, {args.device}, {args.dtype}, input {timed.images.shape}")
    print("| way | ms | p10 | p90 | torch's best / it | distance from float32 |")
    print("|---|--:|--:|--:|--:|--:|")
    for name, found in timings.items():
        low, high = 1e3 * (found.p10_s or 0), 1e3 * (found.p90_s or 0)
        cells = f"{1e3 * found.median_s:.2f} | {low:.2f} | {high:.2f}"
        print(f"| {name} | {cells} | {best / found.median_s:.2f}x | {distances[name]:.1e} |")


if __name__ == "__main__":
    main()
