"""What ``maxconv.torch.quantize`` costs: a classifier of digits, and the demo's denoiser."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.interop.quantized import layers, types
from torch import Tensor, nn
from torch.nn import functional

import maxconv.torch as mt
from maxconv.graphs import denoise, train_denoise

U8, F32 = torch.uint8, torch.float32


# A classifier -----------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.b = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.b(torch.relu(self.norm(self.a(x)))) + x)


def trained(images: Tensor, labels: Tensor) -> nn.Module:
    """A network that knows 95 % of them, after two seconds."""
    torch.manual_seed(0)
    net = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU(), Block(12)),
        *(nn.MaxPool2d(2), nn.Conv2d(12, 24, 3, padding=1), nn.ReLU(), Block(24)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
    )
    epochs, batches = 6, len(images) // 50
    count = epochs * batches
    optimizer = torch.optim.AdamW(net.parameters())
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=count)
    for step in range(count):
        if step % batches == 0:
            order = torch.randperm(len(images)).view(batches, -1)
        chosen = order[step % batches]
        optimizer.zero_grad()
        loss: Any = functional.cross_entropy(net(images[chosen]), labels[chosen])
        loss.backward()
        optimizer.step()
        rate.step()
    return net.eval()


def test_digits() -> None:
    """Half a point of accuracy, at most, by every method."""
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32)).unsqueeze(1) / 16
    labels = torch.from_numpy(digits.target)
    net = trained(images[:1000], labels[:1000])

    @torch.no_grad()
    def accuracy(model: nn.Module) -> float:
        right = model(images[1000:]).argmax(1) == labels[1000:]
        return 100 * float(right.double().mean())

    whole = accuracy(net)
    assert whole > 90
    found: dict[str, tuple[torch.dtype, ...]] = {}
    for options in (
        {},
        {"method": "minmax"},
        {"method": "percentile"},
        {"activations": "per_channel"},
        {"dtype": torch.int8, "symmetric": True},
    ):
        result, report = mt.quantize(net, [images[:200]], **options)
        assert accuracy(result) >= whole - 0.5, f"{options}\n{report}"
        assert len(layers(result)) == 7
        found = found or types(result, images[:2])
    # Integers from the first convolution to the last, residuals too.
    assert list(found.values()) == [
        *[(U8, U8)] * 2,
        (U8, U8, U8),
        *[(U8, U8)] * 2,
        (U8, F32, F32),
        (U8, F32),
    ]


# The demo's denoiser ------------------------------------------------------------------------------


class Denoiser(nn.Module):
    def __init__(self, noise: nn.Module) -> None:
        super().__init__()
        self.noise = noise

    def forward(self, x: Tensor) -> Tensor:
        return x - self.noise(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("activations", ["per_tensor", "per_channel"])
@pytest.mark.parametrize("noise", [(25,), (5, 15, 25, 50)])
def test_the_denoiser(noise: tuple[int, ...], activations: str) -> None:
    """A tenth of a dB, at most, on the demo's photograph; another one chooses the scales.

    Also where it has noise of several levels: ranges are as wide as the largest needs.
    """
    with np.load(denoise.WEIGHTS) as arrays:
        net = Denoiser(train_denoise.from_arrays(arrays)).eval()

    def noisy(photo: Any, level: int, seed: int) -> Tensor:
        image = denoise.add_noise(photo, level, seed).transpose(2, 0, 1)
        return train_denoise.channels_last(np.ascontiguousarray(image[None]))

    other = train_denoise.read_photo("coffee.png", 0.5).transpose(1, 2, 0)[:96, :96]
    batches = [noisy(other, level, seed) for seed, level in enumerate(noise, 1)]
    result, report = mt.quantize(net, batches, activations=activations)
    assert [layer.became for layer in report.layers] == [
        *["uint8 -> uint8"] * 7,
        "uint8 -> float32",
    ]
    with Image.open(denoise.PHOTO) as picture:
        photo = np.asarray(picture.convert("RGB"), np.float32) / np.float32(255)

    @torch.no_grad()
    def psnr(model: nn.Module) -> float:
        restored = model(noisy(photo, 25, 0))[0].permute(1, 2, 0).numpy()
        return float(denoise.psnr(photo, restored))

    whole = psnr(net)
    assert whole > 31
    assert psnr(result) >= whole - 0.1, str(report)
