"""The benchmark of whole models on a GPU: every way of running a small one, its memory."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

from maxconv.bench.device import GPU  # noqa: E402
from maxconv.bench.models import memory, run  # noqa: E402
from maxconv.bench.models.catalogue import Source  # noqa: E402
from maxconv.bench.models.run import Bench, measure_models  # noqa: E402
from maxconv.bench.models.variants import usable  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.torch]


@pytest.fixture(scope="module", autouse=True)
def cuda() -> None:
    """Skips where PyTorch has no CUDA."""
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU on this machine")


@pytest.mark.parametrize("variant", usable("gpu"))
def test_a_way_of_running_a_model(variant: str) -> None:
    plain = Source(
        "plain",
        "tests.interop.small_models.plain",
        inputs=((3, 9, 7),),
        batches={"gpu": (2,)},
        arguments={},
    )
    quick = dataclasses.replace(GPU.models, pause_s=0, rounds=2)
    bench = Bench("gpu", "bfloat16", quick, [variant])
    (made,) = measure_models([plain], bench, (), lambda _: None)
    (forward,) = made.forwards
    assert forward.missing is None
    assert forward.channels_last
    assert forward.call is not None
    assert forward.error is not None
    # Three roundings to eight bits, of sums of a few times the largest output.
    assert 0 < forward.error < 2.0**-5
    assert forward.kept is not None
    assert forward.peak is not None
    # A replayed graph allocates nothing while it runs.
    assert variant != "captured" or forward.peak == 0
    assert run.measure_starts(bench).keys() == {variant}


def test_memory_is_what_is_held_and_what_a_call_takes() -> None:
    meter = memory.gauge("cuda")
    before = meter.held()
    held = torch.ones(16 << 20, device="cuda")
    after = meter.held()
    assert before is not None
    assert after is not None
    assert after - before == pytest.approx(64 << 20, rel=0.1)
    taken = meter.peak(lambda: torch.ones(8 << 20, device="cuda"))
    assert taken == pytest.approx(32 << 20, rel=0.1)
    del held
