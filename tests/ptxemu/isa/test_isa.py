"""Small kernels give what the ISA says: on the emulator, on a recorded H200, and on a GPU here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.ptxemu.isa import driver, probes
from tests.ptxemu.isa.case import Array, Family, emulate
from tests.ptxemu.isa.families import FAMILIES

RECORDED = Path(__file__).parents[1] / "data" / "isa_h200.npz"

#: Families whose results depend on the order of events are run under more seeds.
SEEDS = dict.fromkeys(("memory", "barriers", "copies", "clusters", "wgmma"), range(3))


@pytest.fixture(scope="module")
def recorded() -> dict[str, Array]:
    with np.load(RECORDED) as archive:
        return {name: archive[name] for name in archive.files}


@pytest.mark.parametrize("name", FAMILIES)
def test_emulator_gives_what_the_isa_says(name: str) -> None:
    family = FAMILIES[name]
    wrong = [
        case.difference(emulate(family.ptx, case, seed))
        for case in family.cases
        for seed in SEEDS.get(name, range(1))
    ]
    assert not [text for text in wrong if text]


@pytest.mark.parametrize("name", FAMILIES)
def test_hardware_gave_what_the_isa_says(name: str, recorded: dict[str, Array]) -> None:
    """Bit for bit; where the ISA bounds an error, the emulator is near the hardware too."""
    family = FAMILIES[name]
    wrong = []
    for case in family.cases:
        output = recorded[f"{name}/{case.name}"]
        wrong.append(case.difference(output))
        if not case.is_exact:
            wrong.append(case.difference(emulate(family.ptx, case, 0), output))
    assert not [text for text in wrong if text]


def test_hardware_leaves_open_what_the_emulator_takes_so(recorded: dict[str, Array]) -> None:
    for case in probes.FAMILY.cases:
        assert not case.difference(recorded[f"probes/{case.name}"])
    windows = next(case for case in probes.FAMILY.cases if case.name == "windows")
    assert not windows.difference(emulate(probes.FAMILY.ptx, windows, 0))


def test_every_case_is_recorded(recorded: dict[str, Array]) -> None:
    families = {**FAMILIES, "probes": probes.FAMILY}
    assert set(recorded) == {f"{n}/{case.name}" for n, f in families.items() for case in f.cases}


def test_a_wrong_bit_is_seen() -> None:
    case = FAMILIES["integer"].cases[0]
    output = case.expected.copy()
    assert not case.difference(output)
    output.view(np.uint8)[7] ^= 1
    assert "1 of" in case.difference(output)
    rough = next(case for case in FAMILIES["floating"].cases if not case.is_exact)
    far = rough.expected * np.float32(1 + 4 * rough.relative)
    assert rough.difference(far)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_a_gpu_gives_what_the_isa_says(name: str) -> None:
    if not driver.is_present():
        pytest.skip("no Hopper GPU")
    family: Family = FAMILIES[name]
    wrong = []
    for case, output, message in driver.outputs(family.ptx, family.cases):
        wrong.append(message if output is None else case.difference(output))
    assert not [text for text in wrong if text]


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(100, 115))
@pytest.mark.parametrize("name", ["memory", "barriers", "copies", "clusters", "wgmma", "warp"])
def test_the_order_of_events_changes_nothing(name: str, seed: int) -> None:
    family = FAMILIES[name]
    wrong = [case.difference(emulate(family.ptx, case, seed)) for case in family.cases]
    assert not [text for text in wrong if text]
