"""The spaces of the kernels: what their rules allow, the kernels take."""

from __future__ import annotations

import random

import pytest
from tests.host.kernel_checks import AVX512

from maxconv import _cli as cli
from maxconv._fields import Kernel
from maxconv._problem import ConvProblem
from maxconv._problems import parse_problem
from maxconv.tuner.model import Model
from maxconv.tuner.rules import RuleKind
from maxconv.tuner.solver import InfeasibleError, Solver
from maxconv.tuner.space import Space, configuration, open_space, open_spaces

#: Problems, with a type and whether there is a residual, that reach the edges of the spaces.
GPU = [
    (parse_problem("1x56x56x64:64x3x3", padding=1), "bfloat16", False),
    (parse_problem("8x14x14x256:1024x1x1"), "float16", True),
    (parse_problem("1x7x7x512:512x3x3", padding=1), "bfloat16", False),
    (parse_problem("2x28x28x128:80x3x3", stride=2, padding=1), "float32", False),
    (parse_problem("1x9x20x96:192x3x5", padding=2, groups=3), "bfloat16", True),
    (parse_problem("2x6x8x8x32:48x3x3x3", padding=1), "int8", False),
]
UNALIGNED = [
    (parse_problem("4x30x30x45:64x3x3", padding=1), "bfloat16", False),
    (parse_problem("4x30x30x64:21x3x3", padding=1), "bfloat16", True),
]
CPU = [
    (parse_problem("1x56x56x64:64x3x3", padding=1), "float32", False),
    (parse_problem("1x14x14x1024:2048x1x1"), "float32", False),
    (parse_problem("1x7x7x512:512x3x3", padding=1), "bfloat16", False),
    (parse_problem("2x28x28x128:80x3x3", stride=2, padding=1), "float32", True),
    (parse_problem("1x19x23x96:192x3x5", padding=2, groups=3), "float16", False),
    (parse_problem("1x224x224x3:64x7x7", stride=2, padding=3), "float32", False),
]
#: Problems of the CPU's other kernels.
CPU_KERNELS = {
    Kernel.WINOGRAD: [
        (parse_problem("1x56x56x64:64x3x3", padding=1), "float32", False),
        (parse_problem("1x7x7x512:512x3x3", padding=1), "bfloat16", True),
        (parse_problem("1x28x28x128:128x3x3", padding=1), "uint8", False),
        (parse_problem("2x5x9x14x50:52x3x2x2", groups=2), "float32", False),
        (parse_problem("1x3x3x5:7x3x3", padding=1), "float32", False),
    ],
    Kernel.WIDENING: [
        (parse_problem("1x56x56x64:64x3x3", padding=1), "uint8", False),
        (parse_problem("1x14x14x1024:2048x1x1"), "int8", True),
        (parse_problem("2x28x28x128:80x3x3", stride=2, padding=1), "uint8", False),
        (parse_problem("1x19x23x96:192x3x5", padding=2, groups=3), "int8", False),
        (parse_problem("1x3199x512:512x3", stride=2), "uint8", False),
        (parse_problem("1x12x20x20x12:3x3x3x3", dilation=(1, 1, 2), padding=1), "uint8", False),
    ],
    Kernel.DEPTHWISE: [
        (parse_problem("1x56x56x144:144x3x3", padding=1, groups=144), "float32", False),
        (parse_problem("2x9x13x19:19x5x5", stride=2, padding=2, groups=19), "uint8", True),
    ],
    Kernel.GROUPED: [
        (parse_problem("1x56x56x128:128x3x3", padding=1, groups=32), "float32", False),
        (parse_problem("2x9x200x32:32x3x3", groups=4), "bfloat16", False),
    ],
    Kernel.FEW_FILTERS: [
        (parse_problem("1x256x256x128:3x3x3", padding=1), "float32", False),
        (parse_problem("4x7x9x40:7x3x3", padding=1), "float16", False),
    ],
}
#: What spaces there are: of each target's first kernel, and of each other one of a CPU.
TARGETS = {
    "sm90": [*GPU, *UNALIGNED],
    "sm100": GPU,
    "cpu": CPU,
    **{f"cpu {kernel.name.lower()}": asked for kernel, asked in CPU_KERNELS.items()},
}


def spaces(target: str) -> list[Space]:
    name, _, kernel = target.partition(" ")
    return [
        open_space(
            *(problem, name),
            dtype=dtype,
            residual=residual,
            units=2 if kernel else None,
            kernel=Kernel[kernel.upper()] if kernel else None,
        )
        for problem, dtype, residual in TARGETS[target]
    ]


def refused(target: str, each: int, seed: int) -> tuple[int, list[str]]:
    """Draws samples of a target's spaces, ``each`` of one; returns how many, and refusals."""
    count, refusals = 0, []
    for place, space in enumerate(spaces(target)):
        drawn = Solver(space.model, seed + place).samples(each)
        for values, judged in zip(drawn, space.judged(drawn), strict=True):
            count += 1
            assert not space.model.violated(values)
            if judged.refusal is not None:
                refusals.append(
                    f"{space.problem}: {configuration(space, values)}: {judged.refusal}"
                )
            else:
                assert judged.counts[space.judge.counts[0]] > 0
    return count, refusals


@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_refuses_no_sample(target: str) -> None:
    count, refusals = refused(target, 500 // len(TARGETS[target]), 1)
    # Some spaces of a CPU's kernels are small: they are drawn whole.
    small = 200 if AVX512 else 250
    assert count > (small if " " in target else 450)
    assert not refusals


@pytest.mark.extended
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernel_refuses_none_of_ten_thousand(target: str) -> None:
    each = -(-10_000 // len(TARGETS[target]))
    count, refusals = refused(target, each, 1000)
    # The CPU's spaces are small: they are drawn whole.
    assert count >= 10_000 or target.startswith("cpu")
    assert not refusals


def solvable(space: Space, values: dict[str, int]) -> bool:
    try:
        Solver(space.model, 1).sample(fixed=values)
    except InfeasibleError:
        return False
    return True


@pytest.mark.parametrize("target", TARGETS)
def test_model_and_kernel_agree_on_neighbours(target: str) -> None:
    """A sample with one field changed is in the space where the kernel takes it, nowhere else."""
    rng = random.Random(7)
    taken = agreed = 0
    for space in spaces(target)[:3]:
        for values in Solver(space.model, 11).samples(12):
            changed = configuration(space, values)
            name = rng.choice(space.model.tunables)
            changed[name] = rng.choice(space.model.variables[name].domain)
            accepted = space.judged([changed])[0].refusal is None
            inside = solvable(space, changed)
            assert accepted or not inside, (str(space.problem), changed)
            taken += accepted
            agreed += accepted and inside
    assert taken > 10
    assert agreed == taken, f"the model refuses {taken - agreed} of {taken} that the kernel takes"


def sm90_row(**fields: int) -> dict[str, int]:
    """A configuration of the table in ``sm90/gemm/candidates.mojo``, whose names are longer."""
    longer = {"m": "block_tile_shape.m", "n": "block_tile_shape.n", "k": "cluster_shape.k"}
    longer |= {"act": "num_act_pipeline_stages", "filter": "num_filter_pipeline_stages"}
    longer |= {"subtile": "epilogue.output_tile_shape.m", "load": "epilogue.num_epi_load_stages"}
    longer |= {"fragment": "epilogue.fragment_size", "tma": "epilogue.tma_store"}
    longer |= {"rows": "epilogue.whole_rows", "cluster_n": "cluster_shape.n"}
    defaults = {"cluster_shape.m": 1, "cluster_shape.n": 1, "cluster_shape.k": 1, "unaligned": 0}
    defaults |= {"num_gather_stages": 0, "epilogue.num_output_stages": 2, "stationary": 0}
    defaults |= {"epilogue.reuse_c": 1, "epilogue.delay_store": 0, "epilogue.whole_rows": 0}
    return defaults | {longer.get(name, name): value for name, value in fields.items()}


@pytest.mark.parametrize(
    "row",
    [
        sm90_row(
            **{"m": 256, "n": 64, "consumers": 2, "cooperative": 0, "swapped": 1, "halo": 8},
            **{"act": 3, "filter": 8, "subtile": 64, "load": 3, "fragment": 8, "tma": 0},
            **{"rows": 1, "split_k": 1},
        ),
        sm90_row(
            **{"m": 160, "n": 64, "consumers": 2, "cooperative": 0, "swapped": 1, "halo": 8},
            **{"act": 4, "filter": 9, "subtile": 32, "load": 5, "fragment": 8, "tma": 0},
            **{"rows": 1, "stationary": 1, "split_k": 1},
        ),
        sm90_row(
            **{"m": 64, "n": 64, "k": 8, "consumers": 1, "cooperative": 1, "swapped": 1},
            **{"act": 8, "filter": 8, "subtile": 64, "load": 4, "fragment": 16, "tma": 1},
            **{"halo": 0, "split_k": 4},
        ),
    ],
)
def test_hand_written_configurations_are_in_the_space(row: dict[str, int]) -> None:
    space = open_space(GPU[0][0], "sm90")
    assert space.kernel is Kernel.SM90
    drawn = Solver(space.model, 1).sample(fixed=row)
    assert configuration(space, drawn) == {name: row[name] for name in space.judge.fields}
    [judged] = space.judged([drawn])
    assert judged.refusal is None
    assert judged.counts["shared_bytes"] == drawn["shared.in_steady"]
    assert judged.counts["accumulators"] == drawn["accumulators"]
    assert 1e-6 < judged.counts["seconds"] < 1e-3


def test_the_kernel_says_why_it_refuses() -> None:
    space = open_space(GPU[0][0], "sm100")
    values = Solver(space.model, 1).sample()
    [judged] = space.judged([{**values, "mma_shape.n": 8}])
    assert judged.refusal is not None
    assert judged.refusal.startswith("mma_shape: N 8 is no multiple of")
    assert not judged.counts
    with pytest.raises(ValueError, match="configuration: cta_group are missing"):
        space.judged([{name: value for name, value in values.items() if name != "cta_group"}])


@pytest.mark.parametrize("target", TARGETS)
def test_every_rule_has_a_kind_and_every_variable_a_field(target: str) -> None:
    space = spaces(target)[0]
    kinds = {rule.kind for rule in space.applied}
    # The direct kernels keep what they keep, whatever their cut is.
    direct = space.kernel in (Kernel.DEPTHWISE, Kernel.GROUPED, Kernel.FEW_FILTERS)
    assert direct or {RuleKind.TENSORIZE, RuleKind.MULTI_LEVEL_SCRATCHPAD} <= kinds
    assert set(space.model.tunables) == set(space.judge.fields)
    assert isinstance(space.model, Model)


@pytest.mark.parametrize(
    ("spec", "target", "dtype", "message"),
    [
        ("1x9x9x3:8x3x3", "sm100", None, "sm100 cannot take it: TMA takes pixels of multiples"),
        ("1x9x9x3:8x3x3", "sm90", None, "unaligned takes more than 8 channels; here 3"),
        ("1x9x9x8:8x3x3", "sm80", None, "target: 'sm80' is not one of cpu, sm90, sm100"),
        ("1x9x9x8:8x3x3", "cpu", "float8_e5m2", "dtype: 'float8_e5m2' is not one of float32, b"),
        ("0x9x9x8:8x3x3", "cpu", None, "has no output to compute"),
    ],
)
def test_a_problem_without_a_space(spec: str, target: str, dtype: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_space(parse_problem(spec), target, dtype=dtype)


def test_a_cpu_has_a_space_of_each_kernel_that_takes_the_problem() -> None:
    deep: ConvProblem = parse_problem("1x9x9x8:8x3x3", groups=8)
    assert [space.kernel for space in open_spaces(deep, "cpu")] == [Kernel.DEPTHWISE]
    assert open_space(deep, "cpu").kernel is Kernel.DEPTHWISE
    with pytest.raises(ValueError, match="implicit_gemm reads filters in panels, which depthwise"):
        open_space(deep, "cpu", kernel=Kernel.IMPLICIT_GEMM)
    with pytest.raises(ValueError, match="kernel: reference is not one of implicit_gemm, "):
        open_space(deep, "cpu", kernel=Kernel.REFERENCE)
    square = parse_problem("1x9x9x8:8x3x3")
    assert [space.kernel for space in open_spaces(square, "cpu")] == [
        *(Kernel.IMPLICIT_GEMM, Kernel.FEW_FILTERS, Kernel.WINOGRAD)
    ]
    with pytest.raises(ValueError, match="has no output to compute"):
        open_spaces(parse_problem("0x9x9x8:8x3x3"), "cpu")


@pytest.mark.parametrize("target", [target for target in TARGETS if target.startswith("cpu")])
def test_a_kernels_own_choice_is_a_configuration(target: str) -> None:
    inside = 0
    for space in spaces(target):
        choice = space.judge.choice()
        assert tuple(choice) == space.judge.fields
        refusal = space.judged([choice])[0].refusal
        # A kernel may choose what leaves its caches, where nothing else fits.
        assert refusal is None or "stay in" in refusal
        inside += solvable(space, choice)
    assert inside >= len(spaces(target)) - 1
    with pytest.raises(ValueError, match="choice: only kernels of a CPU are asked for theirs"):
        spaces("sm100")[0].judge.choice()


def test_strips_have_room_for_what_a_slice_of_padded_filter_rows_reads() -> None:
    """Filter rows of 80 products are filled up to 96: a slice of 80 may read two of them."""
    problem = parse_problem(
        "1x11x20x32:48x3x5", stride=(2, 1), dilation=(1, 2), padding=2, groups=2
    )
    facts = open_space(problem, "cpu", dtype="bfloat16", units=1).judge.facts
    [elements] = [
        row
        for depth, row in zip(facts.row("depths"), facts.rows("strip_elements"), strict=True)
        if depth == 80
    ]
    for rows, count in zip(facts.row("tile_rows"), elements, strict=True):
        columns, channels = rows - 1 + 9, 16
        assert count >= 2 * columns * channels


def test_the_command_shows_the_space(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tune", "resnet50.conv2_3x3", "--target", "sm90", "--units", "114", "--show-space"]
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    lines = shown.splitlines()
    assert lines[1] == "sm90 on sm90, bfloat16 to bfloat16, 114 multiprocessors"
    assert "  tensorize: consumers' parts: wgmma" in lines
    assert "  split_k in {1, 2, 3, 4, 5, 6, 8}" in lines
    assert "23 tunable variables" in lines
    assert lines[-1].startswith("raw space: ")
    assert cli.main(["tune"]) == 1
    assert "problem: none is given" in capsys.readouterr().err
