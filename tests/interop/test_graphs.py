"""The networks of ``graphs/``: against float64, against MAX's own convolution, and as programs."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from max.driver import Buffer
from max.engine import InferenceSession, Model
from max.graph import ops
from PIL import Image
from tests.documents import ROOT
from tests.reference import conv_reference

from maxconv import _cli as cli
from maxconv import _demo as demo
from maxconv.graphs import denoise, resnet50

Floats = npt.NDArray[np.float32]

# Pixels are about 1. Rounding the sums of a layer's 576 products costs about sqrt(576) halves of
# float32's last bit, 1.4e-6; eight layers in a row stay below this.
DENOISED_TOLERANCE = 5e-6
# Relative to the largest score, for 53 layers of up to 4608 products.
SCORE_TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def layers() -> list[denoise.Layer]:
    return denoise.load_weights()


@pytest.fixture(scope="module")
def ours(session: InferenceSession, layers: list[denoise.Layer]) -> Model:
    return session.load(denoise.build_graph(layers))


@pytest.fixture(scope="module")
def theirs(session: InferenceSession, layers: list[denoise.Layer]) -> Model:
    return session.load(denoise.build_graph(layers, ops.conv2d))


@pytest.fixture(scope="module")
def photo() -> Floats:
    return demo._read(denoise.PHOTO)


@pytest.fixture(scope="module")
def noisy(photo: Floats) -> Floats:
    """Two noisy details of different content, ``[2, 37, 52, 3]``."""
    details = [photo[100:137, 130:182], photo[220:257, 230:282]]
    return np.stack([denoise.add_noise(detail, 25, seed) for seed, detail in enumerate(details)])


def execute(model: Model, images: Floats) -> Floats:
    (output,) = model.execute(Buffer.from_numpy(images))
    assert isinstance(output, Buffer)
    result: Floats = output.to_numpy()
    return result


def relu(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    return np.maximum(values, 0)


def denoise_reference(layers: Sequence[denoise.Layer], noisy: Floats) -> npt.NDArray[np.float64]:
    features = noisy.astype(np.float64)
    for index, (filter, bias) in enumerate(layers):
        features = conv_reference(
            features,
            filter.transpose(3, 0, 1, 2),
            stride=(1, 1),
            dilation=(1, 1),
            pad_before=(1, 1),
            pad_after=(1, 1),
            bias=bias,
            activation=None if index == len(layers) - 1 else relu,
        )
    return noisy - features


def test_denoise_equals_float64(ours: Model, layers: list[denoise.Layer], noisy: Floats) -> None:
    expected = denoise_reference(layers, noisy)
    # The network does something, or any error in it would be small.
    assert np.abs(expected - noisy).max() > 0.1
    np.testing.assert_allclose(execute(ours, noisy), expected, rtol=0, atol=DENOISED_TOLERANCE)


@pytest.mark.extended
def test_denoise_equals_the_same_network_of_maxs_own(
    ours: Model, theirs: Model, noisy: Floats
) -> None:
    # Each may be so far from the truth.
    tolerance = 2 * DENOISED_TOLERANCE
    np.testing.assert_allclose(execute(ours, noisy), execute(theirs, noisy), rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (1, 1, 1, 3), (3, 5, 2, 3), (1, 2, 130, 3)])
def test_one_compiled_network_takes_every_size(
    ours: Model, layers: list[denoise.Layer], shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    images = rng.random(shape, np.float32)
    expected = denoise_reference(layers, images)
    result = execute(ours, images)
    assert result.shape == shape
    np.testing.assert_allclose(result, expected, rtol=0, atol=DENOISED_TOLERANCE)


def test_tiles_give_what_one_piece_does(
    ours: Model, layers: list[denoise.Layer], photo: Floats, monkeypatch: pytest.MonkeyPatch
) -> None:
    noisy = denoise.add_noise(photo[50:140, 100:170], 25)
    whole = denoise.denoise(ours, noisy)
    # Tiles at a corner, at an edge, inside, and of the rest; some narrower than their margin.
    monkeypatch.setattr(demo, "_TILE", 22)
    tiled = demo._denoise(ours, noisy, reach=len(layers))
    np.testing.assert_allclose(tiled, whole, rtol=0, atol=2 * DENOISED_TOLERANCE)
    # One pixel less is not enough: the margin is what the network looks at.
    less = demo._denoise(ours, noisy, reach=len(layers) - 1)
    assert np.abs(less - whole).max() > 2 * DENOISED_TOLERANCE


def test_the_noise_is_that_of_the_training(photo: Floats) -> None:
    generator = np.random.default_rng(0)
    drawn = generator.standard_normal((3, *photo.shape[:2]), dtype=np.float32)
    expected = photo.transpose(2, 0, 1) + drawn * np.float32(25 / 255)
    np.testing.assert_array_equal(denoise.add_noise(photo, 25).transpose(2, 0, 1), expected)


def test_psnr() -> None:
    black = np.zeros((4, 5, 3), np.float32)
    assert denoise.psnr(black, black + np.float32(0.1)) == pytest.approx(20)
    assert denoise.psnr(black, black + 1) == pytest.approx(0)


@pytest.mark.extended
@pytest.mark.usefixtures("ours", "theirs")
def test_the_demo_cleans_its_photograph(
    tmp_path: Path,
    photo: Floats,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "_ROUNDS", 1)
    output = tmp_path / "cat.png"
    assert cli.main(["demo", "--json", "-o", str(output)]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert "compiling with maxconv's convolution" in captured.err
    with np.load(denoise.WEIGHTS) as file:
        recorded = json.loads(str(file["meta"]))["psnr_demo"]["25"]
    assert report["psnr_denoised"] == pytest.approx(recorded, abs=0.01)
    assert report["psnr_denoised"] - report["psnr_noisy"] > 11
    assert 0 <= report["largest_difference"] <= 2 * DENOISED_TOLERANCE
    assert (report["sigma"], report["seed"], report["output"]) == (25, 0, str(output))
    assert report["maxconv_ms"] > 0
    assert report["speedup"] == pytest.approx(report["max_ms"] / report["maxconv_ms"])

    # From the picture, the three panels: 8 bits, so clipped and rounded.
    height, width = photo.shape[:2]
    assert (report["height"], report["width"]) == (height, width)
    drawn = (np.asarray(Image.open(output)) / 255).astype(np.float32)
    panels = drawn[drawn.shape[0] - height :]
    line = (panels.shape[1] - 3 * width) // 2
    assert line > 0
    original, noisy, denoised = (
        panels[:, left : left + width] for left in range(0, panels.shape[1], width + line)
    )
    np.testing.assert_allclose(original, photo, atol=1e-6)
    assert denoise.psnr(photo, noisy) == pytest.approx(report["psnr_noisy"], abs=1)
    assert denoise.psnr(photo, denoised) == pytest.approx(report["psnr_denoised"], abs=0.1)


@pytest.mark.extended
@pytest.mark.usefixtures("ours", "theirs")
def test_the_demo_takes_a_small_grey_photograph(
    tmp_path: Path,
    photo: Floats,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "_ROUNDS", 1)
    path, output = tmp_path / "grey.png", tmp_path / "clean.jpg"
    Image.open(denoise.PHOTO).convert("L").crop((100, 80, 180, 130)).save(path)
    arguments = [str(path), "--sigma", "40", "--seed", "3", "-o", str(output)]
    assert cli.main(["demo", *arguments]) == 0
    rows = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    values = {row[0]: row[1] for row in rows}
    assert values["photo"] == f"{path}, 80x50"
    assert values["noise"] == "sigma 40, seed 3"
    gain = float(values["after"].removesuffix(" dB").split(", ")[1])
    assert gain > 6
    assert Image.open(output).height > 50


@pytest.fixture(scope="module")
def classifier(session: InferenceSession) -> Model:
    return session.load(resnet50.build_graph(resnet50.random_weights()))


@pytest.mark.extended
@pytest.mark.torch
@pytest.mark.parametrize("shape", [(2, 64, 80, 3), (1, 97, 33, 3), (0, 64, 64, 3)])
def test_resnet50_equals_torch(
    classifier: Model, shape: tuple[int, ...], rng: np.random.Generator
) -> None:
    import torch

    from maxconv.bench.resnet import resnet50 as torch_resnet50

    weights = {name: torch.from_numpy(a) for name, a in resnet50.random_weights().items()}
    model = torch_resnet50()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.endswith("num_batches_tracked") for name in missing)
    images = rng.standard_normal(shape, np.float32)
    with torch.no_grad():
        expected = model.double()(torch.from_numpy(images).double().permute(0, 3, 1, 2)).numpy()
    scores = execute(classifier, images)
    assert scores.shape == (shape[0], 1000)
    largest = np.abs(expected).max(initial=0)
    # Scores of a useful size: a network that fades to its last bias would hide errors.
    assert shape[0] == 0 or 0.5 < largest < 50
    np.testing.assert_allclose(scores, expected, rtol=0, atol=SCORE_TOLERANCE * largest)


def test_resnet50_has_the_layers_of_the_paper() -> None:
    shapes = resnet50.shapes()
    convolutions = [shape for shape in shapes.values() if len(shape) == 4]
    assert len(convolutions) == 53
    # As counted for the published network: 25 557 032 that are trained, and the statistics.
    counted = {"running": 0, "trained": 0}
    for name, shape in shapes.items():
        counted["running" if "running" in name else "trained"] += math.prod(shape)
    assert counted == {"running": 53120, "trained": 25557032}


def test_resnet50_names_a_bad_weight() -> None:
    weights = resnet50.random_weights()
    del weights["layer3.5.bn2.running_var"]
    with pytest.raises(ValueError, match=r"weights: layer3.5.bn2.running_var is missing"):
        resnet50.build_graph(weights)
    weights["layer3.5.bn2.running_var"] = np.ones(255, np.float32)
    message = r"layer3.5.bn2.running_var has the shape \(255,\), not \(256,\)"
    with pytest.raises(ValueError, match=message):
        resnet50.build_graph(weights)


def test_random_weights_follow_their_seed() -> None:
    one, same, other = (resnet50.random_weights(seed) for seed in (1, 1, 2))
    assert all(np.array_equal(one[name], same[name]) for name in one)
    assert not any(np.array_equal(one[name], other[name]) for name in one)


def script(name: str, *arguments: str) -> list[str]:
    """Runs a file of ``graphs/`` as a program and returns the lines that it prints."""
    command = [sys.executable, str(ROOT / "graphs" / name), *arguments]
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.splitlines()


@pytest.mark.usefixtures("ours")
def test_denoise_runs_by_itself() -> None:
    _, quality, size = script("denoise.py")
    assert quality.startswith("20.18 dB noisy, 31.")
    assert size.startswith("451x300 pixels in ")


@pytest.mark.extended
@pytest.mark.usefixtures("classifier")
def test_resnet50_runs_by_itself(tmp_path: Path) -> None:
    lines = script("resnet50.py")
    assert lines[1] == "the weights are random: the classes mean nothing"
    assert [line.startswith("class ") for line in lines[2:]] == [True] * 5 + [False]
    assert lines[-1].startswith("one image of 224x224 in ")
    # The same weights from a file, and the photograph by name.
    weights = tmp_path / "weights.npz"
    arrays: dict[str, Any] = {**resnet50.random_weights()}
    np.savez(weights, **arrays)
    again = script("resnet50.py", str(resnet50.PHOTO), "--weights", str(weights))
    assert again[1:6] == lines[2:7]
