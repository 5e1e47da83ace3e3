"""Times the models in MAX's wheel that convolve: with MAX's own convolutions, and with maxconv's.

The models are those of ``max.pipelines.architectures``, in their real configurations, with random
weights. Each is built twice, once within ``maxconv.override_max()``; both run in one process, in
turns, on the same inputs. A graph serves all sizes, as MAX's own pipelines have it; ``--static``
compiles one for each. What fails is reported in its row, and the rest goes on.

    python benchmarks/max_models.py --device gpu --model whisper flux2 --out max_models.json
    python benchmarks/max_models.py --device cpu --small --model whisper
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from max.driver import CPU, Accelerator, Buffer, Device
from max.dtype import DType
from max.engine import InferenceSession
from max.graph import DeviceRef, Graph, TensorType, ops
from max.pipelines.architectures.autoencoders import vae, vae_flux2
from max.pipelines.architectures.autoencoders.autoencoder_kl_qwen_image import QwenImageDecoder3d
from max.pipelines.architectures.autoencoders.model_config import (
    AutoencoderKLQwenImageConfig,
    AutoencoderKLWanConfig,
)
from max.pipelines.architectures.whisper.encoder import WhisperEncoder
from max.pipelines.lib.bfloat16_utils import float32_to_bfloat16_as_uint16

import maxconv
from maxconv.bench.device import DEVICES
from maxconv.bench.environment import driver_version, machine, versions
from maxconv.bench.statistics import Timing
from maxconv.bench.timing import interleave

Floats: TypeAlias = npt.NDArray[np.float32]
Shape: TypeAlias = tuple[int, ...]

#: Whose convolutions; the reference computes in float32.
THEIRS, OURS, REFERENCE = "MAX", "maxconv", "reference"

#: Random numbers that all tensors are cut from; a prime, so that no two rows of one are alike.
_POOL: Floats = np.random.default_rng(7).standard_normal(4194301, dtype=np.float32)


# The models ---------------------------------------------------------------------------------------


def _qwen_image(small: bool, place: Mapping[str, Any]) -> Any:
    """Qwen-image's decoder; what MAX's configuration has as defaults is Qwen's."""
    sizes: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1}
    given = {**sizes, "temporal_downsample": [False]} if small else {}
    return QwenImageDecoder3d(AutoencoderKLQwenImageConfig(**given, **place))


def _flux2(small: bool, place: Mapping[str, Any]) -> Any:
    channels = (64, 64) if small else (128, 256, 512, 512)
    return vae_flux2.Decoder(
        in_channels=4 if small else 32,
        out_channels=3,
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=1 if small else 2,
        **place,
    )


def _wan(make: Callable[[Any], Any]) -> Callable[[bool, Mapping[str, Any]], Any]:
    """Wan's decoder; what MAX's configuration has as defaults is Wan 2.2's."""

    def build(small: bool, place: Mapping[str, Any]) -> Any:
        sizes: dict[str, Any] = {"base_dim": 8, "z_dim": 4, "dim_mult": (1, 1), "num_res_blocks": 1}
        given = {**sizes, "temporal_downsample": (True,)} if small else {}
        config = AutoencoderKLWanConfig(**given, **place)
        # Tensors kept of earlier frames: MAX knows the number of the real configuration, 32.
        levels = len(config.dim_mult) * (config.num_res_blocks + 1)
        vae.WAN_DECODER_CACHE_SLOTS = 6 + 2 * levels + sum(config.temporal_downsample)
        return make(config)

    return build


def _wan_caches(model: Any, first: Shape) -> list[Shape]:
    return [tuple(map(int, shape)) for shape in model.decoder.cache_shapes(1, *first[-2:])]


def _whisper(small: bool, place: Mapping[str, Any]) -> Any:
    """The encoder of Whisper large-v3."""
    config: Any = SimpleNamespace(
        d_model=16 if small else 1280,
        n_heads=2 if small else 20,
        encoder_attention_heads=2 if small else 20,
        encoder_ffn_dim=32 if small else 5120,
        num_mel_bins=8 if small else 128,
        max_source_positions=10 if small else 1500,
        encoder_layers=1 if small else 32,
    )
    return WhisperEncoder(config, place["dtype"], place["device"])


@dataclass(frozen=True)
class Source:
    """A model of MAX's."""

    make: Callable[[bool, Mapping[str, Any]], Any]
    """Returns it, of a small configuration or the real one, of a type and on a device."""
    sizes: Mapping[str, Shape]
    """Shapes of its first input, by what they are called."""
    small: Mapping[str, Shape]
    """The same of the small configuration."""
    free: tuple[int, ...] = (-2, -1)
    """The axes that differ between sizes, from the end."""
    others: Callable[[Any, Shape], list[Shape]] = lambda model, first: []
    """Shapes of its other inputs."""


_WAN_SIZES = {"480x832": (1, 16, 1, 60, 104), "1024x1024": (1, 16, 1, 128, 128)}
_WAN_SMALL = {"8x12": (1, 4, 1, 4, 6), "12x8": (1, 4, 1, 6, 4)}

MODELS: Mapping[str, Source] = {
    "qwen_image": Source(
        _qwen_image,
        {"512x512": (1, 16, 64, 64), "1024x1024": (1, 16, 128, 128)},
        {"12x16": (1, 4, 6, 8), "16x12": (1, 4, 8, 6)},
    ),
    "flux2": Source(_flux2, {"1024x1024": (1, 32, 128, 128)}, {"12x16": (1, 4, 6, 8)}),
    "wan_first": Source(_wan(vae.VAEDecoderFirstFrameCached), _WAN_SIZES, _WAN_SMALL),
    "wan_rest": Source(
        _wan(vae.VAEDecoderRestFrameCached), _WAN_SIZES, _WAN_SMALL, others=_wan_caches
    ),
    "whisper": Source(
        _whisper,
        {"30 s": (1, 3000, 128), "8 x 30 s": (8, 3000, 128)},
        {"1 x 20": (1, 20, 8), "2 x 20": (2, 20, 8)},
        free=(-3,),
    ),
}


def _attention(q: Any, k: Any, v: Any, mask_variant: Any = None, scale: float = 1.0) -> Any:
    """What ``flash_attention_gpu`` computes of ``[B, S, H, D]``; MAX has it for GPUs only."""
    q, k, v = (ops.permute(value, [0, 2, 1, 3]) for value in (q, k, v))
    shares = ops.softmax((q @ ops.permute(k, [0, 1, 3, 2])) * scale)
    return ops.permute(shares @ v, [0, 2, 1, 3])


# Tensors ------------------------------------------------------------------------------------------


def _drawn(name: str, shape: Shape) -> Floats:
    """Returns random numbers of about 1, always the same of a name."""
    start = zlib.crc32(name.encode()) % _POOL.size
    values: Floats = np.resize(np.roll(_POOL, -start), shape)
    return values


def _weight(name: str, shape: Shape) -> Floats:
    """Returns a weight of a size that keeps values of order one."""
    drawn = _drawn(name, shape)
    if len(shape) < 2 or name.endswith("gamma"):
        drawn *= np.float32(0.1)
        drawn += np.float32(name.endswith(("weight", "gamma")))
    else:
        drawn /= np.float32(np.sqrt(np.prod(shape) / max(shape[0], shape[-1])))
    return drawn


def _buffer(values: Floats, stored: DType, rounded: DType) -> Buffer:
    """Returns numbers as MAX's buffer, in the CPU's memory.

    Args:
        values: The numbers.
        stored: The buffer's type.
        rounded: The type that the numbers are rounded to before.
    """
    if rounded == DType.bfloat16:
        bits = float32_to_bfloat16_as_uint16(np.ascontiguousarray(values))
        if stored == rounded:
            return Buffer.from_numpy(bits).view(stored)
        values = (bits.astype(np.uint32) << 16).view(np.float32)
    elif rounded == DType.float16:
        values = values.astype(np.float16).astype(np.float32)
    return Buffer.from_numpy(np.ascontiguousarray(values, stored.to_numpy()))


def _floats(buffer: Buffer) -> Floats:
    """Returns a buffer's numbers."""
    host = buffer.to(CPU())
    if host.dtype == DType.bfloat16:
        return (host.view(DType.uint16).to_numpy().astype(np.uint32) << 16).view(np.float32)
    return host.to_numpy().astype(np.float32)


def _distance(values: Floats, expected: Floats) -> float:
    """Returns the length of the difference in parts of that of ``expected``."""
    wide = expected.astype(np.float64)
    return float(np.linalg.norm(values - wide) / np.linalg.norm(wide))


# A model, compiled --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """What all graphs of a run share."""

    session: InferenceSession
    device: Device
    dtype: DType
    small: bool
    static: bool

    def module(self, source: Source, dtype: DType) -> Any:
        """Returns a model of MAX's."""
        ref = DeviceRef.CPU() if self.device.is_host else DeviceRef.GPU()
        return source.make(self.small, {"dtype": dtype, "device": ref})


@dataclass
class Side:
    """A model with the convolutions of one, or why there is none."""

    dtype: DType
    model: Any = None
    compile_s: float | None = None
    problem: str = ""
    taken: int = 0
    left: list[str] = field(default_factory=list)


def _types(source: Source, shapes: Sequence[Shape], dtype: DType, setting: Setting) -> list[Any]:
    """Returns the types of a graph's inputs; a size that a level of it has twice has one name."""

    def size(shape: Shape, axis: int) -> int | str:
        if setting.static or axis not in source.free:
            return shape[axis]
        return f"size{-axis}_{shape[axis] // shapes[0][axis]}"

    ref = DeviceRef.CPU() if setting.device.is_host else DeviceRef.GPU()
    return [
        TensorType(dtype, [size(shape, axis) for axis in range(-len(shape), 0)], ref)
        for shape in shapes
    ]


def _compile(name: str, whose: str, first: Shape, dtype: DType, setting: Setting) -> Side:
    """Returns a model, compiled for the size of ``first`` or for all sizes."""
    source, side = MODELS[name], Side(dtype)
    ours = maxconv.override_max() if whose == OURS else contextlib.nullcontext()
    try:
        with ours as report:
            model = setting.module(source, dtype)
            weights = {
                path: _buffer(
                    _weight(path, tuple(map(int, weight.shape))), weight.dtype, setting.dtype
                )
                for path, weight in model.raw_state_dict().items()
            }
            model.load_state_dict(weights, weight_alignment=1, strict=True)
            types = _types(source, [first, *source.others(model, first)], dtype, setting)
            with Graph(f"{name}_{whose.lower()}", input_types=types) as graph:
                result = model(*(value.tensor for value in graph.inputs))
                graph.output(*(result if isinstance(result, tuple | list) else (result,)))
        if report is not None:
            side.taken, side.left = len(report.taken), [str(call) for call in report.left]
        begin = time.perf_counter()
        side.model = setting.session.load(graph, weights_registry=weights)
        side.compile_s = time.perf_counter() - begin
    # Whatever one of them cannot do, the others are still worth timing.
    except Exception as error:
        side.problem = f"{whose} does not compile it: {_words(error)}"
    _say(f"{name}, {whose}, {dtype.name}: {side.problem or f'{side.compile_s:.1f} s to compile'}")
    return side


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    # MAX's first line may say no more than that something failed.
    line = next((line for line in lines if "error:" in line), lines[0])
    return f"{type(error).__name__}: {line.strip()[:200]}"


def _say(words: str) -> None:
    print(words, file=sys.stderr, flush=True)


# A measurement ------------------------------------------------------------------------------------


@dataclass
class Row:
    """What was measured of a model and a size."""

    model: str
    size: str
    dtype: str
    timings: dict[str, Timing] = field(default_factory=dict)
    """By whose convolutions, ``replayed`` behind it."""
    compile_s: dict[str, float | None] = field(default_factory=dict)
    distances: dict[str, float] = field(default_factory=dict)
    """Relative distances of outputs, by what is compared."""
    taken: int = 0
    left: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def note(self, what: str, again: Floats, output: Floats) -> None:
        """Keeps how far a second output lies from the first, and says so if it is another."""
        self.distances[what] = found = _distance(again, output)
        if found != 0:
            self.problems.append(f"{what} differs by {found:.1e}")

    def cells(self) -> list[str]:
        """Returns the row of the table."""
        cells = [self.model, self.size]
        for kind in ("", " replayed"):
            times = [self.timings.get(f"{whose}{kind}") for whose in (THEIRS, OURS)]
            cells += [_shown(one) for one in times]
            theirs, ours = times
            cells.append(f"{theirs.median_s / ours.median_s:.2f}" if theirs and ours else "")
        keys = (f"{OURS} to {THEIRS}", f"{THEIRS} to reference", f"{OURS} to reference")
        cells += [f"{self.distances[key]:.1e}" if key in self.distances else "" for key in keys]
        return [*cells, f"{self.taken}, {len(self.left)}", "; ".join(self.problems)]


HEAD = ["model", "size", "MAX ms", "maxconv ms", "ratio", "MAX replayed ms", "maxconv replayed ms"]
HEAD += ["ratio", "ours to MAX's", "MAX's to float32", "ours to float32", "taken, left", "remarks"]


def _shown(timing: Timing | None) -> str:
    if timing is None:
        return ""
    low, high = timing.p10_s or 0.0, timing.p90_s or 0.0
    return f"{1e3 * timing.median_s:.2f} ({1e3 * low:.2f}, {1e3 * high:.2f})"


def _table(rows: Sequence[Row]) -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def _burst(run: Callable[[], object], device: Device) -> Callable[[int], list[float]]:
    """Returns what makes so many calls, waits for them together, and returns their mean."""

    def burst(calls: int) -> list[float]:
        device.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        device.synchronize()
        return [(time.perf_counter() - begin) / calls]

    return burst


def _run(
    row: Row, whose: str, side: Side, values: Sequence[Floats], setting: Setting, key: int
) -> tuple[Floats, dict[str, Callable[[], object]]]:
    """Returns a model's output and the ways of running it; notes what is not the same again."""
    model, device = side.model, setting.device
    inputs = [_buffer(value, side.dtype, setting.dtype).to(device) for value in values]
    output = _floats(model.execute(*inputs)[0])
    row.note(f"{whose} again", _floats(model.execute(*inputs)[0]), output)
    runs: dict[str, Callable[[], object]] = {whose: lambda: model.execute(*inputs)}
    if whose == REFERENCE:
        return output, {}
    if not device.is_host:
        try:
            kept = model.capture(key, *inputs)
            model.replay(key, *inputs)
            device.synchronize()
            row.note(f"{whose} replayed", _floats(kept[0]), output)
            runs[f"{whose} replayed"] = lambda: model.replay(key, *inputs)
        except Exception as error:
            row.problems.append(f"{whose} is not replayed: {_words(error)}")
    return output, runs


def _measure(
    row: Row, sides: Mapping[str, Side], first: Shape, setting: Setting, seconds: float, key: int
) -> None:
    """Runs what was compiled, compares and times it."""
    source = MODELS[row.model]
    shapes = [first, *source.others(setting.module(source, setting.dtype), first)]
    values = [_drawn(f"input {number}", shape) for number, shape in enumerate(shapes)]
    outputs: dict[str, Floats] = {}
    runs: dict[str, Callable[[], object]] = {}
    usable = {whose: side for whose, side in sides.items() if side.model is not None}
    for whose, side in usable.items():
        try:
            outputs[whose], own = _run(row, whose, side, values, setting, key)
            runs |= own
        except Exception as error:
            row.problems.append(f"{whose} does not execute it: {_words(error)}")
    for one, other in ((OURS, THEIRS), (THEIRS, REFERENCE), (OURS, REFERENCE)):
        if {one, other} <= outputs.keys():
            row.distances[f"{one} to {other}"] = _distance(outputs[one], outputs[other])
    protocol = replace(DEVICES["gpu"].models, budget_s=seconds, rounds=10)
    bursts = {what: _burst(run, setting.device) for what, run in runs.items()}
    row.timings = interleave(bursts, protocol)
    for side in usable.values():
        if not setting.device.is_host:
            side.model.release_captured_graph(key)


def _rows(name: str, args: argparse.Namespace, setting: Setting) -> Iterator[Row]:
    """Measures a model in all sizes."""
    source = MODELS[name]
    sizes = source.small if args.small else source.sizes
    sides: dict[str, Side] = {}
    for key, (size, first) in enumerate(sizes.items()):
        row = Row(name, size, setting.dtype.name)
        if time.perf_counter() - args.begin > args.time_limit:
            row.problems.append("not begun: the time limit")
            yield row
            continue
        if setting.static or not sides:
            sides = {
                whose: _compile(name, whose, first, setting.dtype, setting)
                for whose in ((THEIRS, OURS) if args.only == "both" else (args.only,))
            }
        if args.reference:
            # Of its own for each size: a graph of MAX's may be wrong of the second.
            alone = replace(setting, static=True)
            sides[REFERENCE] = _compile(name, args.reference, first, DType.float32, alone)
        row.compile_s = {whose: side.compile_s for whose, side in sides.items()}
        row.problems += [side.problem for side in sides.values() if side.problem]
        if OURS in sides:
            row.taken, row.left = sides[OURS].taken, sides[OURS].left
        try:
            _measure(row, sides, first, setting, args.seconds, key)
        except Exception as error:
            row.problems.append(_words(error))
        yield row


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--only", choices=("ours", "max", "both"), default="both")
    parser.add_argument("--device", choices=DEVICES, default="gpu")
    parser.add_argument("--dtype", help="default: bfloat16, on a CPU float32")
    parser.add_argument("--small", action="store_true", help="small configurations, to try it out")
    parser.add_argument("--static", action="store_true", help="a graph for each size")
    parser.add_argument(
        "--reference",
        choices=("max", "ours"),
        help="also compare with a float32 graph, of whose convolutions",
    )
    parser.add_argument("--seconds", type=float, default=4.0, help="of timing for each way")
    parser.add_argument("--time-limit", type=float, default=1e9, help="seconds: begins no more")
    parser.add_argument("--out", type=Path, help="write the figures here, as JSON")
    args = parser.parse_args()
    whose = {"ours": OURS, "max": THEIRS, "both": "both", None: None}
    args.only, args.reference = whose[args.only], whose[args.reference]
    args.begin = time.perf_counter()
    return args


def main() -> None:
    """Measures and prints."""
    args = _arguments()
    on_gpu = args.device == "gpu"
    device: Device = Accelerator() if on_gpu else CPU()
    if not on_gpu:
        vars(vae).update(flash_attention_gpu=_attention)
        vars(vae_flux2).update(flash_attention_gpu=_attention)
    dtype = DType[args.dtype or ("bfloat16" if on_gpu else "float32")]
    session = InferenceSession(devices=[device])
    setting = Setting(session, device, dtype, args.small, args.static)
    about: dict[str, Any] = {"machine": asdict(machine()), "driver": driver_version()}
    about |= {"versions": versions(), "device": str(device), "arguments": sys.argv[1:]}
    rows: list[Row] = []
    for name in args.model:
        for row in _rows(name, args, setting):
            rows.append(row)
            _say(" | ".join(row.cells()))
            if args.out:
                record = {**about, "rows": [asdict(row) for row in rows]}
                args.out.write_text(json.dumps(record, indent=1), encoding="utf-8")
        gc.collect()
    print(_table(rows))
    for call in dict.fromkeys(call for row in rows for call in row.left):
        print(f"left to MAX: {call}")


if __name__ == "__main__":
    main()
