"""Large outputs ask the system for pages of 2 MiB."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.interop.torch_tensors import draw, last
from torch import Tensor

import maxconv.torch as mt

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not Path("/sys/kernel/mm/transparent_hugepage").exists(),
        reason="the system has no large pages to ask for",
    ),
]

MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) .*?^VmFlags:([^\n]*)", re.M | re.S)

X = last(draw(1, 4, 520, 512))
W, DEPTHWISE = draw(16, 4, 1, 1), draw(4, 1, 3, 3)


def flags(address: int) -> list[str]:
    """What the system notes of the memory at an address."""
    for begin, end, noted in MAPPING.findall(Path("/proc/self/smaps").read_text(encoding="ascii")):
        if int(begin, 16) <= address < int(end, 16):
            return str(noted).split()
    pytest.skip("the system does not tell what it notes of memory")


@pytest.mark.parametrize(
    "make",
    [
        lambda x: mt.conv2d(x, W),
        lambda x: mt.conv2d(x, DEPTHWISE, padding=1, groups=4),
        lambda x: mt.conv2d(x.contiguous(), DEPTHWISE, padding=1, groups=4),
    ],
    ids=["convolution", "depthwise", "channels first"],
)
def test_large_outputs_ask_for_large_pages(make: Callable[[Tensor], Tensor]) -> None:
    output = make(X)
    assert "hg" in flags(output.data_ptr() + output.nbytes // 2)
