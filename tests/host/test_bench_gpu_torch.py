"""torch's contenders on a GPU, and what stands for torch.compile where there are many problems."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from maxconv._problems import NamedProblem, network_problems, parse_problem
from maxconv.bench.device import GPU, LAUNCHES, LIMITS, launches
from maxconv.bench.entrant import BARE, FUSED, WORKS, Key
from maxconv.bench.gpu import peers_torch
from maxconv.bench.gpu.clock import OnHost, input_sets
from maxconv.bench.gpu.operands import Operands
from maxconv.bench.gpu.peers_torch import AS_COMPILED, AS_PRODUCT, AS_ROW, MAKERS, makers

pytestmark = pytest.mark.usefixtures("few_sets")

#: One of each rank; the last one's output has one channel.
PROBLEMS = [
    NamedProblem("one", parse_problem("2x31x8:12x3", stride=2, dilation=2, padding=2)),
    NamedProblem("two", parse_problem("2x5x4x6:8x3x3", padding=1, groups=2)),
    NamedProblem("three", parse_problem("1x3x4x5x4:6x2x3x2", padding=(1, 1, 0, 0, 1, 1))),
    NamedProblem("single", parse_problem("3x4x5x1:1x3x3")),
]

TOLERANCE = 2.0**-6


def overwrite(y: Tensor, bias: Tensor, residual: Tensor) -> None:
    """Does what the kernel does, in the order of memory as the kernel does it."""
    flat = y.movedim(1, -1)
    assert flat.is_contiguous()
    assert residual.movedim(1, -1).is_contiguous()
    made = functional.silu(flat.float() + bias.float()) + residual.movedim(1, -1).float()
    flat.copy_(made)


@pytest.mark.parametrize("named", PROBLEMS, ids=lambda named: named.name)
def test_what_torch_compile_makes(named: NamedProblem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_torch, "_pointwise", lambda *_: overwrite)
    made = Operands(named, "bfloat16", OnHost())
    entrant = MAKERS[Key("torch.compile", FUSED, AS_COMPILED)](made)
    assert entrant is not None
    assert entrant.note.startswith("what torch.compile makes, compiled by hand")
    expected = made.references()[FUSED]
    for _, run in entrant.runs():
        assert run.error(expected, TOLERANCE) < TOLERANCE
        assert run.convolutions == LAUNCHES
        assert len(run.burst(2)) == 1


def test_an_output_that_torch_stores_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_torch, "_pointwise", lambda *_: overwrite)
    made = Operands(PROBLEMS[1], "bfloat16", OnHost())

    def convolve(self: Operands, index: int) -> Tensor:
        return self.convolution(self.x[index], self.filter[index], None).contiguous()

    monkeypatch.setattr(Operands, "convolve", convolve)
    entrant = MAKERS[Key("torch.compile", FUSED, AS_COMPILED)](made)
    assert entrant is not None
    assert entrant.note.endswith("with a copy to channels last between")
    (_, run), _ = entrant.runs()
    assert run.error(made.references()[FUSED], TOLERANCE) < TOLERANCE


def test_one_dimension_as_a_row() -> None:
    make = MAKERS[Key("torch", BARE, AS_ROW)]
    for named in PROBLEMS:
        made = Operands(named, "bfloat16", OnHost())
        entrant = make(made)
        assert (entrant is None) == (named.problem.spatial_rank != 1)
        if entrant is not None:
            assert entrant.kernel is not None
            assert entrant.kernel.error(made.references()[BARE], TOLERANCE) < TOLERANCE


def test_a_product_by_cublas() -> None:
    """Of matrices, of a matrix and a vector, and of a batch, in the memory of the convolution."""
    make = MAKERS[Key("torch", BARE, AS_PRODUCT)]
    gemm, gemv, bmm = (
        NamedProblem("gemm", parse_problem("1x31x8:12x1"), "gemm"),
        NamedProblem("gemv", parse_problem("1x1x8:12x1"), "gemv"),
        NamedProblem("bmm", parse_problem("1x31x24:12x1", groups=3), "bmm"),
    )
    for named in (gemm, gemv, bmm):
        made = Operands(named, "bfloat16", OnHost())
        entrant = make(made)
        assert entrant is not None
        assert entrant.kernel is not None
        assert entrant.kernel.error(made.references()[BARE], TOLERANCE) < TOLERANCE
    # Of a network people call torch's convolution.
    assert make(Operands(replace(gemm, family="vit_b16"), "bfloat16", OnHost())) is None


def test_who_takes_part_among_hundreds() -> None:
    every = makers(GPU.works, WORKS)
    assert list(every) == list(MAKERS)
    assert set(makers(GPU.of_many, WORKS, many=True)) == {
        Key("torch", BARE),
        Key("torch", BARE, AS_ROW),
        Key("torch", BARE, AS_PRODUCT),
        Key("torch.compile", FUSED, AS_COMPILED),
    }
    assert set(makers(["torch"], WORKS, many=True)) == {
        Key("torch", BARE),
        Key("torch", BARE, AS_ROW),
        Key("torch", BARE, AS_PRODUCT),
        Key("torch", FUSED),
    }
    assert set(makers(["cudnn", "torch"], [FUSED], many=True)) == {
        Key("torch", FUSED),
        Key("cudnn", FUSED),
    }


def test_hundreds_of_problems_are_launched_less() -> None:
    limits = LIMITS["NVIDIA H200"]
    for flops, nbytes, sets, many, expected in (
        (limits.flops, 1, 3, False, LAUNCHES),
        (limits.flops, 1, 3, True, 4),
        (limits.flops, 1, 20, True, 20),
        (1, limits.nbytes * 1e-4, 8, True, 15),
        (1, 1, 1, True, LAUNCHES),
    ):
        assert launches(flops, nbytes, sets, many=many) == expected
    # Every set has its turn.
    for named in network_problems():
        problem = named.problem
        nbytes = problem.nbytes("bfloat16")
        sets = input_sets(nbytes)
        assert sets <= launches(problem.flops, nbytes, sets, many=True) <= LAUNCHES
    made = Operands(PROBLEMS[1], "bfloat16", OnHost(), many=True)
    assert made.launches == LAUNCHES


def test_a_reference_that_cudnn_takes_in_torchs_order_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Operands(PROBLEMS[2], "bfloat16", OnHost())
    expected = made.references()
    real = Operands.convolution

    def convolution(self: Operands, x: Tensor, filter: Tensor, bias: Tensor | None) -> Tensor:
        if not x.is_contiguous():
            raise RuntimeError("GET was unable to find an engine to execute this computation")
        return real(self, x, filter, bias)

    monkeypatch.setattr(Operands, "convolution", convolution)
    for work, found in made.references().items():
        assert torch.allclose(found, expected[work], atol=1e-5)


def test_the_sets_differ() -> None:
    made = Operands(PROBLEMS[1], "bfloat16", OnHost())
    for first, second in (made.x, made.filter, made.residual):
        assert not torch.equal(first, second)
        assert first.stride() == second.stride()
        assert torch.equal(first.flatten().sort()[0], second.flatten().sort()[0])


# The kernel, where there is no Triton.


@pytest.fixture
def pointwise(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with a Triton whose kernels note their launches."""
    launched: list[tuple[Any, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def run(
                y: Tensor, bias: Tensor, residual: Tensor, *numbers: int, num_warps: int
            ) -> None:
                launched.append((*grid, *numbers, num_warps))

            return run

    triton, language = ModuleType("triton"), ModuleType("triton.language")
    monkeypatch.setattr(triton, "jit", lambda _: Kernel(), raising=False)
    monkeypatch.setattr(language, "constexpr", int, raising=False)
    monkeypatch.setitem(sys.modules, "triton", triton)
    monkeypatch.setitem(sys.modules, "triton.language", language)
    name = "maxconv.bench.gpu.pointwise"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield SimpleNamespace(module=importlib.import_module(name), launched=launched)
    sys.modules.pop(name, None)


def test_the_configurations(pointwise: Any) -> None:
    configurations = pointwise.module.configurations
    assert configurations(1 << 20) == [(1024, 4), (512, 8)]
    assert configurations((1 << 16) + 1) == [(1024, 4), (512, 8)]
    assert configurations(1 << 16) == [(512, 2), (256, 4)]
    assert configurations(1000) == [(256, 1), (128, 2)]
    assert configurations(100) == [(128, 1), (128, 2)]
    assert configurations(3) == [(4, 1)]
    assert configurations(1) == [(1, 1)]


def test_the_faster_configuration(pointwise: Any) -> None:
    class Times(OnHost):
        times = iter([9.0, 3.0, 9.0, 2.0])

        def elapsed(self, run: Any, times: int) -> float:
            run()
            return next(self.times)

    y, bias = torch.zeros(2, 24, 100, 50), torch.zeros(24)
    fuse = pointwise.module.fastest(Times(), y, bias, y)
    first, second = (235, 240_000, 24, 1024, 4), (469, 240_000, 24, 512, 8)
    assert set(pointwise.launched) == {first, second}
    pointwise.launched.clear()
    fuse(y, bias, y)
    assert pointwise.launched == [second]


def test_more_elements_than_the_kernel_counts(pointwise: Any) -> None:
    y = torch.zeros(1).expand(1 << 31)
    with pytest.raises(ValueError, match="2147483648 elements; fewer than 2\\^31 are allowed"):
        pointwise.module.fastest(OnHost(), y, y, y)


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "maxconv.bench.gpu.pointwise", raising=False)
    made = Operands(PROBLEMS[1], "bfloat16", OnHost())
    with pytest.raises(ImportError, match="triton"):
        MAKERS[Key("torch.compile", FUSED, AS_COMPILED)](made)
