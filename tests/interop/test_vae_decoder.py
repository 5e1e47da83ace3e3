"""``graphs/vae_decoder.py``: against float64, its checkpoints, what it says of bad arguments."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pytest
from max.driver import CPU, Buffer, accelerator_count
from PIL import Image
from tests.documents import ROOT

from maxconv.graphs import common
from maxconv.graphs import vae_decoder as vae

if TYPE_CHECKING:
    from max.engine import InferenceSession, Model

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]

#: ``block_out_channels`` 8 and 16, ``layers_per_block`` 1: all kinds of blocks.
TINY = vae.Config(channels=(16, 8), layers=2)
GROUPS = 4

# Relative to the largest pixel. A layer sums at most 144 products; rounding them costs about
# sqrt(144) halves of float32's last bit, 7e-7 of the sum. Twenty layers in a row, independently:
# 3e-6 as a deviation, and the largest of some hundred pixels is three times as far.
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def weights() -> dict[str, Floats]:
    return vae.random_weights(TINY)


@pytest.fixture(scope="module")
def model(session: InferenceSession, weights: dict[str, Floats]) -> Model:
    return session.load(vae.build_graph(weights, groups=GROUPS))


def reference(
    weights: Mapping[str, Floats], latents: Floats, *, groups: int = GROUPS, skip: bool = True
) -> Doubles:
    """The decoder in float64, of PyTorch's functions.

    Args:
        skip: Whether the attention's input is added to its result, as it must be.
    """
    import torch
    from torch.nn import functional

    arrays = {name: torch.from_numpy(array).double() for name, array in weights.items()}

    def conv(x: torch.Tensor, name: str) -> torch.Tensor:
        filter = arrays[f"{name}.weight"]
        return functional.conv2d(x, filter, arrays[f"{name}.bias"], padding=filter.shape[-1] // 2)

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        scale, shift = (arrays[f"{name}.{part}"] for part in ("weight", "bias"))
        return functional.group_norm(x, groups, scale, shift, eps=1e-6)

    def resnet(x: torch.Tensor, name: str) -> torch.Tensor:
        y = conv(functional.silu(norm(x, f"{name}.norm1")), f"{name}.conv1")
        y = conv(functional.silu(norm(y, f"{name}.norm2")), f"{name}.conv2")
        if f"{name}.conv_shortcut.weight" in arrays:
            x = conv(x, f"{name}.conv_shortcut")
        return x + y

    def attention(x: torch.Tensor, name: str) -> torch.Tensor:
        def linear(tokens: torch.Tensor, layer: str) -> torch.Tensor:
            weight, bias = (arrays[f"{name}.{layer}.{part}"] for part in ("weight", "bias"))
            return functional.linear(tokens, weight, bias)

        tokens = norm(x, f"{name}.group_norm").flatten(2).transpose(1, 2)
        query, key, value = (linear(tokens, layer) for layer in ("to_q", "to_k", "to_v"))
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        attended = linear(scores.softmax(dim=-1) @ value, "to_out.0")
        attended = attended.transpose(1, 2).reshape(x.shape)
        return x + attended if skip else attended

    x = torch.from_numpy(latents).double().permute(0, 3, 1, 2)
    x = conv(conv(x, "post_quant_conv"), "decoder.conv_in")
    x = resnet(x, "decoder.mid_block.resnets.0")
    x = attention(x, "decoder.mid_block.attentions.0")
    x = resnet(x, "decoder.mid_block.resnets.1")
    x = resnet(resnet(x, "decoder.up_blocks.0.resnets.0"), "decoder.up_blocks.0.resnets.1")
    x = x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)
    x = conv(x, "decoder.up_blocks.0.upsamplers.0.conv")
    x = resnet(resnet(x, "decoder.up_blocks.1.resnets.0"), "decoder.up_blocks.1.resnets.1")
    x = conv(functional.silu(norm(x, "decoder.conv_norm_out")), "decoder.conv_out")
    pixels: Doubles = x.permute(0, 2, 3, 1).numpy()
    return pixels


def decode(model: Model, latents: Floats) -> Floats:
    pixels: Floats = common.make_run(model, Buffer.from_numpy(latents), CPU(), False)().to_numpy()
    return pixels


@pytest.mark.extended
@pytest.mark.torch
@pytest.mark.parametrize(("height", "width"), [(6, 5), (3, 8), (1, 1)])
def test_the_decoder_equals_float64(
    model: Model, weights: dict[str, Floats], height: int, width: int, rng: np.random.Generator
) -> None:
    latents = rng.standard_normal((1, height, width, TINY.latents), np.float32)
    expected = reference(weights, latents)
    pixels = decode(model, latents)
    assert pixels.shape == (1, 2 * height, 2 * width, 3)
    largest = np.abs(expected).max()
    assert 0.5 < largest < 5
    np.testing.assert_allclose(pixels, expected, rtol=0, atol=TOLERANCE * largest)


@pytest.mark.extended
@pytest.mark.torch
def test_the_tolerance_is_far_below_what_a_mistake_costs(
    weights: dict[str, Floats], rng: np.random.Generator
) -> None:
    latents = rng.standard_normal((1, 6, 5, TINY.latents), np.float32)
    right = reference(weights, latents)
    values, filter = f"{vae.ATTENTION}.to_v.bias", "decoder.up_blocks.1.resnets.0.conv_shortcut"
    wrong = {
        "no sum with the attention's input": reference(weights, latents, skip=False),
        "other groups": reference(weights, latents, groups=2),
        "no bias of the values": reference({**weights, values: 0 * weights[values]}, latents),
        "no bias of the shortcut": reference(
            {**weights, f"{filter}.bias": 0 * weights[f"{filter}.bias"]}, latents
        ),
        "rows for columns": reference(weights, latents.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3),
    }
    for mistake, pixels in wrong.items():
        assert np.abs(pixels - right).max() > 300 * TOLERANCE * np.abs(right).max(), mistake


def write_safetensors(path: Path, arrays: Mapping[str, npt.NDArray[Any]], kind: str) -> None:
    """Writes float32 arrays as ``F32``, ``F16`` or, cut off, ``BF16``."""
    header, data = {}, b""
    for name, array in arrays.items():
        stored = array.astype(np.float16 if kind == "F16" else np.float32)
        if kind == "BF16":
            stored = (stored.view(np.uint32) >> 16).astype(np.uint16)
        place = [len(data), len(data) + stored.nbytes]
        header[name] = {"dtype": kind, "shape": list(array.shape), "data_offsets": place}
        data += stored.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def with_old_names(weights: Mapping[str, Floats]) -> dict[str, Floats]:
    """The weights under the names of checkpoints before diffusers 0.13."""
    old = {
        "to_q": "query",
        "to_k": "key",
        "to_v": "value",
        "to_out.0": "proj_attn",
    }
    renamed = {}
    for name, array in weights.items():
        before, _, kind = name.rpartition(".")
        for new in old:
            if before == f"decoder.mid_block.attentions.0.{new}":
                name = f"decoder.mid_block.attentions.0.{old[new]}.{kind}"
        renamed[name] = array
    return renamed


@pytest.mark.parametrize(("kind", "bits"), [("F32", 24), ("F16", 11), ("BF16", 8)])
def test_a_checkpoint_is_read(
    tmp_path: Path, weights: dict[str, Floats], kind: str, bits: int
) -> None:
    path = tmp_path / "diffusion_pytorch_model.safetensors"
    write_safetensors(path, weights, kind)
    read = vae.read_weights(path)
    assert read.keys() == weights.keys()
    for name, array in read.items():
        assert array.dtype == np.float32
        # What is cut off is less than the last bit; float16 has a smallest step too.
        np.testing.assert_allclose(array, weights[name], rtol=2.0 ** (1 - bits), atol=2.0**-24)
        assert kind != "F32" or np.array_equal(array, weights[name])


def test_old_names_are_read_as_the_new(tmp_path: Path, weights: dict[str, Floats]) -> None:
    path = tmp_path / "old.safetensors"
    other = {"encoder.conv_in.weight": np.zeros((8, 3, 3, 3), np.float32)}
    write_safetensors(path, with_old_names(weights) | other, "F32")
    read = vae.read_weights(path)
    assert len(read.keys() - weights.keys()) == 8 + 1
    renamed = {vae.rename(name): array for name, array in read.items()}
    assert all(np.array_equal(renamed[name], array) for name, array in weights.items())
    # Of the same names come the same layers.
    vae.build_graph(read, groups=GROUPS)


@pytest.mark.parametrize(
    "config",
    [
        vae.Config(),
        TINY,
        replace(TINY, latents=16, post_quant=False),
        replace(TINY, channels=(16, 8, 8), layers=1, attention=False),
    ],
)
def test_a_checkpoint_says_what_the_network_is(config: vae.Config) -> None:
    weights = {name: np.empty(shape) for name, shape in config.shapes().items()}
    weights["encoder.conv_in.weight"] = np.empty((1, 1, 1, 1))
    assert vae.Config.of(weights) == config


def test_the_default_is_stable_diffusions() -> None:
    shapes = vae.Config().shapes()
    # As counted in diffusers: 49 490 179 in the decoder, 20 in post_quant_conv.
    assert sum(int(np.prod(shape)) for shape in shapes.values()) == 49490199
    assert shapes["decoder.up_blocks.2.resnets.0.conv_shortcut.weight"] == (256, 512, 1, 1)
    assert shapes[f"{vae.ATTENTION}.to_out.0.weight"] == (512, 512)


def test_a_bad_weight_is_named(weights: dict[str, Floats]) -> None:
    name = "decoder.up_blocks.1.resnets.1.norm2.bias"
    bad: dict[str, npt.NDArray[Any]] = {**weights}
    del bad[name]
    with pytest.raises(ValueError, match=rf"^weights: {name} is missing; it has the shape \(8,\)$"):
        vae.build_graph(bad, groups=GROUPS)
    bad[name] = np.ones(7)
    message = rf"^weights: {name} has the shape \(7,\), not \(8,\)$"
    with pytest.raises(ValueError, match=message):
        vae.build_graph(bad, groups=GROUPS)
    del bad["decoder.conv_in.weight"]
    message = r"^weights: decoder.conv_in.weight is missing; it is a filter \[K, C, 3, 3\]$"
    with pytest.raises(ValueError, match=message):
        vae.build_graph(bad, groups=GROUPS)


@pytest.mark.parametrize("groups", [3, 0])
def test_groups_must_divide(weights: dict[str, Floats], groups: int) -> None:
    message = rf"^groups: {groups} does not divide the 16 channels of a block$"
    with pytest.raises(ValueError, match=message):
        vae.build_graph(weights, groups=groups)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--replay", "--device", "cpu"],
            "replay: the device is cpu; only what a GPU is given can be replayed",
        ),
        (["--size", "0", "--device", "cpu"], "size: 0 is not allowed; 1 and above are"),
    ],
)
def test_a_bad_argument_is_named(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        vae.read_arguments(words)


@pytest.mark.skipif(accelerator_count() > 0, reason="there is a GPU")
def test_a_gpu_must_be_there() -> None:
    message = r"^device: gpu, but MAX finds none here; cpu is allowed$"
    with pytest.raises(ValueError, match=message):
        vae.read_arguments(["--device", "gpu"])
    assert vae.read_arguments([]).device == "cpu"


def test_files_must_be_what_they_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^weights: a.bin must end in .safetensors or .npz$"):
        vae.read_weights(Path("a.bin"))
    with pytest.raises(ValueError, match=r"^weights: .*none.npz is not a file$"):
        vae.read_weights(tmp_path / "none.npz")
    path = tmp_path / "latents.npy"
    np.save(path, np.ones((2, 4, 6, 5), np.float32))
    message = r"^latents: .* has the shape \(2, 4, 6, 5\); \(4, height, width\), with or without"
    with pytest.raises(ValueError, match=message):
        vae.read_latents(path, 4)
    np.save(path, np.arange(4 * 6 * 5.0).reshape(4, 6, 5))
    latents = vae.read_latents(path, 4)
    assert latents.shape == (1, 6, 5, 4)
    assert latents[0, 1, 2, 3] == 3 * 30 + 1 * 5 + 2


def test_pixels_become_an_image() -> None:
    pixels = np.array([[[[-1, 0, 1], [-3, 0.5, 3]]]], np.float32)
    expected = [[[0, 128, 255], [0, 191, 255]]]
    assert np.asarray(vae.to_image(pixels)).tolist() == expected


@pytest.mark.extended
@pytest.mark.usefixtures("model")
def test_the_program_decodes_a_file(tmp_path: Path, weights: dict[str, Floats]) -> None:
    checkpoint, latents, out = (tmp_path / name for name in ("w.safetensors", "z.npy", "out.png"))
    write_safetensors(checkpoint, with_old_names(weights), "F32")
    np.save(latents, np.ones((4, 6, 5), np.float32))
    words = ["--weights", checkpoint, "--groups", GROUPS, "--latents", latents, "--out", out]
    command = [sys.executable, ROOT / "graphs" / "vae_decoder.py", *words, "--device", "cpu"]
    finished = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    *compiling, done = finished.stdout.splitlines()
    assert all(line.startswith("compiling for cpu, float32: ") for line in compiling)
    assert done.startswith(f"{out}: 10x12 in ")
    assert done.endswith(" ms, executed")
    with Image.open(out) as image:
        assert (image.size, image.mode) == ((10, 12), "RGB")
