"""A sweep small enough for a test, and what it must leave in the result tables."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from pondertime import results, sweep
from pondertime.config import TrainConfig
from pondertime.sweep import Places, home, plan
from small_runs import SIZE_FLAGS, small


def configs(**changes: Any) -> list[TrainConfig]:
    return plan(small(iterations=20, **changes), (0.1, 0.01), 2, baseline=True)


def outcomes(found: Iterator[tuple[TrainConfig, Any]]) -> dict[str, Any]:
    return {config.name: outcome for config, outcome in found}


def command(places: Places, *more: str) -> list[str]:
    where = ["--runs", str(places.runs), "--results", str(places.results)]
    return ["sweep", "parity", *SIZE_FLAGS, *where, "--taus", "0.1,0.01", "--seeds", "2", "--iterations", "20", *more]


def assert_rows_equal_results(places: Places, every: list[TrainConfig]) -> None:
    """One row a network, with the numbers of its result.json; curve, points and traces beside it."""
    rows = {row.key: row for row in results.read_rows(places.results, "parity")}
    assert rows.keys() == {sweep.key(c) for c in every}
    curves = results.read_curves(places.results, "parity")
    points = results.read_difficulty(places.results, "parity")
    traced = results.read_traces(places.results, "parity")
    begun = sweep.groups(places)
    for config in every:
        (folder, whole), row = home(config, places, begun), rows[sweep.key(config)]
        outcome, lines = folder.result(), folder.metrics(config.seed - whole.seed)
        assert outcome is not None
        if whole.members > 1:
            outcome |= outcome["members"][config.seed - whole.seed]
            outcome["seconds"] = round(outcome["seconds"] / whole.members, 2)
        for name in ("updates", "error", "target_error", "steps", "rho", "seconds"):
            assert getattr(row, name) == outcome[name]
        assert (row.task, row.workers, row.bpc, row.device) == ("parity", 1, None, "cpu")
        assert curves[row.key].updates.tolist() == [line["updates"] for line in lines]
        assert curves[row.key].error.tolist() == pytest.approx([line["error"] for line in lines])
        assert np.isnan(curves[row.key].bpc).all()
        assert [point.difficulty for point in points[row.key]] == list(range(1, 9))
        assert len(traced[row.key]) == 3
