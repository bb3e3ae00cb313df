"""Which plain calls of the tick path are served by recordings: the book-keeping, without the runs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pondertime.fused.common import LSTM

recorded: Any = pytest.importorskip("pondertime.fused.triton_recorded", reason="needs Triton")


class Plain:
    def __init__(self, inputs: Any, rules: Any, plan: Any, *, keep: bool, seen: bool = False) -> None:
        pass


class Played:
    def __init__(self, inputs: Any, rules: Any, plan: Any, *, keep: bool, space: Any) -> None:
        self.plan, self.space = plan, space or SimpleNamespace(home=recorded.stream_of(plan.device), bytes=1000)

    __del__ = recorded.PlayedRun.__del__


class APlan:
    def __init__(self) -> None:
        self.device, self.kind, self.forced = torch.device("cpu"), LSTM, False
        self.E, self.T, self.B, self.H, self.P, self.limit, self.updates = 1, 2, 1, 1, 4, 3, 5
        self.calls, self.due, self.spaces = 0, 0, []


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded._held.clear()
    monkeypatch.setattr(recorded, "TickRun", Plain)
    monkeypatch.setattr(recorded, "PlayedRun", Played)


def call(plan: APlan, **options: Any) -> Any:
    return recorded.serve(None, None, plan, keep=True, **options)


def played(plan: APlan, count: int) -> list[int]:
    """Which of so many calls were played, when each ends before the next."""
    return [k for k in range(1, count + 1) if type(call(plan)) is Played]


def test_from_the_tenth_call_on() -> None:
    plan = APlan()
    assert played(plan, 20) == list(range(10, 21))
    assert type(call(plan, seen=True)) is Plain


def test_a_space_has_one_run_at_a_time() -> None:
    plan = APlan()
    played(plan, 10)
    run = call(plan)
    assert type(run) is Played and played(plan, 3) == []
    del run
    assert played(plan, 3) == [1, 2, 3]


def test_a_trace_is_not_counted() -> None:
    plan = APlan()
    for _ in range(10):
        call(plan, seen=True)
    assert played(plan, 10) == [10]


def test_where_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "memory", lambda device: 0)
    assert played(APlan(), 30) == []


def test_the_least_lately_used_gives_up_its_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "memory", lambda device: 2100 / recorded.PART)
    old, used, new = APlan(), APlan(), APlan()
    played(old, 10)
    played(used, 10)
    played(old, 1)
    assert played(new, 10) == [10]
    assert played(used, 5) == [] and played(old, 1) == [1]
    assert not used.spaces and list(recorded._held) == [new, old]
    # Recording again takes longer each time.
    assert played(used, 80) == list(range(75, 81))


def test_another_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = APlan()
    played(plan, 10)
    monkeypatch.setattr(recorded, "stream_of", lambda device: 7)
    monkeypatch.setattr(recorded, "capturing", lambda stream: False)
    assert played(plan, 85) == [81, 82, 83, 84, 85]
