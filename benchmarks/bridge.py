"""Times a call of a convolution by each way from PyTorch to the kernels, and prints a table.

The ways are ``maxconv.torch``'s functions and modules and MAX's own bridge, ``graph_op`` and
``CustomOpLibrary`` of ``max.experimental.torch``; torch's convolution stands beside them. All take
their turns in one process, as ``benchmarks/protocol.md`` says for ``call``. The first call of each
of MAX's compiles a graph.

    python benchmarks/bridge.py --device cpu --problem resnet50.conv2_3x3
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from max.dtype import DType
from max.experimental.torch import CustomOpLibrary, graph_op
from max.graph import DeviceRef, TensorType, TensorValue
from torch import Tensor
from torch.nn import functional

import maxconv
import maxconv.torch as mt
from maxconv._problem import ConvProblem
from maxconv._problems import find_problem
from maxconv.bench.cpu.peers_torch import Loop
from maxconv.bench.device import DEVICES, TOLERANCE
from maxconv.bench.environment import usable_threads
from maxconv.bench.gpu.clock import Cuda, LaunchRun, distance
from maxconv.bench.timing import interleave

#: Permutations of ``[N, C, H, W]`` to ``[N, H, W, C]``, and back.
LAST, FIRST = (0, 2, 3, 1), (0, 3, 1, 2)


def ways(
    problem: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor
) -> dict[str, Callable[[], Tensor]]:
    """Returns functions that convolve and add the bias, by the name of the way.

    Args:
        problem: The convolution, of two dimensions and with equal padding on both sides.
        x: The activation, channels last.
        weight: The weight, channels last.
        bias: The bias.
    """
    geometry: dict[str, Any] = {
        "stride": problem.stride,
        "padding": problem.pad_before,
        "dilation": problem.dilation,
        "groups": problem.groups,
    }
    module = mt.Conv2d(x.shape[1], weight.shape[0], problem.filter_size, **geometry)
    module = module.to(x.device, x.dtype)
    module.load_state_dict({"weight": weight, "bias": bias})
    return {
        "torch.nn.functional.conv2d": lambda: functional.conv2d(x, weight, bias, **geometry),
        "maxconv.torch.conv2d": lambda: mt.conv2d(x, weight, bias, **geometry),
        "maxconv.torch.Conv2d": lambda: module(x),
        "graph_op": through_graph_op(problem, x, weight, bias),
        "CustomOpLibrary": through_custom_op(x, weight, bias, geometry),
    }


def through_graph_op(
    problem: ConvProblem, x: Tensor, weight: Tensor, bias: Tensor
) -> Callable[[], Tensor]:
    """Returns a call of a graph of static sizes with constant weights; see ``ways``."""
    device = DeviceRef.GPU() if x.is_cuda else DeviceRef.CPU()
    kind = DType[str(x.dtype).removeprefix("torch.")]
    packed = maxconv.pack_filter(weight, "FCRS", groups=problem.groups)
    padding = [size for size in problem.pad_before for _ in range(2)]

    def convolve(x: TensorValue) -> TensorValue:
        return maxconv.conv2d(
            x, packed, problem.stride, problem.dilation, padding, problem.groups, bias
        )

    op = graph_op(
        convolve,
        kernel_library=maxconv.kernel_library(),
        input_types=[TensorType(kind, problem.input_shape, device)],
        output_types=[TensorType(kind, problem.output_shape, device)],
    )

    def call() -> Tensor:
        y = x.new_empty(problem.output_shape)
        op(y, x.permute(LAST))
        return y.permute(FIRST)

    return call


def through_custom_op(
    x: Tensor, weight: Tensor, bias: Tensor, geometry: dict[str, Any]
) -> Callable[[], Tensor]:
    """Returns a call of the registered op, its operands made before; see ``ways``."""
    library = CustomOpLibrary(maxconv.library_path())
    conv = mt.conv_operands(x.shape, weight.shape, **geometry, bias=True, device=x.device)
    op = library.maxconv_conv_gpu if x.is_cuda else library.maxconv_conv_cpu
    op = op[conv.parameters]
    filter = mt.pack_filter(weight, geometry["groups"])

    def call() -> Tensor:
        y = x.new_empty(conv.output_shape)
        op(*conv.arguments(y, x.permute(LAST), filter, bias))
        return y.permute(FIRST)

    return call


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=DEVICES, default="cpu", help="where (default: cpu)")
    parser.add_argument("--problem", default="resnet50.conv2_3x3", help="of tests/problems.yaml")
    parser.add_argument("--dtype", help="storage type (default: float32, on a GPU bfloat16)")
    args = parser.parse_args()
    device, problem = DEVICES[args.device], find_problem(args.problem).problem
    if problem.spatial_rank != 2 or problem.pad_before != problem.pad_after:
        parser.error(f"{problem} is not one of two dimensions that torch's padding describes")
    dtype = args.dtype or device.dtypes[0]
    on_gpu = args.device == "gpu"
    torch.set_num_threads(usable_threads())
    torch.manual_seed(0)
    n, h, w, c = problem.input_shape
    # Outputs of about 1.
    weight = torch.randn(problem.filter_shape("FCRS")) / problem.gemm.k**0.5
    tensors = torch.randn(n, c, h, w), weight, torch.randn(problem.filters)
    x, weight, bias = (
        tensor.to("cuda" if on_gpu else "cpu", getattr(torch, dtype)) for tensor in tensors
    )
    x, weight = (tensor.to(memory_format=torch.channels_last) for tensor in (x, weight))
    with torch.inference_mode():
        calls = ways(problem, x, weight, bias)
        expected = next(iter(calls.values()))().float()
        for call in calls.values():
            distance(call(), expected, TOLERANCE[dtype])
        runs = {
            name: LaunchRun(Cuda(), lambda _, call=call: call(), 1) if on_gpu else Loop(call, 1)
            for name, call in calls.items()
        }
        timings = interleave({name: run.burst for name, run in runs.items()}, device.full)
    print(f"{problem}, {dtype}, {args.device}: microseconds of a call, median (10 %, 90 %)")
    for name, timing in timings.items():
        one = timing.per(runs[name].convolutions)
        median, low, high = (1e6 * time for time in (one.median_s, one.p10_s, one.p90_s))
        print(f"{name:<28} {median:9.1f} ({low:.1f}, {high:.1f})")


if __name__ == "__main__":
    main()
