"""What real networks convolve: the list, and the problems that the benchmark makes of it."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from maxconv._problems import (
    NamedProblem,
    find_problem,
    load_networks,
    load_problems,
    network_problems,
    parse_problem,
)


def listed() -> Mapping[str, NamedProblem]:
    """Returns the shapes of all networks by name."""
    return {
        name: named
        for network in load_networks().values()
        for name, named in network.problems.items()
    }


def write(folder: Path, *entries: str) -> Path:
    path = folder / "networks.yaml"
    networks = (
        "networks:\n  net: {input: 3x9x9, batches: [1, 8]}\n  other: {input: x, batches: [2]}"
    )
    lines = "".join(f"  - {{{entry}}}\n" for entry in entries)
    path.write_text(f"{networks}\nproblems:\n{lines}")
    return path


# The file.


def test_the_file_has_many_networks_and_shapes() -> None:
    networks = load_networks()
    assert len(networks) == 25
    assert len(listed()) >= 200
    assert {batch for network in networks.values() for batch in network.batches} == {
        *(1, 2, 8, 32, 64)
    }
    for name, network in networks.items():
        assert network.name == name
        assert network.input
        assert network.problems
        assert network.counts.keys() == network.problems.keys()
        assert min(network.counts.values()) >= 1


def test_the_file_covers_every_kind() -> None:
    shapes = [named.problem for named in listed().values()]
    assert {shape.spatial_rank for shape in shapes} == {1, 2, 3}
    assert {shape.batch for shape in shapes} == {1}
    assert any(shape.is_depthwise for shape in shapes)
    assert any(shape.groups > 1 and not shape.is_depthwise for shape in shapes)
    assert any(max(shape.stride) > 1 for shape in shapes)
    assert any(max(shape.dilation) > 1 for shape in shapes)
    # torch's functions take no other on a GPU.
    assert all(shape.pad_before == shape.pad_after for shape in shapes)


def test_one_shape_has_one_name() -> None:
    shapes = listed()
    assert len({named.problem for named in shapes.values()}) == len(shapes)
    assert all(name == named.name for name, named in shapes.items())
    assert not shapes.keys() & load_problems().keys()
    assert not load_networks().keys() & load_problems().keys()


def test_a_network_that_people_know() -> None:
    resnet = load_networks()["resnet50"]
    assert resnet.batches == (1, 8, 64)
    assert sum(resnet.counts.values()) == 53
    # ResNeXt's first convolution is the same, and keeps the name.
    shared = load_networks()["resnext50"].problems["resnet50.conv1"]
    assert shared is resnet.problems["resnet50.conv1"]
    assert shared.problem == parse_problem("1x224x224x3:64x7x7", stride=2, padding=3)
    assert shared.family == "resnet50"


def test_fields_reach_the_problem(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "name: net.a, input: [9, 11, 6], filters: 8, filter: [3, 4], stride: [2, 3], "
        "dilation: [1, 2], padding: [1, 1, 2, 2], groups: 2, in: {other: 3, net: 1}",
        "name: net.b, input: [7, 3], filters: 4, filter: [2], in: {net: 2}",
    )
    networks = load_networks(path)
    net, other = networks.values()
    assert (net.input, net.batches, other.batches) == ("3x9x9", (1, 8), (2,))
    assert net.counts == {"net.a": 1, "net.b": 2}
    assert other.counts == {"net.a": 3}
    assert other.problems["net.a"].problem == parse_problem(
        "1x9x11x6:8x3x4", stride=(2, 3), dilation=(1, 2), padding=(1, 1, 2, 2), groups=2
    )
    assert net.problems["net.b"].problem == parse_problem("1x7x3:4x2")
    assert [named.family for named in net.problems.values()] == ["other", "net"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("filters: 4, filter: [2], in: {net: 1}", r"a: misses input$"),
        ("input: [7, 3], filter: [2], in: {net: 1}", r"a: misses filters$"),
        (
            "input: [7, 3], filters: 4, filter: [2], strides: [2], in: {net: 1}",
            "a: strides is no field of a problem",
        ),
        (
            "input: [7, 3], filters: 4, filter: [2], bench: odd, in: {net: 1}",
            "a: bench is no field of a problem",
        ),
        (
            "input: [7, 3], filters: 4, filter: [2], in: {net: 1, nets: 2}",
            r"a: in: \{'net': 1, 'nets': 2\} names no network, or one not listed",
        ),
        ("input: [7, 3], filters: 4, filter: [2]", r"a: in: \{\} names no network"),
        ("input: [7, 3], filters: 4, filter: [9], in: {net: 1}", "a: filter: w extent 9 .* only 7"),
    ],
)
def test_a_bad_entry_is_named(tmp_path: Path, entry: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^networks\.yaml: {message}"):
        load_networks(write(tmp_path, f"name: a, {entry}"))


def test_a_name_that_stands_there_twice(tmp_path: Path) -> None:
    entry = "name: a, input: [7, 3], filters: 4, filter: [2], in: {net: 1}"
    with pytest.raises(ValueError, match=r"networks\.yaml: a: the name stands there twice"):
        load_networks(write(tmp_path, entry, entry))


# The problems.


def test_every_network_at_its_batches() -> None:
    found = network_problems()
    assert len({named.name for named in found}) == len({named.problem for named in found})
    assert len({named.name for named in found}) == len(found)
    wanted = {
        (name, batch)
        for network in load_networks().values()
        for batch in network.batches
        for name in network.problems
    }
    assert {(named.name.partition("@")[0], named.problem.batch) for named in found} == wanted
    shapes = listed()
    for named in found:
        base, _, batch = named.name.partition("@")
        assert int(batch or 1) == named.problem.batch
        assert batch != "1"
        assert named.problem == dataclasses.replace(shapes[base].problem, batch=named.problem.batch)


def test_the_first_that_asks_is_the_family() -> None:
    by_name = {named.name: named.family for named in network_problems()}
    assert by_name["resnet50.conv1@64"] == "resnet50"
    assert list(dict.fromkeys(by_name.values())) == [*load_networks()]
    alone = {named.name: named.family for named in network_problems(["resnext50"])}
    assert alone["resnet50.conv1@64"] == "resnext50"
    assert set(alone.values()) == {"resnext50"}
    # In the order in which they are asked for.
    turned = {named.name: named.family for named in network_problems(["resnext50", "resnet50"])}
    assert turned["resnet50.conv1@64"] == "resnext50"
    assert turned["resnet50.conv1@8"] == "resnet50"


def test_some_batches() -> None:
    small = network_problems(["vit_b16"])
    assert [named.name for named in small] == [
        "vit_b16.conv_proj",
        "vit_b16.conv_proj@8",
        "vit_b16.conv_proj@64",
    ]
    chosen = network_problems(["vit_b16", "whisper_large"], [64, 1])
    assert [named.name for named in chosen] == [
        "vit_b16.conv_proj",
        "vit_b16.conv_proj@64",
        "whisper_large.conv1",
        "whisper_large.conv2",
    ]
    assert {named.family for named in network_problems(batches=[32])} == {
        *("convnext_tiny", "cspdarknet53", "encodec_encoder")
    }


@pytest.mark.parametrize(
    ("networks", "batches", "message"),
    [
        (["resnet"], [], "^family: 'resnet' is no network; resnet50, resnext50, .* are allowed$"),
        ([], [3], "^batch: 3 is no batch of these networks; 1, 2, 8, 32, 64 are allowed$"),
        (
            ["vit_b16", "sd15_unet"],
            [32, 0],
            "^batch: 32, 0 is no batch of these networks; 1, 2, 8, 64 are allowed$",
        ),
    ],
)
def test_what_no_network_has(networks: list[str], batches: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        network_problems(networks, batches)


def test_a_networks_problem_is_found_by_name() -> None:
    named = find_problem("vit_b16.conv_proj")
    assert (named.name, named.family) == ("vit_b16.conv_proj", "vit_b16")
    assert named.problem == parse_problem("1x224x224x3:768x16x16", stride=16)
    large = find_problem("vit_b16.conv_proj@64")
    assert large.name == "vit_b16.conv_proj@64"
    assert large.problem == dataclasses.replace(named.problem, batch=64)
    # Another batch than those that the network is run with is one, too.
    assert find_problem("vit_b16.conv_proj@3").problem.batch == 3
    with pytest.raises(ValueError, match="one shape has one name"):
        find_problem("vit_b16.conv_proj@1")
    with pytest.raises(ValueError, match=r"'vit_b16\.conv_proj@' has no batch behind the @"):
        find_problem("vit_b16.conv_proj@")


def test_a_networks_problem_is_offered() -> None:
    with pytest.raises(ValueError, match=r"not a named problem; near it: vit_b16\.conv_proj"):
        find_problem("vit_b16.conv_prj")
    # What is near to none is near to none of hundreds.
    with pytest.raises(ValueError, match="'zzz' is not a named problem") as raised:
        find_problem("zzz")
    assert str(raised.value).endswith(", ".join(load_problems()))
