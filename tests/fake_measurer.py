"""A measurer of the tuner's searches that measures nothing: its times are a formula's."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace

from maxconv.tuner.measure import Measurer, Outcome
from maxconv.tuner.measure.base import DISPATCHED, Configuration
from maxconv.tuner.measure.cuts import CutRequest, measure_cuts
from maxconv.tuner.solver import Solver
from maxconv.tuner.space import Space, configuration


class FakeMeasurer(Measurer):
    """Times a configuration of the CPU by its tiles.

    Args:
        space: The space.
        interrupt_at: The call of ``measure`` that Ctrl-C interrupts.
    """

    def __init__(self, space: Space, interrupt_at: int = 10**9) -> None:
        self.space = space
        self.calls = 0
        self._interrupt_at = interrupt_at

    def choice(self) -> Configuration:
        return configuration(self.space, Solver(self.space.model, 0).sample())

    def dispatched(self) -> str:
        return "winograd"

    def confirm(self, configuration: Configuration) -> Outcome:
        outcome = Outcome(self.seconds(configuration), incumbent=2e-2)
        gain = 2e-2 / self.seconds(configuration)
        return replace(outcome, gain=(0.99 * gain, gain, 1.01 * gain))

    def measure(
        self, configurations: Sequence[Configuration], incumbent: Configuration | None = None
    ) -> list[Outcome]:
        self.calls += 1
        if self.calls == self._interrupt_at:
            raise KeyboardInterrupt
        assert incumbent == DISPATCHED
        return [Outcome(self.seconds(values), incumbent=2e-2) for values in configurations]

    def seconds(self, values: Configuration) -> float:
        """Seconds of a configuration: the fewer, the nearer it is to 3 tiles of 4 rows."""
        return 1e-3 * (1 + abs(values["tiles"] - 3) + abs(values["tile_rows"] - 4))


#: The variable that names the configuration that ``deadly_cuts`` ends its process for.
DEADLY = "MAXCONV_TEST_DEADLY"


def deadly_cuts(
    request: CutRequest,
    configurations: Sequence[Configuration],
    incumbent: Configuration | None = None,
) -> list[Outcome]:
    """Measures, or ends the process where one of the configurations is the one of ``DEADLY``."""
    if json.loads(os.environ[DEADLY]) in [dict(values) for values in configurations]:
        os.abort()
    return measure_cuts(request, configurations, incumbent)
