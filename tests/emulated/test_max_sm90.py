"""MAX's own Hopper matmul gives the right product: kernels that are not ours, a known answer."""

from __future__ import annotations

import pytest
from tests.emulated.max_sm90 import Kernel, case, compiled
from tests.ptxemu.isa.case import emulate

from ptxemu import FenceError, MemoryFaultError

#: Rules of the ISA that MAX's kernel does without, as the last tests show.
RELAXED = {"barrier_fences": False, "register_fences": False}


#: MAX's kernels change with its version only.
pytestmark = pytest.mark.extended


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Kernel]:
    """By title."""
    return {kernel.title: kernel for kernel in compiled(tmp_path_factory)}


def test_the_configurations_differ(kernels: dict[str, Kernel]) -> None:
    assert set(kernels) == {"1x1 n128", "2x1 n128", "1x2 n64"}
    assert [k.stores_tiles for _, k in sorted(kernels.items())] == [False, True, True]
    multicast = [title for title, k in kernels.items() if "multicast::cluster" in k.ptx]
    assert sorted(multicast) == ["1x2 n64", "2x1 n128"]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("title", ["1x1 n128", "2x1 n128", "1x2 n64"])
def test_max_multiplies(kernels: dict[str, Kernel], title: str, seed: int) -> None:
    """Bit for bit what float64 says, rounded; so on an H200 (``tests/ptxemu/isa/compiled.py``)."""
    problem = case(kernels[title], seed)
    assert not problem.difference(emulate(kernels[title].ptx, problem, seed, **RELAXED))


def test_max_stores_whole_tiles_without_tiled_stores(kernels: dict[str, Kernel]) -> None:
    """Rows beyond the output are written: no wrong result there, and memory that is another's."""
    kernel = kernels["1x1 n128"]
    with pytest.raises(MemoryFaultError, match=r"a write at global memory .* no variable"):
        emulate(kernel.ptx, case(kernel, 0, rows=200), 0, **RELAXED)


def test_max_publishes_no_barrier_without_a_cluster(kernels: dict[str, Kernel]) -> None:
    """The ISA asks for a fence after mbarrier.init: the emulator says that there is none."""
    kernel = kernels["1x1 n128"]
    with pytest.raises(FenceError, match=r"no fence\.mbarrier_init or fence\.proxy\.async"):
        emulate(kernel.ptx, case(kernel, 0), 0, register_fences=False)
    for title in ("2x1 n128", "1x2 n64"):
        problem = case(kernels[title], 2)
        found = emulate(kernels[title].ptx, problem, 2, register_fences=False)
        assert not problem.difference(found)


@pytest.mark.parametrize("title", ["2x1 n128", "1x2 n64"])
def test_max_clears_sums_behind_the_fence(kernels: dict[str, Kernel], title: str) -> None:
    """LLVM moves the zeros there: ptxas orders what wgmma.fence should."""
    kernel = kernels[title]
    with pytest.raises(FenceError, match=r"written after the latest wgmma\.fence"):
        emulate(kernel.ptx, case(kernel, 0), 0)
