"""Times matrix products as pointwise convolutions beside ``torch.mm``, in turns in one process.

The second matrix is constant: it is packed once, as a layer's weights are. ``torch.mm`` gets it in
both orders of its dimensions, and the faster counts.

    python benchmarks/gemm.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch

from maxconv._fields import Layout, encode_scalars
from maxconv._library_files import Family
from maxconv._native import Call, host
from maxconv._packing import pack_filter
from maxconv.torch._threads import parallel_function
from maxconv.tuner.heron import MatrixProduct, load_operators

OURS = "maxconv"

#: A burst takes at least so many seconds.
_BURST_S = 0.02


def convolution(
    product: MatrixProduct, a: torch.Tensor, b: torch.Tensor, threads: int
) -> tuple[Callable[[], object], torch.Tensor, str]:
    """Returns a call of the convolution, its output, and the kernel that runs."""
    [problem] = product.convolutions
    packed = pack_filter(b.numpy()[:, None], "KSC", dtype="float32").data
    output = torch.empty(product.m, product.n)
    library = host(Family("float32", "float32", "float32", scaled=False))
    call = Call.of(
        tuple(map(int, problem.input_shape)),
        tuple(map(int, problem.output_shape)),
        packed.size,
        problem.geometry(filter_layout=Layout.PACKED),
        encode_scalars(),
    )
    prepared = library.prepare(call)
    # PyTorch's own threads: those of two pools would fight for the cores.
    parallel = parallel_function() if threads > 1 else 0

    def run() -> None:
        addresses = (a.data_ptr(), packed.ctypes.data, 0, 0, 0, output.data_ptr())
        prepared.run(*addresses, threads, parallel)

    kernel, reason = library.explain(prepared, threads)
    tuned = ", tuned" if reason.startswith("tuned: ") else ""
    return run, output, f"{kernel}{tuned}"


def seconds(run: Callable[[], object], calls: int) -> float:
    """Returns the seconds of a call."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def in_turns(ways: Mapping[str, Callable[[], object]], turns: int) -> dict[str, list[float]]:
    """Returns the seconds of a call in each burst; in every other turn the order is reversed."""
    calls = {key: 1 + int(_BURST_S / seconds(way, 1)) for key, way in ways.items()}
    bursts: dict[str, list[float]] = {key: [] for key in ways}
    for turn in range(turns):
        for key in sorted(ways, reverse=bool(turn % 2)):
            bursts[key].append(seconds(ways[key], calls[key]))
    return bursts


def compare(name: str, product: MatrixProduct, threads: int, turns: int) -> str:
    """Returns the line of a product."""
    rng = np.random.default_rng(0)
    a, b = (
        torch.from_numpy(rng.standard_normal(shape, np.float32))
        for shape in ((product.m, product.k), (product.n, product.k))
    )
    turned, theirs = b.t().contiguous(), torch.empty(product.m, product.n)
    own, output, kernel = convolution(product, a, b, threads)
    ways: dict[str, Callable[[], object]] = {
        OURS: own,
        "torch.mm(A, B.t())": lambda: torch.mm(a, b.t(), out=theirs),
        "torch.mm(A, B)": lambda: torch.mm(a, turned, out=theirs),
    }
    for way in ways.values():
        way()
    torch.testing.assert_close(output, theirs, rtol=1e-4, atol=1e-3)
    bursts = in_turns(ways, turns)
    medians = {key: statistics.median(times) for key, times in bursts.items()}
    best = min((key for key in ways if key != OURS), key=medians.__getitem__)
    ratios = [t / o for t, o in zip(bursts[best], bursts[OURS], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    speed = 2e-9 * product.m * product.n * product.k / medians[OURS]
    return (
        f"{name} {product.m}x{product.k}x{product.n}, {threads} threads: {OURS} ({kernel}) "
        f"{medians[OURS] * 1e6:.0f} us, {speed:.0f} GFLOP/s; {best} {medians[best] * 1e6:.0f} us; "
        f"{OURS} is {middle:.2f} times as fast ({low:.2f} to {high:.2f})"
    )


def main() -> None:
    """Prints the times of Heron's matrix products."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shapes", nargs="+", default=["G1", "G3"], help="names of heron.yaml")
    parser.add_argument("--turns", type=int, default=31)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    for name in args.shapes:
        product = load_operators()["gemm"][name]
        assert isinstance(product, MatrixProduct)
        print(compare(name, product, args.threads, args.turns), flush=True)


if __name__ == "__main__":
    main()
