"""ResNet-50 (He et al. 2016, https://arxiv.org/abs/1512.03385) in plain PyTorch.

The stride of a downsampling block is in its 3x3 convolution, as in "v1.5". Names of modules are the
usual ones, so a state dict of other implementations fits.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out = width * self.expansion
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the block's output for ``[N, C, H, W]``."""
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return cast(Tensor, self.relu(out))


class ResNet(nn.Module):
    """A stem, four stages of bottlenecks, a classifier."""

    def __init__(self, blocks: tuple[int, int, int, int], classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.channels = 64
        self.layer1 = self._stage(64, blocks[0], 1)
        self.layer2 = self._stage(128, blocks[1], 2)
        self.layer3 = self._stage(256, blocks[2], 2)
        self.layer4 = self._stage(512, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(self.channels, classes)

    def _stage(self, width: int, count: int, stride: int) -> nn.Sequential:
        stage = nn.Sequential()
        for index in range(count):
            stage.append(Bottleneck(self.channels, width, stride if index == 0 else 1))
            self.channels = width * Bottleneck.expansion
        return stage

    def forward(self, x: Tensor) -> Tensor:
        """Returns ``[N, classes]`` for images ``[N, 3, H, W]``."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return cast(Tensor, self.fc(torch.flatten(self.avgpool(x), 1)))


def randomize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draws normalizations such as training leaves, so that folding them is no identity.

    Activations keep their magnitude through the whole network: errors do not hide.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                if module.affine:
                    module.weight.uniform_(0.5, 1.5, generator=generator)
                    module.bias.uniform_(-0.5, 0.5, generator=generator)
                if module.running_mean is not None and module.running_var is not None:
                    module.running_mean.uniform_(-0.2, 0.2, generator=generator)
                    module.running_var.uniform_(0.5, 1.5, generator=generator)
            elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
                fan = module.weight[0].numel()
                module.weight.normal_(0.0, (2.0 / fan) ** 0.5, generator=generator)
            elif isinstance(module, nn.Linear):
                module.weight.normal_(0.0, module.in_features**-0.5, generator=generator)
    return model


def resnet50(seed: int = 0) -> nn.Module:
    """Returns a ResNet-50 in eval mode with random weights and statistics."""
    return randomize(ResNet((3, 4, 6, 3), 1000), seed).eval()
