"""The learned cost model: gradient-boosted trees over what a kernel's own model says.

The trees correct the analytic model instead of replacing it: its time is the margin that they start
from. With no trial the prediction is the analytic one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._extra import extra
from .space import Space
from .trials import Candidate, Trial, feature_names, features

__all__ = ["CostModel", "CostSettings", "Study"]


@dataclass(frozen=True)
class CostSettings:
    """Of the trees.

    Raises:
        ValueError: A number is not positive.
    """

    trees: int = 120
    depth: int = 5
    rate: float = 0.1
    """What each tree adds."""
    least_trials: int = 8
    """Trials that ran before trees are grown: fewer teach nothing."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}: {value} is not positive")


@dataclass(frozen=True)
class Study:
    """Trials of one problem."""

    space: Space
    trials: Sequence[Trial]


class CostModel:
    """Predicts seconds of candidates of a space.

    Args:
        space: Whose candidates are asked about.
        seed: Of the trees.
        settings: Of the trees.
        others: Trials of other problems on the same kernel, that it learns from too.

    Raises:
        MissingExtraError: XGBoost is not installed.
        ValueError: ``others`` are of another kernel.
    """

    def __init__(
        self,
        space: Space,
        seed: int,
        settings: CostSettings | None = None,
        others: Sequence[Study] = (),
    ) -> None:
        for study in others:
            if study.space.kernel is not space.kernel:
                raise ValueError(
                    f"others: {study.space.kernel.name.lower()} is not {space.kernel.name.lower()}"
                )
        self._xgboost = extra("xgboost")
        self._space = space
        self._seed = seed
        self._settings = settings or CostSettings()
        self._others = others
        self._names: list[str] = []
        self._times: Any = None
        self._validity: Any = None
        self._offset = 0.0

    def fit(self, trials: Sequence[Trial]) -> None:
        """Learns from all trials of the space so far, and from those of other problems."""
        studies = [*self._others, Study(self._space, trials)]
        self._offset = _offset(trials)
        rows: list[dict[str, float]] = []
        times: list[tuple[float, float]] = []
        ran: list[bool] = []
        for study in studies:
            offset = _offset(study.trials)
            for trial in study.trials:
                rows.append(features(study.space, trial.candidate))
                ran.append(trial.seconds is not None)
                margin = math.log(trial.candidate.predicted) + offset
                seconds = trial.seconds
                times.append((margin, math.nan if seconds is None else math.log(seconds)))
        # Names that this space lacks say nothing about its candidates.
        self._names = feature_names(self._space)
        self._times = self._validity = None
        if sum(ran) >= self._settings.least_trials:
            kept = [place for place, good in enumerate(ran) if good]
            data = self._matrix([rows[place] for place in kept])
            data.set_base_margin(np.array([times[place][0] for place in kept]))
            data.set_label(np.array([times[place][1] for place in kept]))
            self._times = self._grow(data, "reg:squarederror")
        if not all(ran) and any(ran):
            data = self._matrix(rows)
            data.set_label(np.array(ran, np.float64))
            self._validity = self._grow(data, "binary:logistic")

    def predict(self, candidates: Sequence[Candidate]) -> npt.NDArray[np.float64]:
        """Returns the seconds that candidates should take.

        Before any trial they are in the unit of the kernel's model.
        """
        margin = np.array([math.log(c.predicted) + self._offset for c in candidates])
        if self._times is None or not candidates:
            analytic: npt.NDArray[np.float64] = np.exp(margin)
            return analytic
        data = self._matrix([features(self._space, candidate) for candidate in candidates])
        data.set_base_margin(margin)
        predicted: npt.NDArray[np.float64] = np.exp(self._times.predict(data).astype(np.float64))
        return predicted

    def valid(self, candidates: Sequence[Candidate]) -> npt.NDArray[np.float64]:
        """Returns the probabilities that candidates run, as far as failures so far tell."""
        if self._validity is None or not candidates:
            return np.ones(len(candidates))
        data = self._matrix([features(self._space, candidate) for candidate in candidates])
        probability: npt.NDArray[np.float64] = self._validity.predict(data).astype(np.float64)
        return probability

    def fitness(self, candidates: Sequence[Candidate]) -> npt.NDArray[np.float64]:
        """Returns how good candidates are: the chance that they run, over their time."""
        found: npt.NDArray[np.float64] = self.valid(candidates) / self.predict(candidates)
        return found

    def key_variables(self, count: int) -> list[str]:
        """Returns the variables of the space that explain most of the times, the first most.

        By the gain of the splits that read them; before trees are grown there are none.
        """
        if self._times is None:
            return []
        gains: Mapping[str, float] = self._times.get_score(importance_type="total_gain")
        known = [name for name in gains if name in self._space.model.variables]
        return sorted(known, key=lambda name: (-gains[name], name))[:count]

    def _matrix(self, rows: Sequence[Mapping[str, float]]) -> Any:
        values = [[row.get(name, math.nan) for name in self._names] for row in rows]
        return self._xgboost.DMatrix(np.array(values, np.float64), feature_names=self._names)

    def _grow(self, data: Any, objective: str) -> Any:
        parameters = {
            "objective": objective,
            "max_depth": self._settings.depth,
            "eta": self._settings.rate,
            "subsample": 0.8,
            "seed": self._seed,
            "nthread": 1,
            "verbosity": 0,
        }
        return self._xgboost.train(parameters, data, self._settings.trees)


def _offset(trials: Sequence[Trial]) -> float:
    """Returns what the logarithm of the kernel's model's time lacks, in the median.

    Models count in units of their own, and may be off by a factor that does not matter.
    """
    ratios = [
        math.log(trial.seconds / trial.candidate.predicted)
        for trial in trials
        if trial.seconds is not None
    ]
    return statistics.median(ratios) if ratios else 0.0
