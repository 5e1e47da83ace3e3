"""The operand encoding, and the Mojo file that states it again."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from maxconv import _fields
from maxconv._fields import (
    GEOMETRY,
    NORM,
    NORM_SCALARS,
    POOLING,
    SCALARS,
    Activation,
    Counted,
    CpuFeature,
    Kernel,
    Layout,
    Precision,
    encode_geometry,
    encode_scalars,
    mojo_source,
)

FIELDS = Path(__file__).resolve().parents[2] / "operations" / "conv" / "fields.mojo"


def test_the_committed_mojo_file_is_the_generated_one() -> None:
    assert FIELDS.read_text(encoding="utf-8") == mojo_source(), "run: python -m maxconv._fields"


def test_the_module_writes_the_file_of_its_checkout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_fields, "__file__", str(tmp_path / "python" / "maxconv" / "_fields.py"))
    assert _fields.main() == 1
    assert "does not exist" in capsys.readouterr().err
    target = tmp_path / "operations" / "conv" / "fields.mojo"
    target.parent.mkdir(parents=True)
    assert _fields.main() == 0
    assert target.read_text(encoding="utf-8") == mojo_source()


def test_every_name_has_the_value_that_python_uses() -> None:
    names = dict(re.findall(r"^comptime (\w+) = (-?\d+)$", mojo_source(), re.MULTILINE))
    expected = {f"GEOMETRY_{name.upper()}": i for i, name in enumerate(GEOMETRY)}
    expected |= {f"SCALAR_{name.upper()}": i for i, name in enumerate(SCALARS)}
    expected |= {f"LAYOUT_{member.name}": member.value for member in Layout}
    expected |= {f"KERNEL_{member.name}": member.value for member in Kernel}
    expected |= {f"ACTIVATION_{member.name}": member.value for member in Activation}
    expected |= {f"FEATURE_{member.name}": member.value for member in CpuFeature}
    expected |= {f"PRECISION_{member.name}": member.value for member in Precision}
    expected |= {f"POOLING_{name.upper()}": i for i, name in enumerate(POOLING)}
    expected |= {f"COUNTED_{member.name}": member.value for member in Counted}
    expected |= {f"NORM_{name.upper()}": i for i, name in enumerate(NORM)}
    expected |= {f"NORM_SCALARS_{name.upper()}": i for i, name in enumerate(NORM_SCALARS)}
    expected |= {"POOLING_LENGTH": 2, "NORM_LENGTH": 2, "NORM_SCALARS_LENGTH": 3}
    expected |= {"GEOMETRY_LENGTH": 35, "SCALARS_LENGTH": 6, "PANEL": 16, "ROW_BYTES": 64}
    expected |= {"COPY_BYTES": 16, "STEM_CHANNELS": 8, "TILE_FILTERS": 8}
    expected |= {"DIAGONAL_CHANNELS": 32, "SEVERAL": -1, "INTERLEAVED": 4}
    assert {name: int(value) for name, value in names.items()} == expected


def test_geometry_has_each_argument_at_its_field() -> None:
    geometry = encode_geometry(
        stride=(2, 3, 4),
        dilation=(5, 6, 7),
        pad_before=(8, 9, 10),
        pad_after=(11, 12, 13),
        filter_size=(14, 15, 16),
        groups=17,
        filter_layout=Layout.FCRS,
        kernel=Kernel.DEPTHWISE,
        activation=Activation.GELU,
        final_activation=Activation.TANH,
        has_bias=True,
        has_residual=True,
        precision=Precision.FLOAT32,
        block=(18, 19, 20),
        crop=(21, 22, 23),
        zero_points=(24, 25, 26),
        batch_last=(True, False),
    )
    assert geometry.dtype == np.int64
    assert dict(zip(GEOMETRY, geometry.tolist(), strict=True)) == {
        "spatial_rank": 3,
        "stride_d": 2, "stride_h": 3, "stride_w": 4,
        "dilation_d": 5, "dilation_h": 6, "dilation_w": 7,
        "pad_before_d": 8, "pad_before_h": 9, "pad_before_w": 10,
        "pad_after_d": 11, "pad_after_h": 12, "pad_after_w": 13,
        "groups": 17,
        "filter_t": 14, "filter_r": 15, "filter_s": 16,
        "filter_layout": 3, "kernel": 4, "activation": 7, "final_activation": 9,
        "has_bias": 1, "has_residual": 1, "precision": 1,
        "block_d": 18, "block_h": 19, "block_w": 20,
        "crop_d": 21, "crop_h": 22, "crop_w": 23,
        "zero_point": 24, "residual_zero_point": 25, "output_zero_point": 26,
        "input_batch_last": 1, "output_batch_last": 0,
    }  # fmt: skip


@pytest.mark.parametrize("rank", [1, 2])
def test_lower_ranks_fill_the_outer_dimensions(rank: int) -> None:
    geometry = encode_geometry(
        stride=(3,) * rank,
        dilation=(4,) * rank,
        pad_before=(5,) * rank,
        pad_after=(6,) * rank,
        filter_size=(7,) * rank,
        block=(8,) * rank,
        crop=(9,) * rank,
    )
    named = dict(zip(GEOMETRY, geometry.tolist(), strict=True))
    missing = 3 - rank
    for fields, inside, outside in (
        (("stride_d", "stride_h", "stride_w"), 3, 1),
        (("dilation_d", "dilation_h", "dilation_w"), 4, 1),
        (("pad_before_d", "pad_before_h", "pad_before_w"), 5, 0),
        (("pad_after_d", "pad_after_h", "pad_after_w"), 6, 0),
        (("filter_t", "filter_r", "filter_s"), 7, 1),
        (("block_d", "block_h", "block_w"), 8, 1),
        (("crop_d", "crop_h", "crop_w"), 9, 0),
    ):
        assert [named[field] for field in fields] == [outside] * missing + [inside] * rank
    assert named["spatial_rank"] == rank


def test_geometry_refuses_lengths_that_differ() -> None:
    with pytest.raises(ValueError, match=r"stride: \(1,\) has 1 entries; .* need 2"):
        encode_geometry(
            stride=(1,), dilation=(1, 1), pad_before=(0, 0), pad_after=(0, 0), filter_size=(3, 3)
        )
    with pytest.raises(ValueError, match=r"filter_size.* 1, 2 or 3 are allowed"):
        encode_geometry(stride=(), dilation=(), pad_before=(), pad_after=(), filter_size=())


def test_scalars_have_each_argument_at_its_field() -> None:
    scalars = encode_scalars(
        beta=0.5,
        activation_parameters=(1.0, 2.0),
        final_parameters=(3.0, 4.0),
        output_factor=5.0,
    )
    assert scalars.dtype == np.float32
    assert dict(zip(SCALARS, scalars.tolist(), strict=True)) == {
        "beta": 0.5,
        "activation_p0": 1.0,
        "activation_p1": 2.0,
        "final_p0": 3.0,
        "final_p1": 4.0,
        "output_factor": 5.0,
    }
