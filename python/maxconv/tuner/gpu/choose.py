"""Which configurations are worth a build: those that promise most over many problems.

The genetic algorithm breeds configurations for some problems, with the kernel's model of time for a
measurement, and the solver draws others. The model knows more of tiles than of stages and
epilogues: of each tile that was bred, one more configuration has those of a row of the hand-written
table, and as many stages as fit. Greedy covers take what gains most over the table by the model,
which they take for a guess: each configuration is as good as predicted but for a random factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..cost import CostModel
from ..search import Genetic
from ..search.genetic import GeneticSettings
from ..space import Space, open_space
from ..trials import candidates_of
from .configurations import Configurations, Listed, table_rows, without_split
from .cover import greedy
from .problems import DTYPE, Measured

__all__ = ["ChoiceSettings", "choose"]

#: How a configuration was found.
DRESSED, NEIGHBOUR, GENETIC = "dressed", "neighbour", "genetic"

#: The fields that the model knows well, and how much a difference in one matters.
_TILE = {
    "block_tile_shape.m": 1,
    "block_tile_shape.n": 1,
    "cluster_shape.m": 1,
    "cluster_shape.n": 1,
    "cluster_shape.k": 2,
    "consumers": 2,
    "cooperative": 4,
    "swapped": 4,
    "halo": 2,
    "stationary": 2,
}


@dataclass(frozen=True)
class ChoiceSettings:
    """Of the choice.

    Raises:
        ValueError: A number is not positive, or a share exceeds 1.
    """

    configurations: int = 100
    """To choose, beside the table's."""
    studied: int = 40
    """Problems that configurations are bred for."""
    dressed: float = 0.55
    """The share with a bred tile, and a table's row's epilogue."""
    neighbours: float = 0.25
    """The share that differs in one field from a row of the table."""
    error: float = 0.08
    """The model's, as a standard deviation of the logarithm of its times."""
    draws: int = 8
    """Of such errors, over which the gain is a mean."""
    population: int = 80
    """Of the genetic algorithm; half of it is kept."""
    generations: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "seed" and value <= 0:
                raise ValueError(f"{name}: {value} is not positive")
        if self.dressed + self.neighbours > 1:
            raise ValueError(
                f"dressed, neighbours: {self.dressed} and {self.neighbours} exceed 1 together"
            )


def choose(
    problems: Sequence[Measured],
    settings: ChoiceSettings | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Configurations:
    """Returns the hand-written table's configurations, and those that are worth a measurement.

    Args:
        problems: What to choose for.
        settings: Of the choice.
        report: Is told what is done.

    Raises:
        ValueError: There is no problem, or a kernel takes none of them.
        MissingExtraError: A package that the search needs is not installed.
    """
    settings = settings or ChoiceSettings()
    if not problems:
        raise ValueError("problems: there is none to choose configurations for")
    spaces = [open_space(p.problem, "sm90", dtype=DTYPE, residual=True) for p in problems]
    fields = without_split(spaces[0].judge.fields)
    rows = {entry.values: entry for space in spaces for entry in table_rows(space.judge)}
    table = sorted(rows.values(), key=lambda entry: entry.row)
    pool: dict[tuple[int, ...], str] = {}
    studied = _representatives(spaces, settings.studied)
    for place, space in enumerate(studied):
        report(f"breeding configurations ({place + 1} of {len(studied)}, {len(pool)} so far)")
        bred = _bred(space, settings, settings.seed + place)
        dressed = [made for values in bred if (made := _dressed(space, fields, values, table))]
        pool |= {values: GENETIC for values in bred if values not in pool}
        pool |= dict.fromkeys(dressed, DRESSED)
    domains = [sorted({values[i] for values in [*pool, *rows]}) for i in range(len(fields))]
    pool |= {v: NEIGHBOUR for v in _neighbours(table, domains) if v not in pool}
    drawn = [values for values in pool if values not in rows]
    report(f"asking the model about {len(drawn)} configurations of {len(problems)} problems")
    ratios = _ratios(spaces, fields, [*(entry.values for entry in table), *drawn], len(table))
    weights = np.sqrt([max(1, problem.layers) for problem in problems])
    guesses = _guesses(ratios, settings)
    count = min(settings.configurations, len(drawn))
    shares = {DRESSED: settings.dressed, NEIGHBOUR: settings.neighbours}
    shares[GENETIC] = 1 - sum(shares.values())
    listed: list[Listed] = []
    for origin, share in shares.items():
        places = [i for i, values in enumerate(drawn) if pool[values] == origin]
        most = count - len(listed) if origin == GENETIC else round(share * count)
        taken = greedy(guesses[:, places], np.tile(weights, settings.draws), most)
        listed += [Listed(drawn[places[i]], origin=origin) for i in taken]
    return Configurations(fields, (*table, *listed))


def _guesses(ratios: npt.NDArray[np.float64], settings: ChoiceSettings) -> npt.NDArray[np.float64]:
    """Returns gains with the model's error, drawn several times, one below the other.

    A gain is the logarithm of the table's time over a configuration's, or 0.
    """
    generator = np.random.default_rng(settings.seed)
    errors = generator.normal(0.0, settings.error, (settings.draws, *ratios.shape))
    gains = np.maximum(-np.log(ratios) - errors, 0.0)
    return np.nan_to_num(gains).reshape(-1, ratios.shape[1])


def _representatives(spaces: Sequence[Space], count: int) -> list[Space]:
    """Returns spaces of problems that dispatch gives to different rows and splits, in turns."""
    groups: dict[tuple[int, ...], list[Space]] = {}
    for space in spaces:
        groups.setdefault(space.judge.facts.row("choice"), []).append(space)
    found: list[Space] = []
    ordered = sorted(groups.values(), key=len, reverse=True)
    while len(found) < min(count, len(spaces)):
        for group in ordered:
            if group and len(found) < count:
                found.append(group.pop(0))
    return found


def _bred(space: Space, settings: ChoiceSettings, seed: int) -> list[tuple[int, ...]]:
    """Returns configurations that the genetic algorithm finds good by the model, and random ones.

    They are those of its last generation and a few of its random samples.
    """
    half = max(1, settings.population // 2)
    genetic = Genetic(
        space,
        seed,
        CostModel(space, seed),
        GeneticSettings(
            population=settings.population,
            kept=half,
            generations=settings.generations,
            measured=half,
        ),
    )
    found = genetic.propose([])
    found += candidates_of(space, genetic.solver.samples(half // 4 + 1))
    fields = without_split(space.judge.fields)
    return [tuple(candidate.values[name] for name in fields) for candidate in found]


def _dressed(
    space: Space, fields: Sequence[str], values: Sequence[int], table: Sequence[Listed]
) -> tuple[int, ...] | None:
    """Returns a configuration with the tile of another, and the rest as in a table's row.

    The row is that whose tile differs least. Of the stages there are as many as fit, equally many
    of activations and filters, where the kernel does not refuse it.

    Returns:
        The configuration, or None if the kernel refuses every number of stages.
    """
    bred = dict(zip(fields, values, strict=True))
    rows = [dict(zip(fields, entry.values, strict=True)) for entry in table]
    row = min(rows, key=lambda row: sum((row[name] != bred[name]) * w for name, w in _TILE.items()))
    made = row | {name: bred[name] for name in _TILE}
    # A halo's tiles are stored by threads, others by TMA.
    made |= {"epilogue.tma_store": int(not bred["halo"])}
    made |= {} if bred["halo"] else {"epilogue.whole_rows": 0}
    asked = [
        made
        | {"num_act_pipeline_stages": stages, "num_filter_pipeline_stages": filters}
        | {"epilogue.output_tile_shape.m": pixels, "epilogue.num_epi_load_stages": buffers}
        | {"epilogue.num_output_stages": min(2, buffers), "split_k": 1}
        | {"epilogue.fragment_size": 16 if bred["cooperative"] and pixels > 16 else 8}
        for stages in range(12, 1, -1)
        for filters in ((stages * 3, stages * 2, stages) if bred["halo"] else (stages,))
        for pixels in (64, 32, 16)
        for buffers in (4, 3, 2)
    ]
    for candidate, judged in zip(asked, space.judge.judge(asked), strict=True):
        if judged.refusal is None:
            return tuple(candidate[name] for name in fields)
    return None


def _neighbours(table: Iterable[Listed], domains: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Returns what differs from a row of the table in one field; the kernel may refuse it."""
    return [
        (*entry.values[:i], value, *entry.values[i + 1 :])
        for entry in table
        for i, domain in enumerate(domains)
        for value in domain
        if value != entry.values[i]
    ]


def _ratios(
    spaces: Sequence[Space],
    fields: Sequence[str],
    every: Sequence[tuple[int, ...]],
    table: int,
) -> npt.NDArray[np.float64]:
    """Returns the model's times over the table's, a row a problem, a column a configuration.

    Args:
        spaces: Of the problems.
        fields: Of the configurations.
        every: The configurations; the table's first.
        table: How many of them are the table's.
    """
    splits = fields.index("cluster_shape.k")
    asked = [
        (place, dict(zip(fields, values, strict=True)) | {"split_k": split})
        for place, values in enumerate(every)
        for split in spaces[0].judge.facts.row("splits")
        if split <= values[splits]
    ]
    ratios = np.full((len(spaces), len(every) - table), math.nan)
    for number, space in enumerate(spaces):
        times = np.full(len(every), math.inf)
        for (place, _), judged in zip(
            asked, space.judge.judge([values for _, values in asked]), strict=True
        ):
            if judged.refusal is None:
                times[place] = min(times[place], judged.counts["seconds"])
        ours = times[table:] / times[:table].min()
        ratios[number] = np.where(np.isfinite(ours), ours, math.nan)
    return ratios
