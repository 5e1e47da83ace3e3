"""The named problems, and convolutions as a command line writes them."""

import dataclasses
from pathlib import Path

import pytest

from maxconv._problem import ConvProblem
from maxconv._problems import (
    PROBLEMS,
    find_problem,
    load_families,
    load_problems,
    parse_integers,
    parse_padding,
    parse_problem,
)


def write(folder: Path, *entries: str) -> Path:
    path = folder / "problems.yaml"
    path.write_text("problems:\n" + "".join(f"  - {{{entry}}}\n" for entry in entries))
    return path


def test_the_file_names_networks_and_edges() -> None:
    named = load_problems()
    assert PROBLEMS.is_file()
    families = {entry.family for entry in named.values()}
    assert families >= {"resnet50", "vae", "unet", "depthwise", "audio", "video", None}
    assert {entry.problem.spatial_rank for entry in named.values()} == {1, 2, 3}
    assert all(name == entry.name for name, entry in named.items())


def test_fields_reach_the_problem(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: a, bench: odd, input: [2, 9, 11, 6], filters: 8, filter: [3, 4], stride: [2, 3], "
        "dilation: [1, 2], padding: [0, 2, 3, 1], groups: 2",
        "name: b, input: [1, 7, 3], filters: 4, filter: [2]",
    )
    full, plain = load_problems(path).values()
    assert full.family == "odd"
    assert full.problem == ConvProblem(
        batch=2,
        input_size=(9, 11),
        channels=6,
        filters=8,
        filter_size=(3, 4),
        stride=(2, 3),
        dilation=(1, 2),
        pad_before=(0, 3),
        pad_after=(2, 1),
        groups=2,
    )
    assert plain.family is None
    assert plain.problem == parse_problem("1x7x3:4x2")


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (["name: a, filters: 4, filter: [2]"], "problems.yaml: a: misses input"),
        (["filters: 4"], "an entry without a name: misses filter, input, name"),
        (
            ["name: a, input: [1, 7, 3], filters: 4, filter: [2], strides: [2]"],
            "a: strides is no field",
        ),
        (
            ["name: a, input: [1, 7, 3], filters: 4, filter: [2]"] * 2,
            "a: the name stands there twice",
        ),
        (["name: a@2, input: [1, 7, 3], filters: 4, filter: [2]"], "a@2: a name has no @"),
        (["name: a, input: [1, 7, 3], filters: 4, filter: [9]"], "a: filter: w extent 9 .* only 7"),
        (["name: a, input: [1, 7, 3], filters: 4, filter: [2.5]"], "a: filter: .*integers"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, entries: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_problems(write(tmp_path, *entries))


def test_a_batch_behind_a_name() -> None:
    base, large = find_problem("resnet50.conv2_3x3"), find_problem("resnet50.conv2_3x3@64")
    assert large.name == "resnet50.conv2_3x3@64"
    assert large.problem == dataclasses.replace(base.problem, batch=64)
    for name in ("resnet50.conv2_3x3@", "resnet50.conv2_3x3@0", "resnet50.conv2_3x3@064"):
        with pytest.raises(ValueError, match="has no batch behind the @; a positive integer"):
            find_problem(name)
    with pytest.raises(ValueError, match="one shape has one name"):
        find_problem("resnet50.conv2_3x3@1")
    with pytest.raises(ValueError, match=r"'resnet\.stem@8' is not a named problem"):
        find_problem("resnet.stem@8")


def test_the_families_of_a_device() -> None:
    named = load_problems()
    cpu, gpu = load_families("cpu"), load_families("gpu")
    members = [entry for family in cpu.values() for entry in family]
    assert members == [entry for entry in named.values() if entry.family is not None]
    assert list(gpu) == ["resnet50", "vae", "unet", "first", "depthwise", "narrow"]
    for family, entries in gpu.items():
        assert all(entry.family == family for entry in entries)
        assert all(entry.problem == find_problem(entry.name).problem for entry in entries)
    with pytest.raises(ValueError, match="device: 'tpu' has no families; 'cpu' and 'gpu'"):
        load_families("tpu")


def test_a_family_names_problems(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a, input: [1, 7, 3], filters: 4, filter: [2]")
    path.write_text(path.read_text() + "gpu:\n  odd: [a@2, b]\n")
    with pytest.raises(ValueError, match=r"problems\.yaml: gpu: odd: problem: 'b' is not a named"):
        load_problems(path)


def test_one_shape_has_one_name() -> None:
    shapes = [entry.problem for entry in load_problems().values()]
    shapes += [entry.problem for family in load_families("gpu").values() for entry in family]
    names = {entry.name for entry in load_problems().values()}
    names |= {entry.name for family in load_families("gpu").values() for entry in family}
    assert len(set(shapes)) == len(names)


def test_a_name_that_is_close_is_offered() -> None:
    assert find_problem("resnet50.stem").problem.filter_size == (7, 7)
    with pytest.raises(ValueError, match=r"'resnet\.stem' is not a named problem.*resnet50\.stem"):
        find_problem("resnet.stem")
    with pytest.raises(ValueError, match=r"near it: .*resnet50\.stem"):
        find_problem("?")


def test_a_written_problem() -> None:
    problem = parse_problem(
        "2x56x48x64:32x3x5", stride=2, dilation=(1, 2), padding=(0, 1, 2, 3), groups=4
    )
    assert problem == ConvProblem(
        batch=2,
        input_size=(56, 48),
        channels=64,
        filters=32,
        filter_size=(3, 5),
        stride=(2, 2),
        dilation=(1, 2),
        pad_before=(0, 2),
        pad_after=(1, 3),
        groups=4,
    )
    assert parse_problem("1x9x9x9x2:4x3x3x3").spatial_rank == 3


@pytest.mark.parametrize(
    ("text", "groups", "message"),
    [
        ("1x56x56x64", 1, "conv: '1x56x56x64' is not written NxSPATIALxC:KxTAPS"),
        ("1x56x56x64:64x3x3:1", 1, "is not written"),
        ("1x56x56x64:axbxc", 1, "is not written"),
        ("1x56x64:64x3x3", 1, "rank 3"),
        ("1x56x56x64:64x3x3", 0, "groups: 0 is not positive"),
        ("1x56x56x64:64x3x3", 3, "not divisible by groups=3"),
        ("1x2x2x64:64x3x3", 1, "padded input has only 2"),
    ],
)
def test_a_badly_written_problem(text: str, groups: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_problem(text, groups=groups)


def test_integers_and_padding() -> None:
    assert parse_integers("stride", "2") == 2
    assert parse_integers("stride", "2x1") == parse_integers("stride", "2,1") == (2, 1)
    assert parse_integers("stride", "-1x1") == (-1, 1)
    assert parse_padding("same") == "same"
    assert parse_padding("0x1x2x3") == (0, 1, 2, 3)
    for text in ("", "x", "2x", "2.5", "two"):
        with pytest.raises(ValueError, match=f"stride: '{text}' is not written"):
            parse_integers("stride", text)
    with pytest.raises(ValueError, match="padding: 'some' is not written"):
        parse_padding("some")
