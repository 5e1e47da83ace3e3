"""What dispatch says that it would choose: on this machine's CPU, and on GPUs that are not here.

One library of bfloat16 answers all of it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.host.kernel_checks import dot_kernels

from maxconv import _cli as cli
from maxconv._explain import DEVICES, explain_choice
from maxconv._fields import CPU_KERNELS, GPU_KERNELS, Kernel, Layout, encode_scalars
from maxconv._library_files import Family
from maxconv._native import Call, GpuTarget, _likely_kernel, chooser
from maxconv._problem import ConvProblem
from maxconv._problems import find_problem, load_problems, parse_problem
from maxconv._targets import BLACKWELL, HOPPER, TARGETS

BFLOAT16 = Family("bfloat16", "bfloat16", "bfloat16", scaled=False)
TYPES_OF_8_BITS = ["int8", "uint8", "float8_e5m2", "float8_e4m3fn"]
HERE = [device for device in DEVICES if device != "gpu"]


def ask(name: str, device: str, **arguments: object) -> tuple[str, str]:
    problem = find_problem(name).problem
    return explain_choice(problem, dtype="bfloat16", device=device, **arguments)  # type: ignore[arg-type] # each call has the right ones


@pytest.mark.parametrize(
    ("name", "device", "kernel", "words"),
    [
        ("mobilenet.dw_56", "cpu", "depthwise", "lanes are channels"),
        ("mobilenet.dw_56", "sm_80", "depthwise", "depthwise 3x3, stride 1"),
        ("mobilenet.dw_56", HOPPER, "diagonal", "diagonal 3x3, stride 1"),
        ("odd.depthwise_dilated", HOPPER, "depthwise", "outputs 3 apart, 1 phases"),
        ("odd.conv1d_depthwise", "sm_80", "depthwise", "outputs 1 apart, 1 phases"),
        ("resnet50.stem", "cpu", "implicit_gemm", "register tile"),
        ("resnet50.stem", "sm_80", "sm80", "tensor cores, loads of single elements"),
        ("resnet50.stem", HOPPER, "stem", "64 filters a tile"),
        ("resnet50.conv2_3x3", "cpu", "winograd", "F(2x2, 3x3)"),
        ("unet.downsample", "cpu", "implicit_gemm", "960 products deep"),
        ("resnet50.conv2_3x3", "sm_100a", "sm100", "by a model that no timing has met"),
        ("resnet50.conv2_3x3", "sm_120a", "sm80", "4 stages, tensor cores; sm90 runs on"),
        ("resnet50.conv2_3x3", HOPPER, "sm90", "by the model"),
        ("resnext.conv2_g32", "cpu", "grouped", "read where they lie"),
        ("resnext.conv2_g32", "sm_80", "grouped", "neighbouring threads"),
        ("resnext.conv2_g32", HOPPER, "diagonal", "diagonal 3x3, stride 1: "),
        ("resnext.conv4_g32", "sm_80", "sm80", "compute capability 9.0 only"),
        ("resnext.conv4_g32", HOPPER, "diagonal", "stride 1, groups of 16 channels: "),
        ("odd.groups_of_2", HOPPER, "diagonal", "diagonal 5x5, stride 1: "),
        ("odd.groups_of_8", HOPPER, "diagonal", "diagonal 3x3, stride 2: "),
        # Groups of other widths, of other filters than channels, or none.
        ("odd.groups_uneven", HOPPER, "grouped", "neighbouring threads"),
        ("odd.groups_wide", HOPPER, "sm80", "here 20 input channels"),
        ("audio.dilated", HOPPER, "sm90", "by the model"),
        ("resnet50.conv2_reduce", HOPPER, "sm90", "us by the model"),
        # Few filters on any GPU, and few channels.
        ("vae.conv_out", HOPPER, "window", "slices of channels"),
        ("vae.conv_out", "sm_80", "few_filters", "slices of channels"),
        ("vae.conv_out", "sm_100a", "sm100", "few_filters does not run on"),
        ("odd.few_filters_dilated", HOPPER, "sm80", "here 4 output channels"),
        ("r2plus1d_18.stem.3@8", HOPPER, "unaligned", "gathered 3"),
        # Few pixels, on any GPU.
        (
            "odd.one_pixel",
            HOPPER,
            "gemv",
            "32 lanes a filter, up to 1 pixels a block, loads of 1 channels",
        ),
        ("odd.one_pixel", "sm_80", "gemv", "CUDA cores"),
        (
            "efficientnet.se_reduce",
            HOPPER,
            "gemv",
            "32 lanes a filter, up to 1 pixels a block, loads of 8",
        ),
        ("efficientnet.se_reduce", "sm_100a", "gemv", "loads of 8 channels"),
        (
            "efficientnet.se_expand",
            HOPPER,
            "gemv",
            "16 lanes a filter, up to 4 pixels a block, loads of 1",
        ),
        ("odd.few_pixels", "sm_120a", "gemv", "up to 8 pixels a block"),
    ],
)
def test_the_choice_and_the_reason(name: str, device: str, kernel: str, words: str) -> None:
    usable = dot_kernels("bfloat16")
    if device == "cpu" and kernel in ("implicit_gemm", "winograd") and usable:
        kernel, words = usable[0], "products deep"
    if device == "cpu" and kernel == "grouped" and "amx" in usable:
        kernel, words = "amx", "products deep"
    chosen, reason = ask(name, device)
    assert chosen == kernel, reason
    assert words in reason


@pytest.mark.parametrize(
    ("conv", "arguments", "fused", "kernel"),
    [
        ("64x224x224x3:768x16x16", {"stride": 16}, False, "sm90"),
        ("64x224x224x4:96x14x14", {"stride": 14}, False, "sm90"),
        # Fused work knows the pixels' coordinates.
        ("64x224x224x3:768x16x16", {"stride": 16}, True, "stem"),
        # 24 bytes of a row are no multiple of 16.
        ("64x224x224x3:96x4x4", {"stride": 4}, False, "stem"),
        # Patches that overlap, have gaps, are dilated, or leave the image's end.
        ("64x224x224x3:768x16x16", {"stride": 8}, False, "stem"),
        ("64x224x224x3:768x8x8", {"stride": 16}, False, "stem"),
        ("64x224x224x3:768x8x8", {"stride": 8, "dilation": (1, 2)}, False, "stem"),
        ("64x224x224x3:768x16x16", {"stride": 16, "padding": 8}, False, "stem"),
        ("64x224x225x3:768x16x16", {"stride": 16}, False, "stem"),
    ],
)
def test_rows_of_patches_are_pixels(
    conv: str, arguments: dict[str, Any], fused: bool, kernel: str
) -> None:
    problem = parse_problem(conv, **arguments)
    chosen, reason = explain_choice(problem, dtype="bfloat16", device=HOPPER, fused_output=fused)
    assert chosen == kernel, reason


@pytest.mark.parametrize(
    ("conv", "stride", "words"),
    [
        # Every multiprocessor has tiles, each of as many multiplies as a block has consumers.
        ("1x24006x1:32x7", 1, "188 tiles of 1x128 pixels, 1 blocks of 1 tiles of filters"),
        # Fewer tiles: blocks share the filters.
        ("1x16000x1:512x16", 8, "32 tiles of 1x63 pixels, 4 blocks of 2 tiles of filters"),
        # Many tiles of many multiplies.
        ("64x224x224x3:64x7x7", 2, "896 tiles of 16x56 pixels, 1 blocks of 1 tiles of filters"),
    ],
)
def test_stems_are_cut_for_every_multiprocessor(conv: str, stride: int, words: str) -> None:
    padding = 3 if "x7x7" in conv else 0
    problem = parse_problem(conv, stride=stride, padding=padding)
    chosen, reason = explain_choice(problem, dtype="bfloat16", device=HOPPER)
    assert chosen == "stem" and words in reason, reason


def test_halves_of_chunks_go_straight_into_rings_where_nothing_is_fused_behind() -> None:
    problem = find_problem("r2plus1d_18.layer3.0.conv2.0.3@8").problem
    for fused, words in ((False, "gathered directly"), (True, "gathered 3")):
        chosen, reason = explain_choice(
            problem, dtype="bfloat16", device=HOPPER, fused_output=fused
        )
        assert chosen == "unaligned" and words in reason, reason


def test_the_kernel_whose_model_says_less_is_chosen() -> None:
    problem = parse_problem("1x14x14x64:64x1x1")
    chosen, reason = explain_choice(problem, dtype="bfloat16", device=HOPPER)
    assert chosen == "sm80"
    assert "us by the model; sm90 takes" in reason


@pytest.mark.parametrize(
    ("conv", "device", "kernel"),
    [
        ("8x512x512x16:1x3x3", HOPPER, "window"),
        ("8x512x512x16:1x3x3", "sm_80", "few_filters"),
        ("8x512x512x16:16x3x3", HOPPER, "window"),
        ("8x512x512x32:16x3x3", HOPPER, "window"),
        ("8x320x320x32:32x3x3", HOPPER, "window"),
        ("8x320x320x32:64x3x3", HOPPER, "window"),
        ("1x320x320x32:64x3x3", HOPPER, "sm90"),
        ("64x56x56x64:64x3x3", HOPPER, "sm90"),
        ("8x65536x32:32x11", HOPPER, "window"),
        ("8x65536x32:32x3", HOPPER, "window"),
        ("16x16384x64:64x11", HOPPER, "window"),
        ("1x16384x64:64x11", HOPPER, "sm90"),
        ("1x1024x1024x128:3x3x3", HOPPER, "window"),
        # Volumes; some filters leave shared memory for windows, some do not.
        ("2x96x96x96x16:16x3x3x3", HOPPER, "window"),
        ("2x96x96x96x16:3x3x3x3", HOPPER, "window"),
        ("8x16x56x56x32:64x3x3x3", HOPPER, "window"),
        ("8x16x56x56x64:64x3x3x3", HOPPER, "sm90"),
        ("8x128x128x64:64x5x5", HOPPER, "sm90"),
        ("8x128x128x256:16x5x5", HOPPER, "window"),
        # One tap.
        ("64x112x112x16:16x1x1", HOPPER, "window"),
        ("2x96x96x96x16:3x1x1x1", HOPPER, "window"),
        ("64x56x56x64:32x1x1", HOPPER, "sm90"),
        ("1x64x64x16:3x1x1", HOPPER, "sm80"),
    ],
)
def test_few_filters_have_kernels(conv: str, device: str, kernel: str) -> None:
    """Each where timings found it faster."""
    problem = parse_problem(conv)
    if problem.taps > 1:
        problem = parse_problem(conv, padding=1)
    chosen, reason = explain_choice(problem, dtype="bfloat16", device=device)
    assert chosen == kernel, reason


@pytest.mark.parametrize(
    ("features", "question", "without", "words"),
    [
        ("amx_bf16,avx512_bf16", "--problem resnet50.conv2_3x3", "winograd", ""),
        ("avx512_bf16", "--problem resnet50.conv2_3x3", "winograd", ""),
        ("", "--problem resnet50.conv2_3x3", "winograd", "F(2x2, 3x3), the "),
        ("", "--conv 1x56x56x64:64x2x2 --padding 1", "winograd", "F(3x3, 2x2), the "),
        ("", "--problem unet.downsample", "implicit_gemm", "register tile "),
    ],
)
def test_a_cpu_multiplies_dot_products_where_it_can(
    features: str, question: str, without: str, words: str
) -> None:
    """In a process of its own, which asks the CPU once."""
    usable = dot_kernels("bfloat16", features={*features.split(",")})
    finished = subprocess.run(
        [
            sys.executable,
            *["-m", "maxconv", "doctor", "--json", "--dtype=bfloat16"],
            *question.split(),
        ],
        env={**os.environ, "MAXCONV_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        check=True,
    )
    answer = json.loads(finished.stdout)["problem"]
    assert answer["kernel"] == (usable or [without])[0]
    if not usable:
        assert answer["reason"].startswith(words)
    if "amx" not in usable and platform.machine() == "x86_64":
        assert "this CPU has no amx_bf16, or MAXCONV_CPU_FEATURES leaves" in answer["reason"]


def kernel_with_features(problem: str, dtype: str, features: str) -> str:
    """Which kernel a CPU chooses that has no more than these features, in another process."""
    finished = subprocess.run(
        [
            sys.executable,
            *["-m", "maxconv", "doctor", "--json", f"--dtype={dtype}"],
            f"--problem={problem}",
        ],
        env={**os.environ, "MAXCONV_CPU_FEATURES": features},
        capture_output=True,
        text=True,
        check=True,
    )
    return str(json.loads(finished.stdout)["problem"]["kernel"])


@pytest.mark.extended
@pytest.mark.parametrize("features", ["amx_int8,avx512_vnni", "avx512_vnni", "avx_vnni", ""])
@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_a_cpu_multiplies_integers_on_its_best_unit(features: str, dtype: str) -> None:
    usable = dot_kernels("int8", features={*features.split(",")})
    assert kernel_with_features("resnet50.conv2_3x3", dtype, features) == [*usable, "winograd"][0]


@pytest.mark.parametrize("features", ["amx_int8,avx512_vnni", "avx512_vnni", ""])
def test_groups_of_16_integers_are_read_in_place(features: str) -> None:
    """Where AVX512-VNNI multiplies: AMX does so faster, and other units read panels of a group."""
    usable = dot_kernels("int8", features={*features.split(",")})
    expected = [*usable, "widening"][0].replace("avx512_vnni", "grouped")
    assert kernel_with_features("resnext.conv4_g32", "int8", features) == expected


@pytest.mark.parametrize("features", ["amx_bf16,avx512_bf16", ""])
@pytest.mark.parametrize("problem", ["resnext.conv2_g32", "resnext.conv3_g32"])
def test_narrow_groups_are_left_to_amx(problem: str, features: str) -> None:
    """Groups of 4 and 8 bfloat16 channels, where it multiplies them."""
    usable = dot_kernels("bfloat16", features={*features.split(",")})
    expected = "amx" if "amx" in usable else "grouped"
    assert kernel_with_features(problem, "bfloat16", features) == expected


@pytest.mark.parametrize("layout", ["NC/4HW4", "NC/32HW32", "C/16HWN16"])
def test_a_cpu_takes_interleaved_layouts(layout: str) -> None:
    usable = dot_kernels("bfloat16")
    problem = find_problem("resnet50.conv2_3x3").problem
    if not usable:
        with pytest.raises(ValueError, match="no kernel takes this convolution of bfloat16"):
            explain_choice(problem, dtype="bfloat16", layout=layout)
        return
    chosen, reason = explain_choice(problem, dtype="bfloat16", layout=layout)
    assert (chosen, "copied" in reason) == (usable[0], True), reason
    with pytest.raises(ValueError, match="takes activations in NHWC; here an interleaved layout"):
        explain_choice(problem, dtype="bfloat16", layout=layout, kernel=Kernel.IMPLICIT_GEMM)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "resnet50.conv2_3x3",
            {"dtype": "int8", "layout": "C/4HWN4", "device": "sm_80"},
            "layout: from C/4HWN4 to C/4HWN4 is not supported on a GPU: no kernel reads neighbour",
        ),
        (
            "resnet50.conv2_3x3",
            {"dtype": "int8", "layout": "NC/32HW32", "device": "sm_90a"},
            "layout: from NC/32HW32 to NC/32HW32 is not supported on a GPU: dp4a reads blocks of 4",
        ),
        (
            "resnet50.conv2_3x3",
            {"layout": "NC/4HW4"},
            "layout: NC/4HW4 takes int8, uint8, bfloat16, float16 on a CPU; here float32",
        ),
        (
            "resnet50.stem",
            {"dtype": "int8", "layout": "NC/16HW16"},
            "layout: NC/16HW16 holds multiples of 16 channels and filters; here 3 and 64",
        ),
        ("resnet50.stem", {"layout": "NC/8HW8"}, "layout: 'NC/8HW8' is not one of NHWC, NC/4HW4"),
    ],
)
def test_layouts_that_are_refused(name: str, given: dict[str, Any], message: str) -> None:
    """Before anything is compiled."""
    with pytest.raises(ValueError, match=message):
        explain_choice(find_problem(name).problem, **given)


@pytest.mark.parametrize(
    ("name", "behind", "alone"),
    [
        ("resnet50.conv2_3x3", "tile 128x128", "tile 128x64"),
        ("resnet50.conv5_3x3", "cluster 1x1x1", "cluster 1x1x4"),
    ],
)
def test_work_behind_the_output_decides_the_tile(name: str, behind: str, alone: str) -> None:
    """Some tiles are compiled only for outputs that another operation reads as they are."""
    assert behind in ask(name, "sm_100a")[1]
    assert behind in ask(name, "sm_100a", fused_output=True)[1]
    assert alone in ask(name, "sm_100a", fused_output=False)[1]


def test_a_block_keeps_the_filters_of_a_group() -> None:
    problem = parse_problem("64x56x56x224:224x3x3", groups=4, padding=1)
    chosen, reason = explain_choice(problem, dtype="bfloat16", device=HOPPER, fused_output=False)
    assert chosen == "sm90" and " stationary" in reason, reason


def test_few_filters_have_narrow_tiles_behind_which_something_is_fused() -> None:
    """A graph compiles no others for them, though the model may find a wide tile a bit faster."""

    def tile(filters: int) -> str:
        problem = ConvProblem.from_parts(
            (8, 28, 28, 512), filters=filters, filter_size=(1, 1), group_channels=512
        )
        reason = explain_choice(problem, dtype="bfloat16", device=HOPPER, kernel=Kernel.SM90)[1]
        return reason.removeprefix("asked for by config=; ").split()[0]

    assert tile(64).endswith("x64")
    assert tile(256).endswith("x128")


def test_threads_store_any_number_of_filters() -> None:
    """TMA stores pixels of whole pieces of 16 bytes, and fused work takes such pieces: a graph adds
    filters to fill them."""
    problem = large(1, 256, 256, 128, filters=35, taps=(3, 3))
    for fused, kernel, words in (
        (False, "unaligned", "whole-row stores"),
        (False, "unaligned", "TMA takes pixels of multiples of 16 bytes; here 35 output channels"),
        (True, "sm90", "by the model"),
    ):
        chosen, reason = explain_choice(
            problem, dtype="bfloat16", device=HOPPER, fused_output=fused
        )
        assert chosen == kernel and words in reason, reason


def assert_interleaved() -> None:
    """The layout that `dp4a` takes, on any GPU, and no other kernel."""
    blocks: dict[str, Any] = {"dtype": "int8", "layout": "NC/4HW4"}
    problem = find_problem("resnet50.conv2_3x3").problem
    for device, tile in (("sm_80", "32 filters x 32"), ("sm_90a", "32 filters x 32")):
        chosen, reason = explain_choice(problem, device=device, **blocks)
        assert (chosen, tile in reason) == ("dp4a", True), reason
        assert "sm80 takes activations in NHWC; here NC/4HW4" in reason
    chosen, reason = explain_choice(problem, device="sm_80", multiprocessors=20, **blocks)
    assert (chosen, "64 filters x 128" in reason) == ("dp4a", True), reason
    for kernel, message in (
        (Kernel.SM80, "sm80 cannot take this convolution: sm80 takes activations in NHWC"),
        (Kernel.REFERENCE, "reference takes activations in NHWC; here NC/4HW4"),
    ):
        with pytest.raises(ValueError, match=message):
            explain_choice(problem, device="sm_80", kernel=kernel, **blocks)
    with pytest.raises(ValueError, match="dp4a takes activations in NC/4HW4; here NHWC"):
        explain_choice(problem, device="sm_80", kernel=Kernel.DP4A, dtype="int8")
    with pytest.raises(ValueError, match="multiples of 4 channels and filters; here 3 and 64"):
        explain_choice(find_problem("resnet50.stem").problem, device="sm_80", **blocks)
    with pytest.raises(ValueError, match="dp4a takes one group; here"):
        explain_choice(find_problem("mobilenet.dw_56").problem, device="sm_80", **blocks)


@pytest.mark.extended
@pytest.mark.parametrize("dtype", TYPES_OF_8_BITS)
def test_types_of_8_bits(dtype: str) -> None:
    problem = find_problem("resnet50.conv2_3x3").problem
    chosen, reason = explain_choice(problem, dtype=dtype, device="sm_100a")
    assert chosen == "sm100", reason
    assert explain_choice(problem, dtype=dtype, device=HOPPER)[0] == "sm90"
    if dtype == "float8_e4m3fn":
        assert explain_choice(problem, dtype=dtype, device="sm_80")[0] == "implicit_gemm"
        return
    if dtype == "uint8":
        assert explain_choice(problem, dtype=dtype, device="sm_80")[0] == "sm80"
        return
    if dtype == "int8":
        # Where TMA takes no pixels, and groups of any width, as no CUDA core's kernel takes it.
        assert explain_choice(problem, dtype=dtype, device="sm_80")[0] == "sm80"
        for name in ("odd.groups_wide", "mobilenet.dw_56", "resnet50.stem", "odd.one_pixel"):
            chosen, reason = explain_choice(find_problem(name).problem, dtype=dtype, device=HOPPER)
            assert chosen == "sm80", reason
        assert_interleaved()
        return
    with pytest.raises(
        ValueError, match=f"dtype {dtype} takes a GPU of compute capability 9.0, 10"
    ):
        explain_choice(problem, dtype=dtype, device="sm_80")


def large(*shape: int, filters: int, groups: int = 1, taps: tuple[int, ...]) -> ConvProblem:
    return ConvProblem.from_parts(
        shape,
        filters=filters,
        filter_size=taps,
        group_channels=shape[-1] // groups,
        groups=groups,
        padding=1 if max(taps) > 1 else 0,
    )


@pytest.mark.parametrize(
    ("problem", "kernel", "words"),
    [
        # More elements than 31 bits count, but pixels and offsets that they hold.
        (large(1, 5888, 5888, 64, filters=64, taps=(3, 3)), "sm90", "by the model"),
        (large(1, 5888, 5888, 64, filters=16, taps=(3, 3)), "window", "by the model"),
        (large(40, 65536, 1024, filters=64, taps=(3,)), "sm90", "by the model"),
        # Pixels.
        (large(1, 65536, 65536, 8, filters=8, taps=(3, 3)), "sm80", "31 bits"),
        (large(1, 65536, 65536, 16, filters=2, taps=(1, 1)), "sm80", "multiples of 16"),
        (large(1, 65536, 65536, 64, filters=64, groups=64, taps=(3, 3)), "grouped", "16 bytes"),
    ],
    ids=["image", "few filters", "signals", "pixels of few channels", "pixels", "depthwise"],
)
def test_more_than_31_bits_count(problem: ConvProblem, kernel: str, words: str) -> None:
    chosen, reason = explain_choice(problem, dtype="bfloat16", device=HOPPER)
    assert chosen == kernel, reason
    assert words in reason


@pytest.mark.parametrize(
    ("pixels", "channels", "words"),
    [
        (8, 28, "32 lanes a filter, up to 8 pixels a block, loads of 1"),
        (64, 28, "8 lanes a filter, up to 8 pixels a block, loads of 1"),
    ],
)
def test_lanes_of_few_pixels(pixels: int, channels: int, words: str) -> None:
    """Where several blocks have pixels, more lanes than pixels add up longer than they load."""
    problem = large(pixels, 1, 1, channels, filters=672, taps=(1, 1))
    kernel, reason = explain_choice(problem, dtype="bfloat16", device=HOPPER)
    assert kernel == "gemv"
    assert words in reason


@pytest.mark.parametrize(
    ("sizes", "device", "kernel"),
    [
        ((8, 2048, 2048), HOPPER, "gemv"),
        ((8, 2048, 2056), HOPPER, "sm90"),
        ((8, 2048, 2056), "sm_100a", "sm100"),
        ((8, 2048, 2056), "sm_80", "gemv"),
        ((8, 2048, 2057), HOPPER, "sm90"),
        ((8, 2049, 2056), "sm_100a", "gemv"),
        ((1, 8192, 8192), HOPPER, "gemv"),
        ((9, 64, 64), HOPPER, "sm80"),
        ((512, 2048, 2048), HOPPER, "sm90"),
    ],
)
def test_products_of_few_pixels(sizes: tuple[int, int, int], device: str, kernel: str) -> None:
    """Pixels, channels, filters: tensor cores multiply what is much, where they take it."""
    pixels, channels, filters = sizes
    problem = large(pixels, 1, 1, channels, filters=filters, taps=(1, 1))
    chosen, reason = explain_choice(problem, dtype="bfloat16", device=device)
    assert chosen == kernel, reason


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (large(1 << 30, 1, 1, 16, filters=16, taps=(1, 1)), "1073741824 images; fewer than 10737"),
        (large(1, 1 << 30, 12, filters=16, taps=(3,)), "an extent with its padding, .* is 10737"),
    ],
)
def test_what_no_kernel_counts(problem: ConvProblem, words: str) -> None:
    with pytest.raises(
        ValueError, match=f"no kernel takes this convolution of bfloat16: .*{words}"
    ):
        explain_choice(problem, dtype="bfloat16", device="sm_80")


@pytest.mark.parametrize("device", HERE)
def test_every_problem_has_a_kernel(device: str) -> None:
    for named in load_problems().values():
        kernel, reason = ask(named.name, device)
        assert Kernel[kernel.upper()] in (CPU_KERNELS if device == "cpu" else GPU_KERNELS)
        assert kernel != "reference"
        assert reason


def test_multiprocessors_decide_the_tile() -> None:
    _, with_few = ask("resnet50.conv2_3x3", "sm_80", multiprocessors=1)
    _, with_many = ask("resnet50.conv2_3x3", "sm_80", multiprocessors=1000)
    assert with_few != with_many
    # Blackwell's share a tile's sum only where there are more of them than tiles.
    few = ask("resnet50.conv5_3x3", "sm_100a", multiprocessors=8, fused_output=False)
    assert "cluster 1x1x1" in few[1]
    stated = TARGETS["sm_80"].multiprocessors
    assert ask("resnet50.conv2_3x3", "sm_80") == ask(
        "resnet50.conv2_3x3", "sm_80", multiprocessors=stated
    )


def test_a_kernel_that_is_asked_for() -> None:
    for device, kernels in (("cpu", CPU_KERNELS), (HOPPER, GPU_KERNELS)):
        assert Kernel.REFERENCE in kernels
        name, reason = ask("resnet50.stem", device, kernel=Kernel.REFERENCE)
        assert name == "reference"
        assert reason.startswith("asked for by config=")


@pytest.mark.parametrize(
    ("name", "device", "kernel", "words"),
    [
        ("resnet50.stem", "cpu", Kernel.STEM, r"stem runs on GPUs .* 9.0 \(H100, H200\) only; "),
        ("resnet50.stem", "cpu", Kernel.SM100, r"sm100 runs on GPUs .* 10.3 \(B200, B300\) only"),
        ("resnet50.stem", "sm_80", Kernel.STEM, r"stem runs on .* 9.0 only \(H100, H200\)"),
        (
            "resnet50.stem",
            "sm_80",
            Kernel.POINTWISE,
            "pointwise runs on CPUs only; here gemv, stem, ",
        ),
        ("resnet50.conv2_3x3", HOPPER, Kernel.STEM, "stem takes .* here 64"),
        ("resnet50.stem", HOPPER, Kernel.DEPTHWISE, "depthwise takes one input channel .* here 3"),
        ("resnet50.stem", "cpu", Kernel.GEMV, "gemv runs on GPUs only; here depthwise, "),
        ("resnet50.stem", HOPPER, Kernel.GEMV, r"filters of one tap, .* here filter \(1, 7, 7\)"),
        ("odd.strided_1x1", HOPPER, Kernel.GEMV, r"leave out no pixel; .* stride \(1, 2, 3\)"),
        ("odd.padded_1x1", HOPPER, Kernel.GEMV, r"without padding, .* \(0, 1, 2\)/\(0, 0, 1\)"),
        ("resnext.conv4_g32", HOPPER, Kernel.GEMV, "gemv takes one group; here 32"),
        ("resnet50.conv2_expand", HOPPER, Kernel.GEMV, "gemv takes up to 1024 pixels; here 3136"),
    ],
)
def test_a_kernel_that_cannot(name: str, device: str, kernel: Kernel, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ask(name, device, kernel=kernel)


def test_bad_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    import max.driver
    from max.graph import Dim

    problem = find_problem("resnet50.stem").problem
    with pytest.raises(ValueError, match="device: 'tpu' is not one of cpu, gpu, sm_80, "):
        explain_choice(problem, device="tpu")
    with pytest.raises(ValueError, match="layout: 'NCHW' is not one of NHWC, NC/4HW4"):
        explain_choice(problem, device="sm_80", layout="NCHW")
    with pytest.raises(ValueError, match="layout: NC/4HW4 holds multiples of 4 channels and"):
        explain_choice(problem, dtype="bfloat16", device="cpu", layout="NC/4HW4")
    with pytest.raises(ValueError, match="layout: NC/4HW4 takes int8 on a GPU; here bfloat16"):
        explain_choice(problem, dtype="bfloat16", device="sm_80", layout="NC/4HW4")
    with pytest.raises(ValueError, match=r"multiprocessors: 3 given, but device cpu has its own"):
        explain_choice(problem, device="cpu", multiprocessors=3)
    with pytest.raises(ValueError, match=r"multiprocessors: 0 is not positive"):
        explain_choice(problem, dtype="bfloat16", device="sm_80", multiprocessors=0)
    with pytest.raises(ValueError, match=r"dtype: dtype float8_e4m3fn is not supported; float32"):
        explain_choice(problem, dtype="float8_e4m3fn", device="cpu")
    symbolic = replace(problem, batch=Dim("n"))
    with pytest.raises(ValueError, match="has symbolic sizes; all must be known"):
        explain_choice(symbolic)
    monkeypatch.setattr(max.driver, "accelerator_count", lambda: 0)
    with pytest.raises(ValueError, match=r"MAX finds no GPU on this machine; name .*\(sm_80, "):
        explain_choice(problem, dtype="float16", device="gpu")


def test_doctor_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["doctor", "--json", "--dtype", "bfloat16", "--problem"]
    finished = subprocess.run(
        [sys.executable, "-m", "maxconv", *command, "mobilenet.dw_56"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    made = json.loads(finished.stdout)["problem"]
    assert (made["target"], made["multiprocessors"]) == ("cpu", None)
    assert (made["kernel"], made["reason"]) == ask("mobilenet.dw_56", "cpu")
    assert cli.main([*command, "resnet50.conv2_3x3", "--target", HOPPER]) == 0
    made = json.loads(capsys.readouterr().out)["problem"]
    assert (made["target"], made["multiprocessors"]) == (HOPPER, 132)
    assert (made["kernel"], made["reason"]) == ask("resnet50.conv2_3x3", HOPPER)
    command = ["doctor", "--dtype", "bfloat16", "--problem", "resnet50.conv2_3x3"]
    assert cli.main([*command, "--target", "sm_80", "--multiprocessors", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    _, reason = ask("resnet50.conv2_3x3", "sm_80", multiprocessors=1)
    assert f"{'target':9} sm_80 with 1 multiprocessors (A100)" in lines
    assert f"{'why':9} {reason}" in lines


@pytest.mark.extended
def test_the_library_chooses_what_is_explained() -> None:
    """PyTorch's calls ask a library of their own."""
    choose = chooser(BFLOAT16).choose
    problems = {name: named.problem for name, named in load_problems().items()}
    for architecture, target in TARGETS.items():
        place = GpuTarget(architecture, target.capability, target.multiprocessors)
        for name, problem in problems.items():
            given = cast("tuple[int, ...]", problem.input_shape)
            made = cast("tuple[int, ...]", problem.output_shape)
            geometry = problem.geometry(filter_layout=Layout.KRSC)
            elements = int(problem.filters) * int(problem.group_channels) * int(problem.taps)
            call = Call.of(given, made, elements, geometry, encode_scalars())
            wanted, _ = ask(name, architecture, fused_output=False)
            assert choose(call, place, aligned=True).name.lower() == wanted, (name, architecture)


@pytest.mark.parametrize(
    ("spec", "groups", "architecture", "kernel"),
    [
        ("8x28x28x64:64x3x3", 1, HOPPER, Kernel.SM90),
        ("8x28x28x45:64x3x3", 1, HOPPER, Kernel.UNALIGNED),
        ("8x28x28x64:230x3x3", 1, HOPPER, Kernel.UNALIGNED),
        # Three channels are the stem kernel's, or patches of sm90.
        ("8x224x224x3:768x16x16", 1, HOPPER, Kernel.SM90),
        ("8x28x28x45:64x3x3", 1, BLACKWELL, Kernel.SM100),
        ("8x28x28x64:64x3x3", 64, HOPPER, None),
        ("8x28x28x64:64x3x3", 1, "sm_80", None),
    ],
)
def test_what_is_built_while_the_choice_is(
    spec: str, groups: int, architecture: str, kernel: Kernel | None
) -> None:
    problem = parse_problem(spec, groups=groups)
    given = cast("tuple[int, ...]", problem.input_shape)
    made = cast("tuple[int, ...]", problem.output_shape)
    geometry = problem.geometry(filter_layout=Layout.KRSC)
    call = Call.of(given, made, 0, geometry, encode_scalars())
    place = GpuTarget(architecture, TARGETS[architecture].capability, 132)
    assert _likely_kernel(BFLOAT16, place, call) is kernel


@pytest.mark.extended
def test_kernels_that_may_be_chosen() -> None:
    kernels = chooser(BFLOAT16).kernels
    anywhere = [Kernel.DEPTHWISE, Kernel.GROUPED]
    last = [Kernel.GEMV, Kernel.SM80]
    assert kernels(80) == [*anywhere, Kernel.FEW_FILTERS, *last]
    hopper = [Kernel.FEW_FILTERS, Kernel.SM90, Kernel.STEM, Kernel.DIAGONAL]
    assert kernels(90) == [*anywhere, *hopper, *last, Kernel.WINDOW, Kernel.UNALIGNED]
    assert kernels(100) == [*anywhere, Kernel.SM100, *last]
