"""Hogwild: workers that share weights learn, count together, stop together, and are missed when they die."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pondertime import hogwild
from pondertime.config import Interrupted, RunError, TrainConfig
from pondertime.hogwild import Crew
from pondertime.learner import Diverged
from pondertime.runs import RunFolder
from pondertime.train import train
from small_runs import metrics, processes, result, small, updates, weights


def measured(folder: RunFolder, config: TrainConfig) -> tuple[int, int]:
    """How many inputs the metrics speak of, and how many they should: one batch in ten of every worker."""
    counted = sum(sum(line["histogram"].values()) for line in metrics(folder))
    made = json.loads((folder.checkpoint / "state.json").read_text())["iterations"]
    return counted, config.batch_size * sum(len(range(0, iterations, 10)) for iterations in made)


def when_under_way(monkeypatch: pytest.MonkeyPatch, act: Callable[[Crew], None], iterations: int = 15) -> None:
    """Do something as soon as every worker has made some updates."""
    watch = hogwild.watch

    def wait_and_watch(crew: Crew) -> str | RunError:
        while int(crew.counters.min()) < iterations:
            assert crew.death() is None
            time.sleep(0.01)
        act(crew)
        return watch(crew)

    monkeypatch.setattr(hogwild, "watch", wait_and_watch)


# The more workers, the staler their gradients: at the rate of two, sixteen may end on a step that costs some percent.
@pytest.mark.parametrize(("workers", "iterations", "rate", "until"), [(2, 4000, 3e-3, 0.005), (16, 1000, 1e-3, 0.002)])
def test_a_small_parity_is_learned(tmp_path: Path, workers: int, iterations: int, rate: float, until: float):
    sizes = {"hidden_size": 64, "batch_size": 128, "log_every": 400 // workers}
    config = small(workers=workers, iterations=iterations, learning_rate=rate, clip=1.0, **sizes)
    folder = RunFolder(tmp_path / "run")
    outcome = train(config, folder, until_error=until)
    assert outcome["error"] < 0.02
    lines = metrics(folder)
    assert [line["updates"] for line in lines] == sorted({line["updates"] for line in lines})
    assert lines[-1]["updates"] <= outcome["updates"] and workers * outcome["iterations"] <= outcome["updates"]
    counted, expected = measured(folder, config)
    assert counted == expected


def test_an_interrupt_stops_all_workers_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, folder = small(workers=2, iterations=2000), RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        when_under_way(patch, lambda crew: signal.raise_signal(signal.SIGINT))
        with pytest.raises(Interrupted, match=r"stopped at iteration \d+; checkpoint in .* the same command goes on"):
            train(config, folder)
    assert not multiprocessing.active_children()
    assert 30 <= updates(folder) < 4000
    first = weights(folder)
    assert train(config, folder)["updates"] == 4000
    assert weights(folder) != first
    counted, expected = measured(folder, config)
    assert counted == expected, "what was measured before the interrupt is not lost, nor counted twice"


def test_a_worker_that_is_killed_is_reported_and_the_run_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, folder = small(workers=3, iterations=2000), RunFolder(tmp_path / "run")
    with monkeypatch.context() as patch:
        when_under_way(patch, lambda crew: os.kill(crew.workers[1].pid or 0, signal.SIGKILL))
        with pytest.raises(
            RunError, match=r"^worker 1 of 3 died \(signal 9\) at iteration \d+; checkpoint in .* goes on"
        ):
            train(config, folder)
    assert not multiprocessing.active_children()
    assert 45 <= updates(folder) < 6000 and folder.result() is None
    assert train(config, folder)["updates"] == 6000
    counted, expected = measured(folder, config)
    # The dead one may have measured an update that it did not live to count.
    assert abs(counted - expected) <= config.batch_size


@pytest.mark.parametrize("asked", [False, True])
def test_a_worker_that_ctrl_c_ends_before_it_begins_has_not_failed(asked: bool):
    death = RunError("worker 1 of 2 died")
    session = SimpleNamespace(updates=0, limits=SimpleNamespace(asked=lambda: asked))
    crew: Any = SimpleNamespace(session=session, death=lambda: death, collect=lambda: None)
    assert hogwild.watch(crew) == ("asked" if asked else death)


def test_a_worker_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    config, folder = small(workers=2, iterations=100_000), RunFolder(tmp_path / "run")

    def tear(crew: Crew) -> None:
        crew.fault.put((1, False, "OSError: the text is gone"))
        os.kill(crew.workers[1].pid or 0, signal.SIGKILL)

    when_under_way(monkeypatch, tear)
    with pytest.raises(RunError, match=r"worker 1 of 2 died \(OSError: the text is gone\)"):
        train(config, folder)


def test_a_diverging_run_stops_with_its_last_good_checkpoint(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(Diverged, match=r"^the loss is not finite at iteration \d+; the last good checkpoint is kept"):
        train(small(workers=2, iterations=1000, learning_rate=1e38), folder)
    assert not multiprocessing.active_children()
    assert updates(folder) == 0


def train_and_tell(config: TrainConfig, path: Path) -> None:
    """Train with the workers' process ids beside the run folder."""
    torch.set_num_threads(1)
    start = Crew.start

    def tell(crew: Crew) -> None:
        start(crew)
        path.with_name("pids").write_text(" ".join(str(p.pid) for p in crew.workers) + "\n")

    Crew.start = tell  # pyrefly: ignore
    train(config, RunFolder(path), checkpoint_seconds=0.1)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


def wait_for(condition: Callable[[], Any], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.02)


def test_workers_do_not_outlive_a_main_process_that_is_killed(tmp_path: Path):
    folder = RunFolder(tmp_path / "run")
    process = processes().Process(target=train_and_tell, args=(small(workers=2, iterations=100_000), folder.path))
    process.start()
    pids = tmp_path / "pids"
    wait_for(lambda: pids.exists() and pids.read_text().endswith("\n") and updates(folder) > 20)
    process.kill()
    process.join()
    wait_for(lambda: not any(alive(int(pid)) for pid in pids.read_text().split()))
    done = updates(folder)
    config = small(workers=2, iterations=100_000)
    with pytest.raises(Interrupted):
        train(config, folder, max_minutes=0.005)
    assert updates(folder) >= done and folder.config() == config


def test_hogwild_of_other_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pondertime.evaluate.WIKIPEDIA_SEQUENCES", 5)
    folder = RunFolder(tmp_path / "run")
    train(small("wikipedia", data="excerpt", length=20, workers=2, iterations=10), folder)
    assert result(folder)["updates"] == 20


def test_sums_are_read_whole():
    crew: Any = SimpleNamespace(written=torch.tensor([4, 7]), sums=torch.ones(2, 3), rows=torch.zeros(2, 3))
    for rank in range(2):
        Crew.read(crew, rank)
    assert crew.rows.tolist() == [[1, 1, 1], [0, 0, 0]]  # the second is being written
