"""``maxconv demo``: adds noise to a photograph and removes it again.

The network is built twice, with maxconv's convolution and with MAX's own, and both are timed. The
network itself is in ``graphs/denoise.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont, ImageOps, UnidentifiedImageError

from maxconv._progress import progress

if TYPE_CHECKING:
    from max.driver import Buffer
    from max.engine import Model

    from maxconv.graphs.denoise import Layer

__all__ = ["add_arguments", "run"]

Floats: TypeAlias = npt.NDArray[np.float32]

_SIGMAS = (1.0, 255.0)

# Of a large photograph, the network sees one tile at a time: it needs about 600 bytes a pixel.
_TILE = 512

# The contenders take turns in bursts of calls. What the other one left behind (threads that still
# look for work, caches) is over after a pause and the first calls of a burst, which do not count.
_ROUNDS = 6
_BURST_S = 0.6
_PAUSE_S = 0.05
_UNCOUNTED = 1 / 3

_BACKGROUND, _FOREGROUND = (24, 24, 24), (235, 235, 235)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of ``maxconv demo``."""
    parser.add_argument("photo", nargs="?", type=Path, metavar="PHOTO", help="default: its own")
    low, high = _SIGMAS
    parser.add_argument(
        "--sigma",
        type=float,
        default=25.0,
        help=f"strength of the noise: its standard deviation, {low:g} to {high:g}, default 25",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise, default 0")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("denoised.png"),
        help="picture to write, default denoised.png",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for a program")


def run(args: argparse.Namespace) -> int:
    """Runs the demo and prints what it measured; returns the exit status, 2 for a bad argument.

    Raises:
        LibraryError: The kernels cannot be compiled.
        OSError: The picture cannot be written.
    """
    try:
        # Before anything slow: a mistake is told at once.
        _check(args)
        photo = _read(args.photo) if args.photo else None
    except ValueError as error:
        print(f"maxconv demo: {error}", file=sys.stderr)
        return 2
    from maxconv.graphs import denoise

    path = args.photo or denoise.PHOTO
    photo = _read(path) if photo is None else photo
    noisy = denoise.add_noise(photo, args.sigma, args.seed)
    layers = denoise.load_weights()
    models = _compile(layers)
    tile = _middle(noisy)
    # Each model's first call is also the one that starts MAX's threads.
    ours, theirs = (denoise.denoise(models[name], tile) for name in ("maxconv", "max"))
    with progress("denoising"):
        # Each 3x3 convolution looks one pixel further.
        denoised = _denoise(models["maxconv"], noisy, reach=len(layers))
    with progress("timing both"):
        milliseconds = _time(models, tile)
    report = {
        "photo": str(path),
        "width": photo.shape[1],
        "height": photo.shape[0],
        "sigma": args.sigma,
        "trained_sigmas": _trained_sigmas(),
        "seed": args.seed,
        "psnr_noisy": denoise.psnr(photo, noisy),
        "psnr_denoised": denoise.psnr(photo, denoised),
        "timed_width": tile.shape[1],
        "timed_height": tile.shape[0],
        "maxconv_ms": milliseconds["maxconv"],
        "max_ms": milliseconds["max"],
        "speedup": milliseconds["max"] / milliseconds["maxconv"],
        "largest_difference": float(np.abs(ours - theirs).max()),
        "output": str(args.output),
    }
    panels = {
        "original": photo,
        f"noise, sigma {args.sigma:g}: {report['psnr_noisy']:.1f} dB": noisy,
        f"denoised: {report['psnr_denoised']:.1f} dB": denoised,
    }
    with progress(f"writing {args.output}"):
        _draw(panels).save(args.output)
    print(json.dumps(report, indent=2) if args.json else _text(report))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raises ``ValueError`` for an argument that cannot be, but for the photograph's content."""
    low, high = _SIGMAS
    if not low <= args.sigma <= high:
        raise ValueError(f"sigma: {args.sigma:g} is not between {low:g} and {high:g}")
    if args.seed < 0:
        raise ValueError(f"seed: {args.seed} is negative; 0 and above are allowed")
    output: Path = args.output
    if output.is_dir():
        raise ValueError(f"output: {output} is a folder; name a file in it")
    if Image.registered_extensions().get(output.suffix.lower()) not in Image.SAVE:
        raise ValueError(f"output: {output} has no picture's extension; take .png or .jpg")
    target = output if output.exists() else output.parent
    if not os.access(target, os.W_OK):
        why = "is not writable" if target.exists() else "does not exist"
        raise ValueError(f"output: {target} {why}")
    if args.photo and output.exists() and args.photo.exists() and output.samefile(args.photo):
        raise ValueError(f"output: {output} is the photograph itself; name another file")


def _read(path: Path) -> Floats:
    """Returns a photograph as RGB in [0, 1], ``[height, width, 3]``, upright, white behind it.

    Raises:
        ValueError: The file is not one that can be read as a photograph.
    """
    try:
        with warnings.catch_warnings():
            # Pillow's limit of size: it warns at the limit, and refuses twice as much.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as file:
                photo = ImageOps.exif_transpose(file)
                photo.load()
                pixels = _to_rgb(photo)
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        limit = (Image.MAX_IMAGE_PIXELS or 0) / 1e6
        raise ValueError(f"photo: {path} has more than {limit:.0f} megapixels") from None
    except UnidentifiedImageError:
        raise ValueError(f"photo: {path} is not a picture of a known format") from None
    except OSError as error:
        # The system's errors have the path in their text, Pillow's have not.
        raise ValueError(f"photo: {path}: {error.strerror or error}") from None
    except (EOFError, SyntaxError, ValueError) as error:
        raise ValueError(f"photo: {path}: {error}") from None
    return pixels


def _to_rgb(photo: Image.Image) -> Floats:
    if photo.mode.startswith("I"):
        # Pillow's integers are 16-bit grey values, which its own conversion would clip.
        grey = np.asarray(photo).astype(np.float32) / 65535
        return np.repeat(np.clip(grey, 0, 1)[:, :, np.newaxis], 3, axis=2)
    if photo.mode == "F":
        raise ValueError("its pixels are floating-point numbers; convert it to 8 or 16 bits")
    if photo.has_transparency_data:
        white = Image.new("RGBA", photo.size, "white")
        photo = Image.alpha_composite(white, photo.convert("RGBA"))
    pixels: Floats = np.asarray(photo.convert("RGB"), dtype=np.float32) / np.float32(255)
    return pixels


def _compile(layers: Sequence[Layer]) -> dict[str, Model]:
    """Returns the compiled networks by the names of their convolutions."""
    from max.driver import CPU
    from max.engine import InferenceSession
    from max.graph import ops

    import maxconv
    from maxconv.graphs import denoise

    session = InferenceSession(devices=[CPU()])
    models = {}
    for name, convolution in (("maxconv", maxconv.conv2d), ("max", ops.conv2d)):
        whose = "maxconv's convolution" if name == "maxconv" else "MAX's own"
        with progress(f"compiling with {whose} (the first time takes up to a minute)"):
            models[name] = session.load(denoise.build_graph(layers, convolution))
    return models


def _denoise(model: Model, noisy: Floats, reach: int) -> Floats:
    """Denoises a photograph of any size, tile by tile.

    A tile is read with the ``reach`` pixels around it that the network looks at, so that the result
    is the same as in one piece.
    """
    from maxconv.graphs import denoise

    result = np.empty_like(noisy)
    for top in range(0, noisy.shape[0], _TILE):
        for left in range(0, noisy.shape[1], _TILE):
            above, before = min(reach, top), min(reach, left)
            seen = noisy[
                top - above : top + _TILE + reach,
                left - before : left + _TILE + reach,
            ]
            clean = denoise.denoise(model, seen)[above:, before:][:_TILE, :_TILE]
            result[top : top + _TILE, left : left + _TILE] = clean
    return result


def _middle(photo: Floats) -> Floats:
    """Returns one tile from the middle of a photograph; all of a small one."""
    top, left = (max(0, size - _TILE) // 2 for size in photo.shape[:2])
    return photo[top : top + _TILE, left : left + _TILE]


def _time(models: Mapping[str, Model], photo: Floats) -> dict[str, float]:
    """Returns the median time of a call of each model, in milliseconds."""
    from max.driver import Buffer

    image = Buffer.from_numpy(np.ascontiguousarray(photo[np.newaxis]))
    seconds: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(_ROUNDS):
        for name, model in models.items():
            time.sleep(_PAUSE_S)
            burst = _burst(model, image)
            seconds[name] += burst[int(len(burst) * _UNCOUNTED) :]
    return {name: 1e3 * statistics.median(values) for name, values in seconds.items()}


def _burst(model: Model, image: Buffer) -> list[float]:
    """Returns the seconds of each of several calls in a row."""
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < _BURST_S:
        start = time.perf_counter()
        model.execute(image)
        seconds.append(time.perf_counter() - start)
    return seconds


def _trained_sigmas() -> list[float]:
    """Returns the weakest and the strongest noise that the weights were trained with."""
    from maxconv.graphs import denoise

    with np.load(denoise.WEIGHTS) as file:
        sigmas: list[float] = json.loads(str(file["meta"]))["sigma"]
    return sigmas


def _draw(panels: Mapping[str, Floats]) -> Image.Image:
    """Returns pictures of one size side by side, with a thin line between, under their names."""
    height, width = next(iter(panels.values())).shape[:2]
    size = max(13, min(height, width) // 25)
    font = ImageFont.load_default(size)
    margin, line = size // 2, max(2, size // 10)
    # A small photograph gets the room that its caption needs.
    column = max(width, *(2 * margin + int(font.getlength(name)) for name in panels))
    band = size + 2 * margin
    canvas = Image.new("RGB", (len(panels) * (column + line) - line, band + height), _BACKGROUND)
    draw = ImageDraw.Draw(canvas)
    for index, (name, pixels) in enumerate(panels.items()):
        left = index * (column + line)
        if index:
            draw.rectangle((left - line, 0, left - 1, canvas.height), fill=_FOREGROUND)
        middle = (left + column // 2, band // 2)
        draw.text(middle, name, fill=_FOREGROUND, font=font, anchor="mm")
        bytes_ = np.rint(np.clip(pixels, 0, 1) * 255).astype(np.uint8)
        canvas.paste(Image.fromarray(bytes_), (left + (column - width) // 2, band))
    return canvas


def _text(report: Mapping[str, Any]) -> str:
    low, high = report["trained_sigmas"]
    usual = low <= report["sigma"] <= high
    unusual = "" if usual else f"; the network was trained with {low:g} to {high:g}"
    gain = report["psnr_denoised"] - report["psnr_noisy"]
    timed = f"for {report['timed_width']}x{report['timed_height']} pixels"
    rows = [
        ("photo", f"{report['photo']}, {report['width']}x{report['height']}"),
        ("noise", f"sigma {report['sigma']:g}, seed {report['seed']}{unusual}"),
        ("before", f"{report['psnr_noisy']:.2f} dB PSNR"),
        ("after", f"{report['psnr_denoised']:.2f} dB PSNR, {gain:+.2f} dB"),
        ("maxconv", f"{report['maxconv_ms']:.1f} ms {timed}"),
        ("MAX's own", f"{report['max_ms']:.1f} ms, {report['speedup']:.2f} times as long"),
        ("", f"largest difference of their pixels {report['largest_difference']:.1g}"),
        ("wrote", report["output"]),
    ]
    return "\n".join(f"{name:10} {value}" for name, value in rows)
