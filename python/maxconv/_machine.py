"""What this machine's CPU is."""

from __future__ import annotations

import functools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

from ._fields import CPU_FEATURES_VARIABLE, CpuFeature

__all__ = ["cpu_features", "cpu_model", "kernel_features"]

# What decides how fast a convolution can be, as Linux names it for x86 and for Arm.
_FEATURES = (
    *("sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512vl"),
    *("avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve", "sve2", "sme"),
)


def cpu_model() -> str:
    """Returns the processor's name as the system gives it."""
    if sys.platform == "darwin":
        return _sysctl("machdep.cpu.brand_string")
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def cpu_features() -> tuple[str, ...]:
    """Returns the instruction sets that matter to a convolution, in Linux's names for them."""
    if sys.platform == "darwin":
        names = {"FEAT_FP16": "asimdhp", "FEAT_DotProd": "asimddp", "FEAT_BF16": "bf16"}
        names |= {"FEAT_I8MM": "i8mm", "FEAT_SME": "sme"}
        has = {"asimd"}
        has |= {name for key, name in names.items() if _sysctl(f"hw.optional.arm.{key}") == "1"}
    else:
        has = _listed_features()
    return tuple(feature for feature in _FEATURES if feature in has)


def kernel_features() -> int:
    """Returns what kernels ask a CPU for and find, a bit for each ``CpuFeature``.

    It is what operations/cpu/features.mojo finds when they run, unless the operating system does
    not permit AMX's tiles.
    """
    allowed = os.environ.get(CPU_FEATURES_VARIABLE)
    return _kernel_features(None if allowed is None else frozenset(re.split(r"[,\s]+", allowed)))


@functools.cache
def _kernel_features(allowed: frozenset[str] | None) -> int:
    if sys.platform != "linux":
        return 0
    names = _listed_features()
    if allowed is not None:
        names &= allowed
    return sum(1 << feature for feature in CpuFeature if feature.linux_name in names)


def _listed_features() -> set[str]:
    """Returns what /proc/cpuinfo says that the CPU has, of x86 or Arm."""
    cpuinfo = _cpuinfo()
    return set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())


def _cpuinfo() -> dict[str, str]:
    """Returns the first processor's entry of /proc/cpuinfo."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _sysctl(name: str) -> str:
    finished = subprocess.run(
        ["/usr/sbin/sysctl", "-n", name], capture_output=True, text=True, check=False
    )
    return finished.stdout.strip()
