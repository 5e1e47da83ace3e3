"""A model of the Blackwell kernel: what a B200's data sheet allows, by configuration and problem.

Nothing in it is measured: there was no such GPU. The problems are those of ``problems.yaml``, in
bfloat16.

    python benchmarks/model_sm100.py [--plot FILE.png] [PROBLEM...]

For each problem: the configuration that a plan takes, its tiles and waves over 148
multiprocessors, what bounds it, and the part of the peak that is left. The model itself is
``operations/nvidia/sm100/model.mojo``, which plans ask too.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from maxconv import _library as library
from maxconv._problem import ConvProblem
from maxconv._problems import load_problems
from maxconv._targets import BLACKWELL, TARGETS
from maxconv.bench.gpu.operands import geometry

SOURCE = Path(__file__).with_suffix(".mojo")

#: Dense bfloat16, of the data sheet.
PEAK = 2.25e15
#: Bytes a second of device memory, of the data sheet.
BANDWIDTH = 8.0e12


@dataclass(frozen=True)
class Prediction:
    """A configuration's times for a problem; those of a tile in cycles."""

    index: int
    tiles: int
    waves: int
    multiply: float
    load: float
    store: float
    memory_s: float
    seconds: float
    bound: str
    configuration: str

    @classmethod
    def of(cls, line: str) -> Prediction | None:
        """Reads a line of the Mojo side; ``None`` if the configuration cannot."""
        fields = line.split("|")
        if len(fields) == 2:
            return None
        index, tiles, waves, *times, bound, configuration = fields
        multiply, load, store, memory, seconds = map(float, times)
        return cls(
            int(index),
            int(tiles),
            int(waves),
            multiply,
            load,
            store,
            memory,
            seconds,
            bound,
            configuration,
        )


def build(folder: Path) -> Path:
    """Compiles the Mojo side."""
    program = folder / "model"
    include = str(library.OPERATIONS.parent)
    built = library.run_mojo("build", "-I", include, str(SOURCE), "-o", str(program))
    if built.returncode:
        raise SystemExit(built.stderr)
    return program


def predictions(program: Path, problem: ConvProblem) -> list[Prediction]:
    """What the model says of every configuration that can take a problem."""
    multiprocessors = str(TARGETS[BLACKWELL].multiprocessors)
    printed = subprocess.run(
        [str(program), multiprocessors, *map(str, geometry(problem))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    found = (Prediction.of(line) for line in printed.splitlines())
    return [entry for entry in found if entry is not None]


def plot(points: dict[str, tuple[float, float]], file: str) -> None:
    """Draws the roofline: predicted operations a second over operations a byte."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    intensities = [1.0, PEAK / BANDWIDTH, 2.0**13]
    axes.plot(intensities, [min(PEAK, BANDWIDTH * x) / 1e12 for x in intensities], color="black")
    axes.scatter(*zip(*points.values(), strict=True), s=14)
    for name, point in points.items():
        axes.annotate(name, point, fontsize=4)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="operations a byte",
        ylabel="TFLOP/s",
        title="Blackwell kernel on a B200: a model, nothing measured",
    )
    figure.savefig(file, dpi=160)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description="A model of the Blackwell kernel on a B200.")
    parser.add_argument("problems", nargs="*", help="names; all of problems.yaml by default")
    parser.add_argument("--plot", metavar="FILE", help="where to draw the roofline")
    parsed = parser.parse_args()
    known = load_problems()
    chosen = {name: known[name] for name in parsed.problems} if parsed.problems else known
    points: dict[str, tuple[float, float]] = {}
    print("A model of a B200 from its data sheet; nothing here is measured.")
    print(f"{'problem':32} {'waves':>5} {'bound':>8} {'model us':>9} {'of peak':>8}  configuration")
    with tempfile.TemporaryDirectory() as scratch:
        program = build(Path(scratch))
        for name, entry in chosen.items():
            problem = entry.problem
            found = predictions(program, problem)
            if not found:
                print(f"{name:32} {'':5} {'':8} {'':9} {'':8}  none can")
                continue
            best = min(found, key=lambda prediction: prediction.seconds)
            rate = problem.flops / best.seconds
            points[name] = (problem.flops / problem.nbytes("bfloat16"), rate / 1e12)
            print(
                f"{name:32} {best.waves:5} {best.bound:>8} {best.seconds * 1e6:9.1f} "
                f"{rate / PEAK:8.0%}  {best.configuration}"
            )
    if parsed.plot:
        plot(points, parsed.plot)


if __name__ == "__main__":
    main()
