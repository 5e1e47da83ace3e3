"""Makes a record, a table and a plot of what the programs of the GPU benchmark printed.

    python benchmarks/gpu/report.py record RECORD.json ours.jsonl peers.jsonl --about commit=C
    python benchmarks/gpu/report.py table RECORD.json
    python benchmarks/gpu/report.py plot RECORD.json PICTURE.png

`record` keeps each contender's times of each problem, and why there are none; a contender that was
timed several times gets the median of its runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lines import PROBLEMS

from maxconv._problem import ConvProblem
from maxconv._problems import load_problems

Times = dict[str, dict[str, dict[str, float]]]

ALONE = ("ours", "torch")
FUSED = ("ours_fused", "torch_fused", "torch_compile", "cudnn_fused")
GRAPHS = ("ours_graph", "max_fcrs", "max_rscf")
FUSED_GRAPHS = (
    "ours_graph_arguments",
    "ours_graph_fused",
    "ours_graph_fused_relu",
    "max_fcrs_fused",
)


def read(paths: Iterable[Path]) -> dict[str, Any]:
    """Merges files of JSON lines into the record's `about`, `results` and `missing`."""
    about: dict[str, Any] = {}
    runs: dict[str, dict[str, dict[str, list[float]]]] = {}
    missing: list[dict[str, Any]] = []
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "about" in line:
                about |= line["about"]
            elif "why" in line:
                missing.append(line)
            else:
                times = runs.setdefault(line["problem"], {}).setdefault(line["contender"], {})
                for key in ("ms", "launch_ms"):
                    if key in line:
                        times.setdefault(key, []).append(line[key])
    results = {
        problem: {
            contender: {key: statistics.median(values) for key, values in times.items()}
            | {"runs": max(map(len, times.values()))}
            for contender, times in contenders.items()
        }
        for problem, contenders in runs.items()
    }
    return {"about": about, "results": results, "missing": missing}


def ratio(times: Mapping[str, Mapping[str, float]], peer: str, own: str, key: str) -> float | None:
    """How many times as fast as a peer one of ours is."""
    if key in times.get(peer, {}) and key in times.get(own, {}):
        return times[peer][key] / times[own][key]
    return None


def geometric_mean(ratios: Iterable[float | None]) -> str:
    """The mean of those that there are."""
    known = [value for value in ratios if value is not None]
    return f"{statistics.geometric_mean(known):.2f}x" if known else "-"


def describe(problem: ConvProblem) -> str:
    """A convolution in a few signs."""
    sizes = "x".join(map(str, (problem.batch, *problem.input_size, problem.channels)))
    taps = "x".join(map(str, problem.filter_size))
    stride = f" s{problem.stride[0]}" if max(problem.stride) > 1 else ""
    groups = f" g{problem.groups}" if problem.groups > 1 else ""
    return f"{sizes} -> {problem.filters} {taps}{stride}{groups}"


def table(record: Mapping[str, Any], own: str, contenders: tuple[str, ...], key: str) -> list[str]:
    """Markdown lines: milliseconds of each contender, and the ratios of ours to the others."""
    peers = [name for name in contenders if name != own]
    head = ["problem", "convolution", *(f"{name}, ms" for name in contenders)]
    head += [f"/ {name}" for name in peers]
    lines = ["| " + " | ".join(head) + " |", "| --- | --- |" + " --: |" * (len(head) - 2)]
    ratios: dict[str, list[float | None]] = {name: [] for name in peers}
    for name, named in load_problems(PROBLEMS).items():
        times = record["results"].get(name, {})
        if key not in times.get(own, {}):
            continue
        cells = [name, describe(named.problem)]
        cells += [f"{times[c][key]:.4f}" if key in times.get(c, {}) else "-" for c in contenders]
        for peer in peers:
            value = ratio(times, peer, own, key)
            ratios[peer].append(value)
            cells.append("-" if value is None else f"{value:.2f}x")
        lines.append("| " + " | ".join(cells) + " |")
    means = [geometric_mean(ratios[peer]) for peer in peers]
    lines.append("| geometric mean | |" + " |" * len(contenders) + " " + " | ".join(means) + " |")
    return lines


def tables(record: Mapping[str, Any]) -> str:
    """All tables that a record has times for, as Markdown."""
    about = ", ".join(f"{name} {value}" for name, value in record["about"].items())
    parts = [about, ""]
    for title, own, contenders, key in (
        ("The convolution alone, replays of a graph", "ours", ALONE, "ms"),
        ("With bias, SiLU and a residual, replays of a graph", "ours_fused", FUSED, "ms"),
        ("The convolution alone, launches included", "ours", ALONE, "launch_ms"),
        ("The same fused", "ours_fused", FUSED, "launch_ms"),
        ("Through MAX graphs, one `execute` each", "ours_graph", GRAPHS, "launch_ms"),
        ("The same fused", "ours_graph_arguments", FUSED_GRAPHS, "launch_ms"),
    ):
        if any(key in times.get(own, {}) for times in record["results"].values()):
            parts += [f"{title}:", "", *table(record, own, contenders, key), ""]
    return "\n".join(parts)


def plot(record: Mapping[str, Any], path: Path) -> None:
    """Draws the ratios of the first two tables."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    results = record["results"]
    names = [name for name in load_problems(PROBLEMS) if name in results]
    bars = (
        ("torch, convolution alone", "torch", "ours", "#00798c"),
        ("torch.compile, fused", "torch_compile", "ours_fused", "#d1495b"),
        ("cuDNN's best plan, fused", "cudnn_fused", "ours_fused", "#edae49"),
    )
    figure, axes = pyplot.subplots(figsize=(9, 1.6 + 0.5 * len(names)), layout="constrained")
    for index, (label, peer, own, color) in enumerate(bars):
        shift = (index - 1) * 0.27
        for row, name in enumerate(names):
            value = ratio(results[name], peer, own, "ms")
            if value is None:
                continue
            axes.barh(
                row + shift, value - 1, 0.27, left=1, color=color, label=label if row == 0 else None
            )
            axes.annotate(f"{value:.2f}", (max(value, 1), row + shift), (3, 0),
                          textcoords="offset points", va="center", fontsize=7)  # fmt: skip
    axes.axvline(1, color="0.2", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel("maxconv is so many times as fast as")
    axes.set_title(
        f"bfloat16, {record['about'].get('gpu', '')}, {record['about'].get('date', '')}",
        fontsize=10,
    )
    axes.legend(loc="lower right", fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Runs a command of the usage above."""
    parser = argparse.ArgumentParser(description="records the GPU benchmark")
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("record", help="merge what the programs printed")
    make.add_argument("record", type=Path)
    make.add_argument("printed", type=Path, nargs="+")
    make.add_argument("--about", nargs="*", default=[], help="name=value, kept in the record")
    show = commands.add_parser("table", help="print a record as Markdown")
    show.add_argument("record", type=Path)
    draw = commands.add_parser("plot", help="draw a record")
    draw.add_argument("record", type=Path)
    draw.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record = read(arguments.printed)
        record["about"] |= dict(item.split("=", 1) for item in arguments.about)
        arguments.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        return
    record = json.loads(arguments.record.read_text(encoding="utf-8"))
    if arguments.command == "table":
        print(tables(record))
    else:
        plot(record, arguments.picture)


if __name__ == "__main__":
    main()
