"""What dispatch says, on this machine's GPU, that it would choose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from maxconv._fields import Kernel
from maxconv._gpu import gpu_kernels
from maxconv.explain import explain_choice
from maxconv.problems import load_problems

if TYPE_CHECKING:
    from max.driver import Device

pytestmark = pytest.mark.gpu

HOPPER = {
    "resnet50.stem": "stem",
    "resnet50.conv2_3x3": "sm90",
    "mobilenet.dw_56": "depthwise",
}
OTHERS = HOPPER | {"resnet50.stem": "implicit_gemm", "resnet50.conv2_3x3": "implicit_gemm"}


def test_the_choice_is_the_gpus_own(gpu: Device) -> None:
    expected = HOPPER if gpu.architecture_name.startswith("sm_90") else OTHERS
    for named in load_problems().values():
        kernel, reason = explain_choice(named.problem, dtype="bfloat16", device="gpu")
        assert kernel == expected.get(named.name, kernel), reason
        compiled = gpu_kernels(named.problem, dtype="bfloat16", out_dtype="bfloat16")
        assert Kernel[kernel.upper()] in compiled, named.name
        assert reason
