"""A model's convolutions, to tune each once."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from maxconv import _cli as cli
from maxconv._problems import parse_problem
from maxconv.bench.models import catalogue
from maxconv.bench.models.traced import Shape, trace
from maxconv.tuner.asked import asked_of
from maxconv.tuner.models import layers_of, layers_traced


class Small(nn.Module):
    """Two layers of one shape, one of another, a transposed one, and one of these with groups."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=(1, 2))
        self.blocks = nn.Sequential(*(nn.Conv2d(16, 16, 3, padding=1, groups=4) for _ in range(2)))
        self.up = nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=(1, 0))
        self.grouped = nn.ConvTranspose2d(8, 8, 2, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.grouped(self.up(self.blocks(self.stem(x))))
        return out


def test_a_model_is_traced_without_data() -> None:
    noted = trace(Small().to("meta"), [torch.zeros(2, 3, 16, 20, device="meta")])
    stem = Shape(2, (16, 20, 3), 16, (3, 3), (2, 2), (1, 1), (1, 2), 1)
    block = Shape(2, (8, 11, 16), 16, (3, 3), (1, 1), (1, 1), (1, 1), 4)
    up = Shape(2, (8, 11, 16), 8, (3, 3), (2, 2), (1, 1), (1, 1), 1, True, (1, 0))
    grouped = Shape(2, (16, 21, 8), 8, (2, 2), (1, 1), (1, 1), (0, 0), 2, True, (0, 0))
    assert dict(noted.counts) == {stem: 1, block: 2, up: 1, grouped: 1}
    assert noted.names[block] == "blocks.0"
    assert {noted.names[stem], noted.names[up]} == {"stem", "up"}


def test_layers_are_problems_with_counts_the_longest_first() -> None:
    noted = trace(Small().to("meta"), [torch.zeros(2, 3, 16, 20, device="meta")])
    layers = layers_traced("small", noted)
    named = {layer.name: layer for layer in layers}
    stem = parse_problem("2x16x20x3:16x3x3", stride=2, padding=(1, 1, 2, 2))
    assert named["small.stem"].problem == stem
    block = named["small.blocks.0"]
    assert block.count == 2
    assert block.problem == parse_problem("2x8x11x16:16x3x3", padding=1, groups=4)
    # Its phases differ in their taps: 1, 2, 2 and 4 of 9.
    parts = [named[f"small.up.{number}"].problem for number in range(4)]
    assert [part.taps if part else 0 for part in parts] == [1, 2, 2, 4]
    assert named["small.grouped"].problem is None
    assert named["small.grouped"].reason == "a transposed convolution of 2 groups"
    work = [layer.count * layer.problem.flops for layer in layers if layer.problem]
    assert work == sorted(work, reverse=True)


def test_a_model_of_the_catalogue(capsys: pytest.CaptureFixture[str]) -> None:
    args = cli.build_parser(["tune"]).parse_args(
        ["tune", "--model", "maxconv:unet", "--batch", "2"]
    )
    found = asked_of(args)
    model = catalogue.build(catalogue.load_catalogue().models["unet"])
    kinds = (nn.Conv2d, nn.ConvTranspose2d)
    modules = [module for module in model.modules() if isinstance(module, kinds)]
    assert sum(each.count for each in found) >= len(modules)
    assert all(each.optional and each.problem.batch == 2 for each in found)
    assert len({tuple(each.problem.numbers()) for each in found}) == len(found)
    assert not capsys.readouterr().err


def test_a_model_that_does_not_run_without_data(monkeypatch: pytest.MonkeyPatch) -> None:
    class Looks(Small):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float(x.sum())

    source = catalogue.Source("looks", "maxconv:x", ((3, 16, 20),), {}, {})
    listed = catalogue.Catalogue({"looks": source}, {}, {"maxconv:x": "maxconv"})
    monkeypatch.setattr(catalogue, "load_catalogue", lambda: listed)
    monkeypatch.setattr(catalogue, "check_installed", lambda sources: None)
    monkeypatch.setattr(catalogue, "build", lambda source: Looks())
    names = [layer.name for layer in layers_of("maxconv:x:looks", 1)]
    assert "looks.stem" in names


def _without(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def find_spec(name: str, *others: Any) -> Any:
        return None if name == missing else find(name, *others)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


@pytest.mark.parametrize(
    ("missing", "model", "message"),
    [
        (
            "torchvision",
            "torchvision:resnet50",
            "models: resnet50: torchvision is not installed; pip install torchvision, or pip "
            "install 'maxconv[models]' for all",
        ),
        (
            "torch",
            "torchvision:resnet50",
            "--model: torchvision:resnet50 needs PyTorch, which is not installed; pip install",
        ),
        (
            "nothing",
            "torchvision:resnet51",
            "--model: 'torchvision:resnet51' is no model that is known; near it: torchvision:res",
        ),
        ("nothing", "resnet50", "--model: 'resnet50' is no model that is known; near it: "),
    ],
)
def test_models_that_cannot_be_had(
    missing: str,
    model: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    _without(missing, monkeypatch)
    assert cli.main(["tune", "--model", model, "--budget", "1"]) == 1
    assert message in capsys.readouterr().err


def test_a_batch_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", "--model", "maxconv:unet", "--batch", "0"]) == 1
    assert "--batch: 0 is not positive; at least 1 is needed" in capsys.readouterr().err
