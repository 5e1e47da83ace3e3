"""Geometry, shapes and argument errors of ``ConvProblem`` and of the argument checks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from maxconv import activations
from maxconv._arguments import ConvArguments
from maxconv._checks import (
    LAYOUTS,
    check_at_least,
    check_bias,
    check_device,
    check_dtype,
    check_filter_layout,
    check_residual,
    check_same_dtype,
    filter_shape_parts,
    read_padding,
    spatial_tuple,
)
from maxconv._fields import GEOMETRY, Activation, Kernel, Layout
from maxconv._problem import ConvProblem, GemmShape, output_size
from maxconv.activations import NONE


def problem(**changes: Any) -> ConvProblem:
    """A valid 2-D problem with some arguments changed."""
    arguments: dict[str, Any] = {
        "input_shape": (2, 8, 9, 6),
        "filter_shape": (4, 3, 3, 6),
        "filter_layout": "KRSC",
    }
    return ConvProblem.from_arguments(**(arguments | changes))


def test_importing_the_package_imports_neither_max_nor_torch() -> None:
    code = (
        "import sys, maxconv, maxconv._problem, maxconv._packing, maxconv.activations\n"
        "assert maxconv.__version__ and 'conv2d' in dir(maxconv)\n"
        "print([m for m in ('max', 'torch') if m in sys.modules])"
    )
    run = [sys.executable, "-c", code]
    out = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def test_every_public_name_resolves() -> None:
    import maxconv

    for name in maxconv.__all__:
        assert getattr(maxconv, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'conv4d'"):
        _ = maxconv.conv4d


def test_what_no_user_should_import_begins_with_an_underscore() -> None:
    import maxconv

    (package,) = map(Path, maxconv.__path__)
    public = {path.stem for path in package.glob("*.py") if not path.stem.startswith("_")}
    assert public == {"activations", "nn"}
    assert not [path for path in (package / "torch").glob("*.py") if path.stem[0] != "_"]


# --- Geometry -----------------------------------------------------------------------------------


def test_gemm_flops_and_bytes() -> None:
    p = problem(
        input_shape=(2, 8, 9, 6), filter_shape=(4, 3, 3, 3), groups=2, stride=(2, 1), padding=1
    )
    assert p.output_shape == (2, 4, 9, 4)
    assert p.gemm == GemmShape(m=2 * 4 * 9, n=2, k=27, groups=2)
    assert p.flops == 2 * (2 * 4 * 9) * 4 * 27
    x, w, y = 2 * 8 * 9 * 6, 4 * 27, 2 * 4 * 9 * 4
    assert p.nbytes() == 4 * (x + w + y)
    assert p.nbytes("bfloat16") == 2 * (x + w + y)
    assert p.nbytes("bfloat16", "float32") == 2 * (x + w) + 4 * y
    assert (p.taps, p.spatial_rank, p.group_channels, p.group_filters) == (9, 2, 3, 2)
    assert str(p) == "2x8x9x6 -> 4 3x3 s2x1 p1x1 g2"


def test_kinds() -> None:
    assert problem(filter_shape=(6, 3, 3, 1), groups=6).is_depthwise
    assert not problem(filter_shape=(12, 3, 3, 1), groups=6).is_depthwise
    assert problem(filter_shape=(4, 1, 1, 6)).is_pointwise
    assert not problem(filter_shape=(4, 1, 1, 6), stride=2).is_pointwise
    assert not problem(filter_shape=(4, 1, 1, 6), padding=(0, 1, 0, 0)).is_pointwise
    assert not problem().is_pointwise


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_filter_shapes_of_all_layouts(rank: int) -> None:
    taps = (2, 3, 4)[:rank]
    for layout in LAYOUTS[rank]:
        p = ConvProblem.from_parts(
            (1, *(9,) * rank, 10), filters=6, filter_size=taps, group_channels=5, groups=2
        )
        shape = p.filter_shape(layout)
        assert filter_shape_parts(shape, layout, rank) == (6, taps, 5)
        again = ConvProblem.from_arguments(
            p.input_shape, shape, filter_layout=layout, groups=2, rank=rank
        )
        assert again == p


def test_geometry_operand() -> None:
    p = problem(stride=(2, 3), dilation=(1, 2), padding=(1, 2, 3, 4))
    named = dict(
        zip(
            GEOMETRY,
            p.geometry(
                filter_layout=Layout.RSCF,
                kernel=Kernel.REFERENCE,
                activation=Activation.SILU,
                final_activation=Activation.RELU,
                has_bias=True,
            ).tolist(),
            strict=True,
        )
    )
    assert named["spatial_rank"] == 2
    assert (named["stride_h"], named["stride_w"]) == (2, 3)
    assert (named["dilation_h"], named["dilation_w"]) == (1, 2)
    assert (named["pad_before_h"], named["pad_before_w"]) == (1, 3)
    assert (named["pad_after_h"], named["pad_after_w"]) == (2, 4)
    assert (named["filter_r"], named["filter_s"], named["filter_layout"]) == (3, 3, 2)
    assert (named["kernel"], named["activation"], named["final_activation"]) == (1, 5, 1)
    assert (named["has_bias"], named["has_residual"], named["groups"]) == (1, 0, 1)


def test_empty_batches_and_images_that_only_padding_makes_big_enough() -> None:
    assert problem(input_shape=(0, 8, 9, 6)).output_shape == (0, 6, 7, 4)
    assert problem(input_shape=(1, 0, 1, 6), padding=(2, 1, 1, 1)).output_shape == (1, 1, 1, 4)
    assert problem(input_shape=(0, 8, 9, 6)).flops == 0


# --- Shapes against torch -----------------------------------------------------------------------


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, Any]:
    """Draws arguments that torch takes too: symmetric padding, any rank."""
    rank = draw(st.integers(1, 3))
    per_axis = st.lists(st.integers(1, 4), min_size=rank, max_size=rank).map(tuple)
    groups = draw(st.integers(1, 3))
    return {
        "rank": rank,
        "size": draw(st.lists(st.integers(1, 12), min_size=rank, max_size=rank).map(tuple)),
        "taps": draw(per_axis),
        "stride": draw(per_axis),
        "dilation": draw(per_axis),
        "pads": draw(st.lists(st.integers(0, 4), min_size=rank, max_size=rank).map(tuple)),
        "groups": groups,
        "channels": groups * draw(st.integers(1, 3)),
        "filters": groups * draw(st.integers(1, 3)),
        "batch": draw(st.integers(0, 2)),
    }


def torch_shape(c: dict[str, Any], padding: Any) -> tuple[int, ...]:
    import torch

    function: Callable[..., Any] = getattr(torch.nn.functional, f"conv{c['rank']}d")
    x = torch.empty(c["batch"], c["channels"], *c["size"], device="meta")
    w = torch.empty(c["filters"], c["channels"] // c["groups"], *c["taps"], device="meta")
    y = function(
        x, w, stride=c["stride"], dilation=c["dilation"], padding=padding, groups=c["groups"]
    )
    n, k, *spatial = y.shape
    return (n, *spatial, k)


def ours(c: dict[str, Any], padding: Any, input_shape: Any = None) -> ConvProblem:
    layout = LAYOUTS[c["rank"]][2]
    return ConvProblem.from_arguments(
        input_shape or (c["batch"], *c["size"], c["channels"]),
        (c["filters"], c["channels"] // c["groups"], *c["taps"]),
        filter_layout=layout,
        stride=c["stride"],
        dilation=c["dilation"],
        padding=padding,
        groups=c["groups"],
        rank=c["rank"],
    )


@settings(deadline=None, max_examples=300)
@given(convolutions())
def test_output_shapes_are_torchs(c: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    doubled = tuple(pad for pad in c["pads"] for _ in range(2))
    try:
        expected = torch_shape(c, c["pads"])
    except RuntimeError:
        # torch refuses a filter that is larger than the padded input; so must we.
        with pytest.raises(ValueError, match="enlarge the padding or the input"):
            ours(c, doubled)
        return
    assert ours(c, doubled).output_shape == expected


# torch warns that it copies where it has to pad one side more.
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@settings(deadline=None, max_examples=200)
@given(convolutions())
def test_named_paddings_are_torchs(c: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    c["stride"] = (1,) * c["rank"]
    same = ours(c, "same")
    assert same.output_shape == torch_shape(c, "same")
    assert same.output_size == c["size"]
    for before, after in zip(same.pad_before, same.pad_after, strict=True):
        assert after - before in (0, 1)
    spans = [d * (r - 1) + 1 for d, r in zip(c["dilation"], c["taps"], strict=True)]
    assume(all(span <= size for span, size in zip(spans, c["size"], strict=True)))
    assert ours(c, "valid").output_shape == torch_shape(c, "valid")


@settings(deadline=None, max_examples=150)
@given(convolutions())
def test_symbolic_shapes_become_the_static_ones(c: dict[str, Any]) -> None:
    from max.graph import Dim

    doubled = tuple(pad for pad in c["pads"] for _ in range(2))
    try:
        expected = ours(c, doubled).output_shape
    except ValueError:
        assume(False)
    names = ["a", "b", "c"][: c["rank"]]
    symbolic = ours(c, doubled, (Dim("n"), *map(Dim, names), c["channels"]))
    assert not symbolic.is_static
    values = {"n": c["batch"], **dict(zip(names, c["size"], strict=True))}
    assert [int(Dim(size).substitute(values)) for size in symbolic.output_shape] == list(expected)


def test_symbolic_sizes_stay_static_where_they_can() -> None:
    from max.graph import Dim

    p = problem(input_shape=(Dim("n"), 8, Dim("w"), 6), stride=2, padding=1)
    assert p.output_shape == (Dim("n"), 4, (Dim("w") + 1) // 2, 4)
    assert isinstance(p.output_shape[1], int)
    same = problem(input_shape=(Dim("n"), Dim(8), Dim("w"), 6), padding="same")
    assert same.output_shape == (Dim("n"), 8, Dim("w"), 4)
    assert same.input_size == (8, Dim("w"))
    for name in ("gemm", "flops"):
        with pytest.raises(ValueError, match=r"gemm: .*\(n, 8, w, 6\) is symbolic"):
            getattr(p, name)
    with pytest.raises(ValueError, match=r"nbytes: .* is symbolic; static sizes are needed"):
        p.nbytes()
    assert str(p) == "nx8xwx6 -> 4 3x3 s2x2 p1x1"


def test_symbolic_sizes_compare_equal_with_maxs_own() -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, Graph, TensorType, ops

    cpu = DeviceRef.CPU()
    types = [TensorType(DType.float32, shape, cpu) for shape in (("n", "h", "w", 6), (3, 3, 6, 4))]
    with Graph("shapes", input_types=types) as graph:
        x, w = (value.tensor for value in graph.inputs)
        for stride, dilation, padding in (
            ((1, 1), (1, 1), (1, 1, 1, 1)),
            ((2, 3), (1, 1), (1, 0, 2, 1)),
            ((2, 1), (2, 2), (0, 0, 0, 0)),
            ((3, 2), (1, 2), (4, 4, 4, 4)),
        ):
            theirs = ops.conv2d(x, w, stride, dilation, padding)
            p = ConvProblem.from_arguments(
                x.shape, w.shape, filter_layout="RSCF", stride=stride, dilation=dilation,
                padding=padding,
            )  # fmt: skip
            assert list(p.output_shape) == list(theirs.shape)


def test_output_size_counts_windows() -> None:
    for size, taps, stride, dilation, before, after in (
        (7, 3, 1, 1, 0, 0), (7, 3, 2, 1, 0, 1), (9, 2, 3, 4, 1, 0), (1, 1, 5, 1, 0, 0),
    ):  # fmt: skip
        span = dilation * (taps - 1) + 1
        starts = range(-before, size + after - span + 1, stride)
        assert len(starts) == output_size(
            size, taps=taps, stride=stride, dilation=dilation, pad_before=before, pad_after=after
        )


# --- Errors -------------------------------------------------------------------------------------

BAD_PROBLEMS: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
    ({"stride": (0, 1)}, ValueError, ["stride: (0, 1) has a non-positive entry", "at least 1"]),
    ({"stride": -1}, ValueError, ["stride: (-1, -1)", "at least 1"]),
    ({"stride": (1, 1, 1)}, ValueError, ["stride: (1, 1, 1) has 3 entries", "2 are allowed"]),
    ({"stride": ()}, ValueError, ["stride: () has 0 entries", "2 are allowed"]),
    ({"stride": 1.0}, TypeError, ["stride: 1.0 is a float", "integer"]),
    ({"stride": (1, 1.5)}, TypeError, ["stride: (1, 1.5) holds a float", "integers"]),
    ({"stride": True}, TypeError, ["stride: True is a bool", "integer"]),
    ({"stride": (True, 1)}, TypeError, ["stride: (True, 1) holds a bool", "integers"]),
    ({"stride": "2"}, TypeError, ["stride: '2' is a str", "integer"]),
    ({"stride": None}, TypeError, ["stride: None", "integer"]),
    ({"dilation": (1, 0)}, ValueError, ["dilation: (1, 0) has a non-positive entry"]),
    ({"dilation": (1,)}, ValueError, ["dilation: (1,) has 1 entries", "2 are allowed"]),
    ({"padding": (0, 0, -1, 0)}, ValueError, ["padding: (0, 0, -1, 0) has a negative", "0"]),
    ({"padding": -2}, ValueError, ["padding: (-2, -2, -2, -2) has a negative entry"]),
    ({"padding": (1, 1)}, ValueError, ["padding: (1, 1) has 2 entries", "4 are allowed", "h_be"]),
    ({"padding": (1, 1, 1, 0.5)}, TypeError, ["padding: (1, 1, 1, 0.5) holds a float"]),
    ({"padding": False}, TypeError, ["padding: False is a bool", "'same'"]),
    ({"padding": "full"}, ValueError, ["padding: 'full'", "'same', 'valid'"]),
    ({"padding": "same", "stride": 2}, ValueError, ["padding: 'same' with stride (2, 2)", "1"]),
    ({"groups": 0}, ValueError, ["groups: 0", "at least 1"]),
    ({"groups": 4}, ValueError, ["input: 6 channels are not divisible by groups=4"]),
    ({"groups": 1.0}, TypeError, ["groups: 1.0 holds a float", "integers"]),
    ({"groups": 3, "filter_shape": (4, 3, 3, 2)}, ValueError, ["filter: 4 filters", "groups=3"]),
    ({"filter_shape": (4, 3, 3, 5)}, ValueError, ["filter: 5 channels", "6 channels", "6 are"]),
    ({"filter_shape": (4, 3, 3, 6), "groups": 2}, ValueError, ["6 channels", "3 are needed"]),
    ({"filter_shape": (4, 3, 6)}, ValueError, ["filter: shape (4, 3, 6) has rank 3", "rank 4"]),
    ({"filter_shape": (4, 0, 3, 6)}, ValueError, ["filter: shape (4, 0, 3, 6)", "at least 1"]),
    ({"filter_shape": (0, 3, 3, 6)}, ValueError, ["filter: 0 filters", "at least 1"]),
    ({"filter_layout": "CRSK"}, ValueError, ["filter_layout: 'CRSK'", "KRSC, RSCF, FCRS"]),
    ({"filter_layout": "SCF"}, ValueError, ["filter_layout: 'SCF'", "KRSC, RSCF, FCRS"]),
    ({"filter_layout": 3}, TypeError, ["filter_layout: 3 is a int", "KRSC, RSCF, FCRS"]),
    ({"input_shape": (8, 9, 6)}, ValueError, ["input: shape (8, 9, 6) has rank 3", "rank 4"]),
    ({"input_shape": (2, 8, 9, 0)}, ValueError, ["channels"]),
    ({"input_shape": (-1, 8, 9, 6)}, ValueError, ["input: batch -1 is negative", "at least 0"]),
    ({"input_shape": (1, -8, 9, 6)}, ValueError, ["input: h extent -8 is negative"]),
    ({"input_shape": (1, 8.0, 9, 6)}, TypeError, ["input: 8.0 holds a float", "integers"]),
    (
        {"filter_shape": (4, 5, 3, 6), "dilation": (2, 1)},
        ValueError,
        [
            "filter: h extent 5 with dilation 2 spans 9 but the padded input has only 8; "
            "enlarge the padding or the input"
        ],
    ),
    (
        {"filter_shape": (4, 3, 12, 6), "padding": (0, 0, 1, 1)},
        ValueError,
        [
            "filter: w extent 12 with dilation 1 spans 12 but the padded input has only 11; "
            "enlarge the padding or the input"
        ],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "words"), BAD_PROBLEMS)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as caught:
        problem(**changes)
    assert type(caught.value) is error
    for word in words:
        assert word in str(caught.value)


def test_bad_symbolic_shapes() -> None:
    from max.graph import Dim

    with pytest.raises(ValueError, match=r"filter: shape \(4, r, 3, 6\) has a symbolic spatial"):
        problem(filter_shape=(4, Dim("r"), 3, 6))
    # What the symbols turn out to be is for the kernel to check.
    assert problem(input_shape=(2, Dim("h"), 9, Dim("c"))).channels == 6
    assert problem(filter_shape=(Dim("k"), 3, 3, Dim("c"))).output_shape[-1] == Dim("k")


def test_fields_are_checked_too() -> None:
    good: dict[str, Any] = {
        "batch": 1, "input_size": (8,), "channels": 4, "filters": 2, "filter_size": (3,),
        "stride": (1,), "dilation": (1,), "pad_before": (0,), "pad_after": (0,),
    }  # fmt: skip
    assert ConvProblem(**good).output_shape == (1, 6, 2)
    for change, words in (
        ({"filter_size": ()}, "filter: .* 1, 2 or 3 are allowed"),
        ({"filter_size": (1, 1, 1, 1)}, "filter: .* 4 spatial dimensions; 1, 2 or 3"),
        ({"filter_size": (0,)}, r"filter: \(0,\) has a non-positive entry"),
        ({"input_size": (8, 8)}, r"input: \(8, 8\) has 2 entries; 1 are needed"),
        ({"pad_after": (-1,)}, r"padding: \(-1,\) has a negative entry"),
        ({"groups": -1}, "groups: -1 is not positive; it must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            ConvProblem(**(good | change))
    with pytest.raises(TypeError, match="input: '8' is a str"):
        ConvProblem(**(good | {"input_size": "8"}))


def test_operand_checks() -> None:
    from max.dtype import DType
    from max.graph import DeviceRef, Dim

    check_bias((4,), 4)
    check_bias((Dim("k"),), 4)
    with pytest.raises(ValueError, match=r"^bias: 3 elements, but there are 4 filters$"):
        check_bias((3,), 4)
    with pytest.raises(ValueError, match=r"bias: shape \(4, 1\) has rank 2; rank 1"):
        check_bias((4, 1), 4)
    check_residual((Dim("n"), 8, 8, 4), (2, 8, 8, 4))
    sentence = r"^residual: shape \(2, 8, 1, 4\) must equal the output's shape \(2, 8, 8, 4\)$"
    with pytest.raises(ValueError, match=sentence):
        check_residual((2, 8, 1, 4), (2, 8, 8, 4))
    with pytest.raises(ValueError, match=r"residual: shape \(8, 8, 4\) must equal"):
        check_residual((8, 8, 4), (2, 8, 8, 4))
    assert check_dtype("input", DType.bfloat16) == "bfloat16"
    with pytest.raises(ValueError, match="input: dtype int8 is not supported; float32, bfloat16"):
        check_dtype("input", DType.int8)
    with pytest.raises(ValueError, match="filter: dtype float16 does not match; float32 is"):
        check_same_dtype("filter", "float16", ("float32",), "is the input's")
    check_device("input", DeviceRef.CPU())
    check_device("input", DeviceRef.GPU())
    with pytest.raises(ValueError, match="input: device npu:0 is not supported; cpu, gpu are all"):
        check_device("input", "npu:0")
    with pytest.raises(ValueError, match="groups: -1 is negative; it must be at least 0"):
        check_at_least("groups", -1, 0)


def test_small_readers() -> None:
    from max.graph.type import FilterLayout

    assert spatial_tuple("stride", 3, 3) == (3, 3, 3)
    assert spatial_tuple("stride", [1, 2], 2) == (1, 2)
    assert check_filter_layout(FilterLayout.RSCF, 2) == "RSCF"
    assert check_filter_layout("KTRSC", 3) == "KTRSC"
    with pytest.raises(ValueError, match=r"filter_layout: 'CFRS' .* KRSC, RSCF, FCRS are allowed"):
        check_filter_layout(FilterLayout.CFRS, 2)
    sides = read_padding((1, 2, 3, 4, 5, 6), 3)
    arguments = ConvArguments((1,) * 3, (1,) * 3, sides, 1, NONE, NONE)
    assert arguments.pads((1, 1, 1)) == ((1, 3, 5), (2, 4, 6))
    # One number a dimension is both of its sides'.
    assert ConvArguments((1, 1), (1, 1), (3, 4), 1, NONE, NONE).pads((1, 1)) == ((3, 4), (3, 4))
    assert read_padding("same", 2) is None
    assert ConvArguments((1, 1), (2, 1), None, 1, NONE, NONE).pads((4, 2)) == ((3, 0), (3, 1))


# --- Activations --------------------------------------------------------------------------------


def test_activation_names_and_parameters() -> None:
    parse = activations.parse
    assert parse("activation", None).kind is Activation.NONE
    assert parse("activation", "hardswish") == parse("activation", "hard_swish")
    assert parse("activation", "hardsigmoid") == parse("activation", "hard_sigmoid")
    assert parse("activation", "relu6") == activations.clamp(0, 6)
    assert parse("activation", ("clamp", -1, 2.5)).parameters == (-1.0, 2.5)
    assert parse("activation", ("leaky_relu", 0.2)) == activations.leaky_relu(0.2)
    assert parse("activation", "leaky_relu").parameters[0] == 0.01
    assert parse("activation", ("silu",)).kind is Activation.SILU
    named = {parse("activation", name).kind for name in activations.NAMES}
    assert named == set(Activation) - {Activation.NONE}


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (
            "swish",
            ValueError,
            "final_activation: 'swish' is not an activation; relu, .*tanh, clamp",
        ),
        (("clamp", 1), ValueError, r"final_activation: \('clamp', 1\) is not an activation"),
        (("elu", 1.0), ValueError, r"final_activation: \('elu', 1.0\) is not an activation"),
        (7, TypeError, "final_activation: 7 is a int; relu"),
        ((), TypeError, r"final_activation: \(\) is a tuple"),
        (("clamp", 2, 1), ValueError, r"clamp\(2.0, 1.0\) is empty; the minimum must not"),
        (("leaky_relu", "x"), TypeError, "parameter 'x' is a str; a number"),
        (("leaky_relu", True), TypeError, "parameter True is a bool; a number"),
        (("leaky_relu", float("nan")), ValueError, "a parameter is nan; a number"),
    ],
)
def test_bad_activations(value: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        activations.parse("final_activation", value)
