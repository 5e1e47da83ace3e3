"""The peak of a CPU: which instruction multiplies a type, its loop, and how fast it is."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tests.host.kernel_checks import FEATURES, build, dot_kernels

import maxconv.torch as mt
from maxconv._native import multiplier
from maxconv.bench.cpu.peak import PeakMeter
from maxconv.torch._threads import parallel_function

INSTRUCTIONS = {
    ("amx", "bfloat16"): "tdpbf16ps",
    ("amx", "float16"): "tdpfp16ps",
    ("amx", "uint8"): "tdpbusd",
    ("avx512_bf16", "bfloat16"): "vdpbf16ps",
    ("avx512_vnni", "uint8"): "vpdpbusd",
    ("avx_vnni", "uint8"): "vpdpbusd",
    ("mmla", "bfloat16"): "bfmmla",
    ("mmla", "uint8"): "usmmla",
}
"""What multiplies in a kernel of `FEATURES`."""


def expected(dtype: str, features: set[str] | None) -> str:
    """What a type gets on this machine, with these features left."""
    found = dot_kernels("int8" if dtype == "uint8" else dtype, features=features)
    if found:
        return INSTRUCTIONS[found[0], dtype]
    if dtype != "uint8":
        return "float32 FMA"
    return "vpmaddwd" if platform.machine() == "x86_64" else "int32 multiply-add"


# Linux alone says what there is.
@pytest.mark.extended
@pytest.mark.skipif(sys.platform != "linux", reason="features are read from /proc/cpuinfo")
@pytest.mark.parametrize("features", [None, "", "avx512_bf16,avx512_vnni"])
def test_the_unit_is_that_of_the_kernel(features: str | None) -> None:
    program = (
        "from maxconv._native import multiplier\n"
        "for dtype in ('float32', 'bfloat16', 'uint8'):\n"
        "    print(multiplier(dtype).unit(1, 0))"
    )
    environment = {key: os.environ[key] for key in os.environ if key != "MAXCONV_CPU_FEATURES"}
    if features is not None:
        environment["MAXCONV_CPU_FEATURES"] = features
    ran = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    left = None if features is None else {*features.split(",")}
    names = [expected(dtype, left) for dtype in ("float32", "bfloat16", "uint8")]
    assert [line.split(",")[0] for line in ran.stdout.splitlines()] == names


def test_every_kernel_of_dot_products_has_an_instruction() -> None:
    assert {kernel for kernel, _ in INSTRUCTIONS} == {*FEATURES}


def test_the_peak_is_above_a_convolution_and_not_far() -> None:
    """By the time of one thread: what other programs take is not in it."""
    meter = PeakMeter("float32", 1, clock=time.thread_time)
    found = meter.peak()
    assert found is None
    x = torch.randn(1, 256, 32, 32).to(memory_format=torch.channels_last)
    conv = mt.Conv2d(256, 256, 1)
    operations = 2 * 32 * 32 * 256 * 256
    before, best = torch.get_num_threads(), 0.0
    torch.set_num_threads(1)
    try:
        with torch.inference_mode():
            for _ in range(40):
                meter.burst()
                for _ in range(40):
                    start = time.thread_time()
                    conv(x)
                    best = max(best, operations / (time.thread_time() - start))
                found = meter.peak()
                assert found is not None
                # Clocks change: another round may find both at the same one.
                if 0.9 * best < found.per_second < 3 * best:
                    break
    finally:
        torch.set_num_threads(before)
    assert found is not None
    assert 0.9 * best < found.per_second < 3 * best, (found, best)
    assert found.threads == 1
    assert found.unit.startswith("float32 FMA")


@pytest.mark.parametrize("dtype", ["float32", "uint8"])
def test_products_are_counted_for_every_thread(dtype: str) -> None:
    loop = multiplier(dtype)
    one = loop.multiply(3, 1, 0)
    assert one > 0
    assert loop.multiply(9, 1, 0) == 3 * one
    if parallel_function():
        assert loop.multiply(3, 2, parallel_function()) == 2 * one


def test_a_call_takes_long_enough() -> None:
    now = 0.0
    slept: list[float] = []
    chunks: list[int] = []
    meter = PeakMeter("float32", 1, clock=lambda: now, sleep=slept.append)

    class Loop:
        """A unit that multiplies a product in a nanosecond."""

        def multiply(self, steps: int, threads: int, parallel: int) -> int:
            nonlocal now
            chunks.append(steps)
            now += steps * 1e-6
            return steps * 1000

        def unit(self, threads: int, parallel: int) -> str:
            return "abacus"

    meter._loop = Loop()  # type: ignore[assignment]
    for _ in range(3):
        meter.burst()
    found = meter.peak()
    assert found is not None
    assert found.per_second == pytest.approx(2e9)
    assert (found.unit, found.calls) == ("abacus", 30)
    # 20 ms a call, once that is known.
    assert chunks[-30:] == [20_000] * 30
    assert len(slept) == 3


LOOP = re.compile(
    r"^(\.LBB\S+):\n((?:(?!\.LBB\S+:)[^\n]*\n)*?)\s*(?:j\w+|b\.\w+|cbnz\s+\w+,)\s+\1\b", re.M
)


def loops(assembly: str) -> list[list[str]]:
    """The instructions of each innermost loop of the functions that measure."""
    found = []
    for body in re.findall(
        r'^"[^"]*multiply_registers[^"]*":\n(.*?)^\.Lfunc_end', assembly, re.M | re.S
    ):
        for _, text in LOOP.findall(body):
            lines = [line.strip().replace("{vex}\t", "{vex} ") for line in text.splitlines()]
            found.append([line for line in lines if line and line[0] not in "#./"])
    return found


@pytest.mark.parametrize(
    ("target", "instructions"),
    [
        (
            ("x86_64-unknown-linux-gnu", "x86-64-v4"),
            {
                # Of whole register tiles.
                "vfmadd231ps": 28,
                "tdpbf16ps": 4,
                "tdpfp16ps": 4,
                "tdpbssd": 4,
                "tdpbusd": 4,
                "vdpbf16ps": 28,
                "vpdpbusd": 28,
                "{vex} vpdpbusd": 12,
                "vpmaddwd": 28,
            },
        ),
        (
            ("aarch64-unknown-linux-gnu", "neoverse-n1"),
            {"fmla": 24, "bfmmla": 24, "smmla": 24, "usmmla": 24, "sdot": 24},
        ),
    ],
    ids=["x86", "arm"],
)
def test_the_loops_only_multiply(
    target: tuple[str, str], instructions: dict[str, int], tmp_path: Path
) -> None:
    triple, cpu = target
    options = ("--target-triple", triple, "--target-cpu", cpu, "--emit", "asm")
    found = loops(build("emit_peak", tmp_path, *options).read_text(encoding="utf-8"))
    for name, count in instructions.items():
        of_it = [loop for loop in found if any(line.split("\t")[0] == name for line in loop)]
        assert of_it, name
        for loop in of_it:
            assert sum(line.split("\t")[0] == name for line in loop) == count
            # Nothing is loaded, and nothing moved from register to register.
            assert not any(re.search(r"mov|\(%|\[", line) for line in loop)
