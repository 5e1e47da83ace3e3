"""Kernels are launched while others run, and wait for them before they touch global memory."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests import overlap, ptx
from tests.documents import ROOT

from maxconv import _inspect as inspect
from maxconv._fields import GPU_KERNELS
from maxconv._targets import HOPPER

NVIDIA = ROOT / "operations" / "nvidia"

#: Kernels that there are not for bfloat16 on Hopper; those of Blackwell are test_sm100.py's.
ELSEWHERE = {"sm100", "dp4a"}

#: What a kernel of the registry launches beside the one of its name.
BESIDE = {"slabs"}


def test_kernels_of_bfloat16_wait(tmp_path_factory: pytest.TempPathFactory) -> None:
    _, printed = ptx.inspect_once(tmp_path_factory)
    files = [Path(line) for line in printed]
    names = {file.stem.split("-")[0] for file in files}
    assert names == {kernel.name.lower() for kernel in GPU_KERNELS} - ELSEWHERE | BESIDE
    overlap.check(files)


@pytest.mark.extended
def test_dp4a_waits(tmp_path: Path) -> None:
    overlap.check(inspect.emit(tmp_path, HOPPER, "int8", "dp4a"))


@pytest.mark.extended
@pytest.mark.parametrize("target", [HOPPER, "sm_120a"])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float8_e4m3fn", "int8"])
def test_kernels_of_other_types_wait(tmp_path: Path, target: str, dtype: str) -> None:
    if target != HOPPER and dtype == "float8_e4m3fn":
        pytest.skip("has no kernels there")
    overlap.check(inspect.emit(tmp_path, target, dtype))


@pytest.mark.extended
def test_no_other_gpu_has_the_instructions(tmp_path: Path) -> None:
    """Ampere refuses them; its launches have no attribute either."""
    files = inspect.emit(tmp_path, "sm_80", "float32", "grouped")
    assert files
    for file in files:
        assert "griddepcontrol" not in file.read_text(encoding="utf-8")


def test_every_launch_overlaps() -> None:
    """There is one place that launches, and nobody has it launch otherwise; but filters are packed
    by a launch that waits as a whole."""
    texts = {
        str(file.relative_to(NVIDIA)): file.read_text(encoding="utf-8")
        for file in NVIDIA.rglob("*.mojo")
    }
    launching = {name for name, text in texts.items() if ".enqueue_function" in text}
    assert launching == {"stream.mojo", "packing.mojo"}
    for folder in (ROOT / "operations", ROOT / "library"):
        for file in folder.rglob("*.mojo"):
            set_to = re.findall(r"\boverlaps = (\w+)", file.read_text(encoding="utf-8"))
            assert set(set_to) == ({"True"} if file.name == "stream.mojo" else set()), file


BODY = """.version 8.4
.target sm_90a
.address_size 64
.visible .entry kernel(.param .u64 at) {{
    .reg .pred %p<2>; .reg .b32 %r<4>; .reg .b64 %rd<3>; .shared .align 4 .b8 own[4];
    ld.param.b64 %rd1, [at];
    mov.b32 %r1, %tid.x;
    setp.eq.b32 %p1, %r1, 0;
    griddepcontrol.launch_dependents;
    {body}
}}
"""


@pytest.mark.parametrize(
    "body",
    [
        "griddepcontrol.wait; ld.global.b32 %r2, [%rd1]; ret;",
        "st.shared.b32 [own], %r1; griddepcontrol.wait; st.global.b32 [%rd1], %r1; ret;",
        "prefetch.tensormap [%rd1]; cp.async.commit_group; griddepcontrol.wait; ret;",
        "@%p1 bra other; griddepcontrol.wait; bra join; other: griddepcontrol.wait;"
        " join: st.global.b32 [%rd1], %r1; ret;",
        "griddepcontrol.wait; again: st.global.b32 [%rd1], %r1; @%p1 bra again; ret;",
    ],
)
def test_what_waits(body: str) -> None:
    assert not overlap.mistakes(BODY.format(body=body))


@pytest.mark.parametrize(
    ("body", "mistake"),
    [
        ("ret;", "ends without griddepcontrol.wait"),
        ("ld.global.b32 %r2, [%rd1]; griddepcontrol.wait; ret;", "ld.global.b32 before"),
        ("ld.b32 %r2, [%rd1]; griddepcontrol.wait; ret;", "ld.b32 before"),
        ("red.global.add.u32 [%rd1], %r1; griddepcontrol.wait; ret;", "red.global.add.u32 before"),
        ("prefetch.global.L2 [%rd1]; griddepcontrol.wait; ret;", "prefetch.global.L2 before"),
        ("cp.async.ca.shared.global [own], [%rd1], 4; griddepcontrol.wait; ret;", "cp.async.ca"),
        ("@%p1 ret; griddepcontrol.wait; ret;", "ends without"),
        ("@%p1 bra out; griddepcontrol.wait; out: ret;", "ends without"),
        ("@%p1 griddepcontrol.wait; ret;", "ends without"),
        (
            "@%p1 bra join; griddepcontrol.wait; join: st.global.b32 [%rd1], %r1;"
            " griddepcontrol.wait; ret;",
            "st.global.b32 before",
        ),
        (
            "again: st.global.b32 [%rd1], %r1; griddepcontrol.wait; @%p1 bra again; ret;",
            "st.global.b32 before",
        ),
    ],
)
def test_what_does_not_wait(body: str, mistake: str) -> None:
    (found,) = overlap.mistakes(BODY.format(body=body))
    assert mistake in found


def test_what_lets_nothing_start() -> None:
    text = BODY.replace("griddepcontrol.launch_dependents;", "").format(
        body="griddepcontrol.wait; ret;"
    )
    assert overlap.mistakes(text) == ["kernel has no griddepcontrol.launch_dependents"]
