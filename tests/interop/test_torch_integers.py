"""Convolutions of 8-bit integers called from PyTorch, exactly, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import maxconv.torch as mt  # noqa: E402 # needs PyTorch
from maxconv.activations import clamp  # noqa: E402 # the same

pytestmark = pytest.mark.torch

CONVOLUTIONS = {1: mt.conv1d, 2: mt.conv2d, 3: mt.conv3d}

ZERO, RESIDUAL_ZERO, OUT_ZERO, BETA, OUT_SCALE = 117, 9, 30, 0.5, 0.25


def integers(*shape: int, dtype: Any) -> Any:
    """Every value of a type."""
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max + 1, shape, dtype=dtype)


def sums_of(x: Any, weight: Any, zero: int, **geometry: Any) -> Any:
    """Exact sums: float64 holds them."""
    convolve = getattr(torch.nn.functional, f"conv{x.dim() - 2}d")
    return convolve(x.double() - zero, weight.double(), **geometry)


@pytest.mark.parametrize(
    ("input", "weight", "geometry"),
    [
        ((2, 37, 11, 9), (40, 37, 3, 3), {"padding": 1}),
        ((1, 24, 7, 8), (24, 1, 5, 5), {"padding": 2, "groups": 24}),
        ((1, 32, 9, 9), (32, 4, 3, 3), {"padding": 1, "groups": 8, "stride": 2}),
        ((1, 64, 9, 9), (64, 16, 3, 3), {"padding": 1, "groups": 4}),
        ((3, 64, 50), (17, 64, 1), {}),
        ((2, 30, 61), (33, 10, 7), {"dilation": 3, "padding": 9, "groups": 3}),
        ((1, 5, 4, 6, 7), (9, 5, 3, 2, 3), {"padding": 1, "stride": (1, 2, 1)}),
    ],
)
@pytest.mark.parametrize("last", [False, True])
def test_integers(
    input: tuple[int, ...], weight: tuple[int, ...], geometry: dict[str, Any], last: bool
) -> None:
    x, w = integers(*input, dtype=torch.uint8), integers(*weight, dtype=torch.int8)
    if last and len(input) == 4:
        x = x.to(memory_format=torch.channels_last)
    convolve = CONVOLUTIONS[len(input) - 2]
    exact = sums_of(x, w, ZERO, **geometry)
    scale = 2.0 ** -torch.randint(11, 15, weight[:1]).float()
    bias = torch.randint(-9, 9, weight[:1]).float()
    residual = integers(*exact.shape, dtype=torch.uint8)
    output = convolve(
        x,
        w,
        bias,
        **geometry,
        activation="relu",
        scale=scale,
        residual=residual,
        beta=BETA,
        residual_zero_point=RESIDUAL_ZERO,
        zero_point=ZERO,
        out_dtype=torch.uint8,
        out_scale=OUT_SCALE,
        out_zero_point=OUT_ZERO,
    )
    each = (-1, *(1,) * (len(input) - 2))
    values = torch.relu(exact * scale.view(each) + bias.view(each))
    values = values + BETA * (residual.double() - RESIDUAL_ZERO)
    wanted = (torch.round(values / OUT_SCALE) + OUT_ZERO).clamp(0, 255)
    assert output.dtype == torch.uint8
    assert torch.equal(output.double(), wanted)
    # The same convolution of signed integers, to floats.
    signed = (x.to(torch.int16) - 128).to(torch.int8)
    output = convolve(signed, w, **geometry, zero_point=ZERO - 128, out_dtype=torch.float32)
    assert torch.equal(output.double(), exact)


@pytest.mark.parametrize(
    ("dtype", "zero", "ends"),
    [
        (torch.int8, -5, [127, -128, 127, -128, 122, -128]),
        (torch.uint8, 5, [255, 0, 255, 0, 132, 0]),
    ],
)
def test_saturation(dtype: Any, zero: int, ends: list[int]) -> None:
    """Values beyond the output's type become its ends, and NaN its least."""
    x, w = torch.full((1, 1, 1, 6), 127, dtype=dtype), torch.ones(6, 1, 1, 1).to(torch.int8)
    factors = [1e30, -1e30, float("inf"), float("nan"), 1.0, -1.0]
    output = mt.conv2d(
        x,
        w,
        scale=torch.tensor(factors),
        out_dtype=dtype,
        out_scale=1.0,
        out_zero_point=zero,
    )
    assert output[0, :, 0, 0].tolist() == ends


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", torch.nn.functional.silu),
        # Limits that are no steps of the output, within those of its type.
        (clamp(-1.3, 2.9), lambda values: values.clamp(-1.3, 2.9)),
        # Beyond the output's type, and beyond 16 bits.
        (clamp(2000, 3000), lambda values: values.clamp(2000, 3000)),
        (clamp(-3000, -2000), lambda values: values.clamp(-3000, -2000)),
    ],
    ids=["silu", "clamp", "above", "below"],
)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize(
    ("filters", "channels", "groups"),
    [(48, 20, 1), (40, 64, 1), (3, 64, 1), (24, 1, 24), (32, 4, 8)],
)
def test_activations_behind_scales(
    activation: Any, function: Any, dtype: Any, filters: int, channels: int, groups: int
) -> None:
    """Scales that are no powers of two round more than once: by a step at most, and only there
    where another rounding is as near."""
    zero, out_zero, out_scale = 3, 17, 0.05
    x = integers(1, channels * groups, 9, 15, dtype=dtype)
    w = integers(filters, channels, 3, 3, dtype=torch.int8)
    scale = torch.rand(filters) * 2e-4 + 1e-5
    bias = torch.randn(filters)
    output = mt.conv2d(
        x,
        w,
        bias,
        padding=1,
        groups=groups,
        activation=activation,
        scale=scale,
        zero_point=zero,
        out_dtype=dtype,
        out_scale=out_scale,
        out_zero_point=out_zero,
    )
    sums = sums_of(x, w, zero, padding=1, groups=groups)
    values = function(sums * scale.double().view(-1, 1, 1) + bias.double().view(-1, 1, 1))
    steps = values / out_scale
    limits = torch.iinfo(dtype)
    wanted = (torch.round(steps) + out_zero).clamp(limits.min, limits.max)
    ties = (steps - torch.floor(steps) - 0.5).abs() < 1e-3
    difference = (output.double() - wanted).abs()
    assert difference.max() <= 1
    assert not difference[~ties].any()


def test_a_compiled_model_has_the_operator() -> None:
    x, w = integers(1, 16, 6, 5, dtype=torch.int8), integers(8, 16, 3, 3, dtype=torch.int8)

    def model(x: Any) -> Any:
        return mt.conv2d(x, w, padding=1, zero_point=-7, out_dtype=torch.float32)

    compiled: Any = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), model(x))


def test_what_only_the_reference_takes() -> None:
    """float32 does not hold every sum of a depthwise filter of so many taps."""
    x, w = integers(1, 4, 30, 30, dtype=torch.uint8), integers(4, 1, 23, 23, dtype=torch.int8)
    geometry: dict[str, Any] = {"padding": 11, "groups": 4}
    scale, out_scale = torch.full((4,), 2.0**-12), 2.0**-2
    output = mt.conv2d(
        x,
        w,
        torch.zeros(4),
        scale=scale,
        out_dtype=torch.uint8,
        out_scale=out_scale,
        **geometry,
    )
    exact = sums_of(x, w, 0, **geometry).double() * 2.0**-10
    assert torch.equal(output, exact.round().clamp(0, 255).to(torch.uint8))
