"""Train the demo's network: a small blind residual denoiser for colour photographs.

The design is DnCNN's (Zhang et al. 2017, "Beyond a Gaussian Denoiser") without batch
normalisation: 3x3 convolutions with bias, ReLU between them, and a last convolution that
predicts the noise, so that ``denoised = noisy - network(noisy)``. Pixels are RGB in [0, 1].

Only photographs that the scikit-image wheel itself ships are used, so nothing is downloaded.
The demo's own (chelsea) is never trained on, nor does it choose the weights: coffee does that.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

Floats = npt.NDArray[np.float32]

WEIGHTS = Path(__file__).parent / "data" / "denoise.npz"
DEMO = "chelsea.png"
VALIDATION = "coffee.png"
# Only pictures whose scikit-image documentation states that they are free to use are listed. A
# patch comes three times as often from a sharp natural scene as from a close-up or a texture.
SCENES = ("astronaut.png", "rocket.jpg", "camera.png")
CLOSE_UPS = ("ihc.png", "coins.png", "brick.png", "grass.png", "gravel.png", "retina.jpg")
SCALES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)
SIGMAS = (5.0, 55.0)
TEST_SIGMAS = (15, 25, 50)
TEST_NOISE_SEED = 0
PATCH, BATCH = 48, 16


def read_photo(name: str, scale: float = 1.0) -> Floats:
    """Return a photograph of the scikit-image wheel, [3, H, W] in [0, 1], scaled down."""
    with (files("skimage") / "data" / name).open("rb") as stream:
        picture = Image.open(stream).convert("RGB")
    size = (round(picture.width * scale), round(picture.height * scale))
    pixels = np.asarray(picture.resize(size, Image.Resampling.BICUBIC), dtype=np.float32) / 255
    return np.ascontiguousarray(pixels.transpose(2, 0, 1), dtype=np.float32)


def build_network(channels: int, layers: int) -> nn.Sequential:
    """Return the network that predicts the noise; module ``2 * i`` is convolution ``i``."""
    widths = [3] + [channels] * (layers - 1) + [3]
    modules: list[nn.Module] = []
    for index in range(layers):
        conv = nn.Conv2d(widths[index], widths[index + 1], 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        modules += [conv, nn.ReLU(inplace=True)]
    return nn.Sequential(*modules[:-1])


def convolutions(network: nn.Module) -> list[nn.Conv2d]:
    """Return the network's convolutions, first to last."""
    return [module for module in network.modules() if isinstance(module, nn.Conv2d)]


class Patches:
    """An endless source of augmented clean patches and their noisy versions."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.pyramids = [[read_photo(name, s) for s in SCALES] for name in SCENES * 3 + CLOSE_UPS]

    def crop(self) -> Floats:
        """Return a random crop of a random photograph at a random scale."""
        pyramid = self.pyramids[self.rng.integers(len(self.pyramids))]
        photo = pyramid[self.rng.integers(len(pyramid))]
        top = self.rng.integers(photo.shape[1] - PATCH + 1)
        left = self.rng.integers(photo.shape[2] - PATCH + 1)
        return photo[:, top : top + PATCH, left : left + PATCH]

    def recolour(self, patch: Floats) -> Floats:
        """Permute the channels; tint half of the grey patches, between two random colours."""
        if np.array_equal(patch[0], patch[1]) and self.rng.random() < 0.5:
            dark, light = np.sort(self.rng.random((2, 3, 1, 1), dtype=np.float32), axis=0)
            return cast("Floats", dark + (light - dark) * patch)
        return patch[self.rng.permutation(3)]

    def turn(self, patch: Floats) -> Floats:
        """Rotate the patch by a multiple of 90 degrees and flip it or not."""
        turned = np.rot90(patch, int(self.rng.integers(4)), axes=(1, 2))
        return turned[:, :, ::-1] if self.rng.random() < 0.5 else turned

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return (noisy patches, their noise), each [BATCH, 3, PATCH, PATCH]."""
        clean = np.stack([self.turn(self.recolour(self.crop())) for _ in range(BATCH)])
        sigma = self.rng.uniform(*SIGMAS, size=(BATCH, 1, 1, 1)) / 255
        noise = self.rng.standard_normal(clean.shape, dtype=np.float32) * sigma.astype(np.float32)
        return channels_last(clean + noise), channels_last(noise)


def channels_last(array: Floats) -> Tensor:
    """Return the array as a tensor in the layout that the CPU convolutions are fastest in."""
    return torch.from_numpy(array).contiguous(memory_format=torch.channels_last)


def add_test_noise(photo: Floats, sigma: float) -> Floats:
    """Return the photograph with reproducible Gaussian noise; the result is not clipped."""
    noise = np.random.default_rng(TEST_NOISE_SEED).standard_normal(photo.shape, dtype=np.float32)
    noisy: Floats = photo + noise * np.float32(sigma / 255)
    return noisy


def psnr(clean: Floats, other: Floats) -> float:
    """Return the peak signal-to-noise ratio in dB, for a peak of 1 and without clipping."""
    return -10 * math.log10(float(np.mean((clean - other) ** 2, dtype=np.float64)))


def measure(network: nn.Sequential, photo: Floats) -> dict[str, float]:
    """Return the PSNR of the denoised photograph at each test sigma."""
    scores = {}
    for sigma in TEST_SIGMAS:
        noisy = add_test_noise(photo, sigma)
        with torch.no_grad():
            noise: Tensor = network(channels_last(noisy[None]))
        scores[str(sigma)] = round(psnr(photo, noisy - noise[0].numpy()), 2)
    return scores


def to_arrays(network: nn.Module) -> dict[str, Any]:
    """Return the weights (KCRS, float16) and biases (float32) under the names of the file."""
    arrays: dict[str, Any] = {}
    for index, conv in enumerate(convolutions(network)):
        arrays[f"conv{index}.weight"] = conv.weight.detach().half().numpy()
        arrays[f"conv{index}.bias"] = cast("Tensor", conv.bias).detach().numpy()
    return arrays


def from_arrays(arrays: Mapping[str, Any]) -> nn.Sequential:
    """Return the network whose weights and biases `to_arrays` returned."""
    layers = sum(name.endswith(".weight") for name in arrays)
    network = build_network(len(arrays["conv0.bias"]), layers)
    with torch.no_grad():
        for index, conv in enumerate(convolutions(network)):
            conv.weight.copy_(torch.from_numpy(arrays[f"conv{index}.weight"]))
            cast("Tensor", conv.bias).copy_(torch.from_numpy(arrays[f"conv{index}.bias"]))
    return network


def save(path: Path, arrays: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Write the arrays and their description; a reader never sees half a file."""
    part = path.with_suffix(".part")
    with part.open("wb") as stream:
        np.savez_compressed(stream, meta=np.array(json.dumps(meta)), **arrays)
    part.replace(path)


def learning_rate(progress: float) -> float:
    """Return the rate at a progress in [0, 1]: a short rise to 1e-3, then half a cosine."""
    return 5e-4 * min(1.0, 0.01 + 100 * progress) * (1 + math.cos(math.pi * progress))


def move_average(mean: Tensor, new: Tensor, count: Tensor | int) -> Tensor:
    """Return the mean moved towards the new weights: at first fast, to forget random ones."""
    return torch.lerp(mean, new, max(0.002, 10 / (10 + int(count))))


def step(network: nn.Sequential, optimizer: torch.optim.Optimizer, patches: Patches) -> None:
    """Take one optimizer step."""
    noisy, noise = patches.batch()
    # bfloat16 products are twice as fast where the CPU has them; master weights stay float32.
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predicted: Tensor = network(noisy)
    loss = nn.functional.l1_loss(predicted.float(), noise)
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def checkpoint(mean: nn.Module, args: argparse.Namespace, iteration: int, best: float) -> float:
    """Measure the weights as a file holds them; save them if they are the best so far."""
    arrays = to_arrays(mean)
    scores, demo = (measure(from_arrays(arrays), read_photo(p)) for p in (VALIDATION, DEMO))
    print(f"{iteration:6d} validation {scores} demo {demo}", flush=True)
    if (score := sum(scores.values()) / len(scores)) > best:
        meta = {"channels": args.channels, "layers": args.layers, "sigma": SIGMAS}
        meta |= {"iterations": iteration, "seed": args.seed, "noise_seed": TEST_NOISE_SEED}
        save(args.output, arrays, meta | {"psnr_validation": scores, "psnr_demo": demo})
    return max(score, best)


def train(args: argparse.Namespace) -> None:
    """Train until either budget is spent, keeping the mean weights of the best checkpoint."""
    network = build_network(args.channels, args.layers)
    mean = AveragedModel(network, avg_fn=move_average)
    optimizer = torch.optim.Adam(network.parameters(), betas=(0.9, 0.99))
    patches = Patches(args.seed)
    best, start, progress, iteration = -math.inf, time.monotonic(), 0.0, 0
    while progress < 1:
        optimizer.param_groups[0]["lr"] = learning_rate(progress)
        step(network, optimizer, patches)
        mean.update_parameters(network)
        iteration += 1
        progress = max(iteration / args.iterations, (time.monotonic() - start) / 60 / args.minutes)
        if iteration % args.every == 0 or progress >= 1:
            best = checkpoint(mean.module, args, iteration, best)


def evaluate(path: Path) -> None:
    """Print the PSNR of the demo's photograph before and after, with the weights of a file."""
    photo = read_photo(DEMO)
    with np.load(path) as arrays:
        after = measure(from_arrays(arrays), photo)
    for sigma in TEST_SIGMAS:
        before = psnr(photo, add_test_noise(photo, sigma))
        print(f"sigma {sigma}: {before:.2f} dB noisy, {after[str(sigma)]:.2f} dB denoised")


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=55, help="time budget")
    parser.add_argument("--iterations", type=int, default=10000, help="optimizer steps at most")
    parser.add_argument("--every", type=int, default=500, help="iterations between evaluations")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--evaluate", type=Path, metavar="NPZ", help="measure a file; no training")
    parser.add_argument("-o", "--output", type=Path, default=WEIGHTS, help="file to write")
    return parser.parse_args()


def main() -> None:
    """Train, or measure weights trained before."""
    args = parse_arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    if args.evaluate is not None:
        evaluate(args.evaluate)
    else:
        train(args)


if __name__ == "__main__":
    main()
