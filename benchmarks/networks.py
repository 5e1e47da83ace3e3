"""Writes ``tests/networks.yaml``: the convolutions of real networks, as their libraries build them.

Each network runs once without data, and what it convolves is noted: the shapes, the first module
that has each, and how often each network has it. Transposed convolutions are left out.

    pip install 'maxconv[models]'
    python benchmarks/networks.py
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from maxconv.bench.models.catalogue import Source, load_catalogue, resolve
from maxconv.bench.models.catalogue import build as build_model
from maxconv.bench.models.traced import Noted, Shape, trace

OUT = Path(__file__).parents[1] / "tests" / "networks.yaml"

HEAD = """\
# Convolutions of real networks, written by `python benchmarks/networks.py`.
#
# networks: each with its input and the batches that it is run with
# input: [*spatial, C]   the rest as in problems.yaml; padding, stride and dilation may be left out
# in: the networks that have it, and how often
#
# A name is that of a network and its first module of this shape. NAME@8 has a batch of 8.
"""


# The networks -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """A network, what it is given, and the batches that people run it with."""

    make: Callable[[], nn.Module]
    inputs: Sequence[tuple[int, ...] | int]
    """Shapes without the batch, or a number that all share."""
    batches: Sequence[int]
    tokens: int | None = None
    """The first input is so many token numbers instead."""
    meta: bool = True
    """Whether it runs without data."""


def _listed(name: str, batches: Sequence[int], *, size: Sequence[int] | None = None) -> Network:
    """Returns a network of ``maxconv bench --models``, of another image's size if given."""
    source = load_catalogue().models[name]
    first, *rest = source.inputs
    if size is not None:
        assert isinstance(first, tuple)
        first = (first[0], *size)
    return Network(lambda: build_model(source), [first, *rest], batches)


def _of(
    make: str,
    inputs: Sequence[tuple[int, ...] | int],
    batches: Sequence[int],
    *,
    config: str | None = None,
    part: str | None = None,
    tokens: int | None = None,
    meta: bool = True,
    **arguments: Any,
) -> Network:
    """Returns what a library's constructor makes of arguments, or of a configuration of them."""
    source = Source(make, make, tuple(inputs), {}, arguments, config, part)
    return Network(lambda: build_model(source), inputs, batches, tokens, meta)


def _configured(make: str, *given: Any, **settings: Any) -> Network:
    """Returns a model of transformers', of the configuration that is named like it."""
    return _of(make, *given, config=f"{make.removesuffix('Model')}Config", **settings)


class _Detector(nn.Module):
    """The convolutions of a detector of torchvision's: its heads on each level of its pyramid."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.backbone, self.head = model.backbone, model.head

    def forward(self, images: Tensor) -> Any:
        """Returns the heads' outputs."""
        return self.head([*self.backbone(images).values()])


def _detector() -> nn.Module:
    make = resolve("torchvision.models.detection.retinanet_resnet50_fpn")
    return _Detector(make(weights=None, weights_backbone=None)).eval()


_SDXL: dict[str, Any] = {
    "sample_size": 128,
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    # What attends has no convolution, given this: one block of it will do.
    "use_linear_projection": True,
    "transformer_layers_per_block": [1, 1, 1],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
}

_WHISPER: dict[str, Any] = {
    "d_model": 1280,
    "num_mel_bins": 128,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
}

_VAE: dict[str, Any] = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
}

#: Bounded by what is run most: classification at 1, 8 and 64, generation at 1 or 2 and 8.
NETWORKS = {
    "resnet50": _listed("resnet50", [1, 8, 64]),
    "resnext50": _listed("resnext50", [1, 64]),
    "regnet_y_8gf": _of("torchvision.models.regnet_y_8gf", [(3, 224, 224)], [1, 64]),
    "convnext_tiny": _listed("convnext_tiny", [1, 32]),
    "efficientnet_b0": _listed("efficientnet_b0", [1, 64]),
    "mobilenet_v3_large": _listed("mobilenet_v3_large", [1, 64]),
    "vit_b16": _of("torchvision.models.vit_b_16", [(3, 224, 224)], [1, 8, 64]),
    "cspdarknet53": _listed("cspdarknet53", [1, 32], size=[640, 640]),
    "rtdetr_r50": _configured("transformers.RTDetrModel", [(3, 640, 640)], [1, 8]),
    "retinanet_r50": Network(_detector, [(3, 800, 800)], [1, 8]),
    "deeplabv3_resnet50": _listed("deeplabv3_resnet50", [1, 8], size=[513, 513]),
    "unet_resnet34": _listed("smp_unet", [1, 8], size=[512, 512]),
    "sd15_unet": _listed("sd15_unet", [2, 8]),
    "sdxl_unet": _of(
        "diffusers.UNet2DConditionModel", [(4, 128, 128), 500, (77, 2048)], [2, 8], **_SDXL
    ),
    "sd15_vae_encoder": _of(
        "diffusers.AutoencoderKL", [(3, 512, 512)], [1, 8], part="encoder", **_VAE
    ),
    "sd15_vae_decoder": _listed("sd15_vae_decoder", [1]),
    "wan_vae_decoder": _of("diffusers.AutoencoderKLWan", [(16, 1, 60, 104)], [1], part="decoder"),
    "whisper_large": _configured(
        "transformers.WhisperModel", [(128, 3000)], [1, 8], part="encoder", **_WHISPER
    ),
    "hifigan": _configured("transformers.SpeechT5HifiGan", [(256, 80)], [1, 8]),
    "conv_tasnet": _listed("conv_tasnet", [1, 8]),
    "encodec_encoder": _configured(
        "transformers.EncodecModel", [(1, 24000)], [1, 32], part="encoder", meta=False
    ),
    "mamba_1.4b": _configured(
        "transformers.MambaModel", [], [1, 8], tokens=2048, hidden_size=2048, num_hidden_layers=48
    ),
    "r3d_18": _listed("r3d_18", [1, 8]),
    "r2plus1d_18": _listed("r2plus1d_18", [1, 8]),
    "segresnet_3d": _listed("monai_segresnet", [1, 2], size=[96, 96, 96]),
}


# What they convolve -------------------------------------------------------------------------------


def convolutions(network: Network) -> Noted:
    """Runs a network of a batch of one; returns what it convolves, without transposed ones."""
    device = "meta" if network.meta else "cpu"
    model = network.make().to(device)
    with torch.device(device):
        inputs: list[Tensor] = []
        if network.tokens:
            inputs.append(torch.zeros(1, network.tokens, dtype=torch.long))
        for size in network.inputs:
            inputs.append(torch.zeros(1, *size) if isinstance(size, tuple) else torch.tensor(size))
        noted = trace(model, inputs)
    found = Noted()
    for shape, count in noted.counts.items():
        if not shape.transposed:
            # Some networks convolve several images of a batch of one at once.
            assert shape.batch == 1 or len(shape.filter) < 3, "a batch that the network made"
            single = shape._replace(batch=1)
            found.counts[single] += count
            found.names.setdefault(single, noted.names[shape])
    return found


# The file -----------------------------------------------------------------------------------------


def _flow(value: object) -> str:
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_flow, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_flow(item)}' for key, item in value.items())}}}"
    return str(value)


def _entry(name: str, shape: Shape, networks: dict[str, int]) -> str:
    entry: dict[str, object] = {"name": name, "input": shape.input, "filters": shape.filters}
    entry["filter"] = shape.filter
    for key in ("stride", "dilation"):
        if set(getattr(shape, key)) != {1}:
            entry[key] = getattr(shape, key)
    if any(shape.padding):
        entry["padding"] = [size for size in shape.padding for _ in range(2)]
    if shape.groups != 1:
        entry["groups"] = shape.groups
    return f"  - {_flow({**entry, 'in': networks})}"


def render(found: dict[str, Noted]) -> str:
    """Returns the file's text."""
    names: dict[Shape, str] = {}
    for network, noted in found.items():
        for shape, path in noted.names.items():
            if shape not in names:
                base, number = f"{network}.{path}".rstrip("."), 1
                name = base
                while name in names.values():
                    number += 1
                    name = f"{base}_{number}"
                names[shape] = name
    lines = [HEAD + "networks:"]
    for name in found:
        sizes: list[object] = [*NETWORKS[name].inputs]
        if NETWORKS[name].tokens:
            sizes.insert(0, f"{NETWORKS[name].tokens} tokens")
        told = ", ".join("x".join(map(str, s)) if isinstance(s, tuple) else str(s) for s in sizes)
        lines.append(f"  {name}: {{input: '{told}', batches: {_flow(NETWORKS[name].batches)}}}")
    lines.append("problems:")
    for shape, name in names.items():
        counts = {at: noted.counts[shape] for at, noted in found.items() if shape in noted.counts}
        lines.append(_entry(name, shape, counts))
    return "\n".join(lines) + "\n"


def main() -> None:
    """Writes the file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"where (default: {OUT.name})")
    args = parser.parse_args()
    found = {}
    for name, network in NETWORKS.items():
        found[name] = convolutions(network)
        print(f"{name}: {len(found[name].counts)} convolutions", flush=True)
    text = render(found)
    args.out.write_text(text, encoding="utf-8")
    print(f"{args.out}: {text.count('- {name:')} distinct")


if __name__ == "__main__":
    main()
