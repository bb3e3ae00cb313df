"""What a second thread gains in training, alone and beside a process that keeps a core busy.

``python benchmarks/threads.py`` measures everything; each number is from a process of its own.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from pondertime.config import make_config
from pondertime.runs import make_task
from pondertime.train import make_learner

SECONDS, ROUNDS = 5, 2


def parity() -> Callable[[], object]:
    """Updates of parity with ACT, as `pondertime train parity --tau 0.01` makes them."""
    config = make_config("parity", tau=0.01, iterations=10**7)
    learner = make_learner(config, make_task(config), "cpu", "auto")
    return lambda: learner.advance(learner.least + 1)


def plain(rnn: nn.Module, out: nn.Module, sample: Callable[[], Tensor]) -> Callable[[], object]:
    """Updates of a plain network by Adam."""
    adam = torch.optim.Adam([*rnn.parameters(), *out.parameters()], 1e-3)

    def step() -> None:
        adam.zero_grad()
        out(rnn(sample())[0]).square().mean().backward()
        adam.step()

    return step


STEPS = {
    "parity with ACT": parity,
    "nn.RNN": lambda: plain(nn.RNN(64, 128), nn.Linear(128, 1), lambda: torch.randn(1, 128, 64)),
    "nn.LSTM, 512 cells": lambda: plain(nn.LSTM(50, 512), nn.Linear(512, 66), lambda: torch.randn(5, 32, 50)),
}


def rate(name: str) -> float:
    """Updates a second, after the first ten."""
    step = STEPS[name]()
    for _ in range(10):
        step()
    start, made = time.monotonic(), 0
    while time.monotonic() - start < SECONDS:
        step()
        made += 1
    return made / (time.monotonic() - start)


def apart(name: str, threads: int) -> float:
    """The same in a process of its own, with so many threads."""
    command = [sys.executable, __file__, name]
    return float(subprocess.check_output(command, env=os.environ | {"OMP_NUM_THREADS": str(threads)}, text=True))


def spin() -> None:
    while True:
        pass


def main() -> None:
    print(f"updates a second, {ROUNDS} rounds of {SECONDS} s; torch {torch.__version__}, {os.cpu_count()} cores")
    for busy in (False, True):
        neighbour = multiprocessing.Process(target=spin, daemon=True)
        if busy:
            neighbour.start()
        print("beside a busy process" if busy else "alone")
        for name in STEPS:
            for threads in (1, 2):
                rates = ", ".join(f"{apart(name, threads):,.0f}" for _ in range(ROUNDS))
                print(f"  {name}, {threads} thread{'s' * (threads > 1)}: {rates}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(rate(sys.argv[1]))
    else:
        main()
