"""What dispatch says, on this machine's GPU, that it would choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from maxconv._explain import explain_choice
from maxconv._fields import GPU_KERNELS, Kernel
from maxconv._problems import load_problems

if TYPE_CHECKING:
    from max.driver import Device

pytestmark = pytest.mark.gpu

HOPPER = {
    "resnet50.stem": "stem",
    "resnet50.conv2_3x3": "sm90",
    "mobilenet.dw_56": "diagonal",
    "efficientnet.se_reduce": "gemv",
    "odd.few_pixels": "gemv",
}
OTHERS = {
    "resnet50.stem": "implicit_gemm",
    "resnet50.conv2_3x3": "implicit_gemm",
    "mobilenet.dw_56": "depthwise",
    "efficientnet.se_reduce": "gemv",
    "odd.few_pixels": "gemv",
}


def test_the_choice_is_the_gpus_own(gpu: Device) -> None:
    expected = HOPPER if gpu.architecture_name.startswith("sm_90") else OTHERS
    for named in load_problems().values():
        kernel, reason = explain_choice(named.problem, dtype="bfloat16", device="gpu")
        assert kernel == expected.get(named.name, kernel), reason
        assert Kernel[kernel.upper()] in GPU_KERNELS, named.name
        assert reason
