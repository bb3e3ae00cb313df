"""What the commands print: results in a line, tables, single sequences."""

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any

from pondertime.config import TrainConfig

SHOWN_WIDTH = 150  # of tables and of a sequence's steps


def show_times(rows: list[dict[str, Any]]) -> None:
    """One line a mode, one column a contestant; lines with the same columns under each other."""
    from rich.console import Console
    from rich.table import Column, Table

    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        line = lines.setdefault((row["mode"], row["halting"], row["unit"]), {})
        line[row["contestant"]] = measured(row)
    tables: dict[tuple[str, ...], Table] = {}
    for mode, line in lines.items():
        names = tuple(line)
        if names not in tables:
            tables[names] = Table(Column("", no_wrap=True), *names, box=None)
        tables[names].add_row(", ".join(mode), *line.values())
    for table in tables.values():
        Console(width=SHOWN_WIDTH).print(table)


def measured(row: dict[str, Any]) -> str:
    """A value and its ratio, where it has one."""
    value = row["value"]
    ratio = "" if row["ratio"] is None else f" ({row['ratio']:.2f})"
    return (f"{value:,.0f}" if value >= 1000 else f"{value:.3g}") + ratio


def say(text: str) -> None:
    print(text, flush=True)


@contextlib.contextmanager
def waiting(text: str) -> Iterator[None]:
    from pondertime.progress import console

    with console.status(text):
        yield


def describe(config: TrainConfig, result: dict[str, Any]) -> str:
    """A result in one line."""
    if result.get("failed") is not None:
        return f"{config.name}: its loss was not finite at iteration {result['failed']}"
    if config.task == "wikipedia":
        numbers = f"{result['bpc']:.3f} bits per character ({result['bpc_held_out']:.3f} held out)"
    else:
        numbers = f"error {result['error']:.2%} ± {result['error_se']:.2%}, per target {result['target_error']:.2%}"
    return f"{config.name}: {numbers}, ponder {result['steps']:.2f} (rho {result['rho']:.2f})"


def show_curve(curve: list[dict[str, Any]]) -> None:
    """Error and ponder against difficulty, at most sixteen lines."""
    if not curve:
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("difficulty", "error", "ponder", box=None)
    for row in curve[:: max(1, len(curve) // 16)]:
        table.add_row(str(row["difficulty"]), f"{row['error']:.1%}", f"{row['steps']:.2f}")
    Console().print(table)


def show_trace(trace: dict[str, Any]) -> None:
    """One sequence: inputs, targets, answers and updates, under each other where a line has room for that."""
    lines = {name: [str(v) or "-" for v in trace[name][:40]] for name in ("input", "target", "output", "steps")}
    widths = [max(map(len, step)) for step in zip(*lines.values(), strict=True)]
    together = sum(widths) + len(widths) <= SHOWN_WIDTH
    for name, labels in lines.items():
        cells = map(str.ljust, labels, widths) if together else labels
        say(f"{name:>7}  " + " ".join(cells).rstrip())
    say("")


def show_text(classes: Sequence[Any], boundaries: Sequence[Any]) -> None:
    """Ponder, loss and entropy by kind of character, and how well each tells boundaries; nothing without them."""
    from rich.console import Console
    from rich.table import Table

    if classes:
        table = Table("character", "count", "rho", "loss", "entropy", box=None)
        for row in classes:
            cells = [f"{getattr(row, k):.2f} ± {getattr(row, k + '_se'):.2f}" for k in ("rho", "loss", "entropy")]
            table.add_row(row.kind, str(row.characters), *cells)
        Console().print(table)
    for row in boundaries:
        say(f"{row.kind} boundaries by {row.measure}: F1 {row.f1:.3f} ± {row.f1_se:.3f}")


def show_recorded(recorded: dict[str, Any], measured: dict[str, Any]) -> None:
    """The numbers of a checkpoint's training beside those measured here, and whether they agree."""
    text = "bpc" in measured
    key, scale, unit = ("bpc", 1, "bits per character") if text else ("error", 100, "% error")
    for when, numbers in (("recorded", recorded), ("measured", measured)):
        error, spread = scale * numbers[key], scale * numbers.get(f"{key}_se", 0)
        beside = f"ponder {numbers['steps']:.3f}, {numbers['sequences']} sequences"
        say(f"{when}  {error:.3f} ± {spread:.3f} {unit}, {beside}")
    distance = apart(recorded, measured, key)
    say(f"they {'agree' if distance <= 3 else 'differ'}: {distance:.1f} standard errors apart")


def apart(recorded: dict[str, Any], measured: dict[str, Any], key: str) -> float:
    """How many standard errors two measurements are apart."""
    difference = abs(recorded[key] - measured[key])
    ours = measured.get(f"{key}_se", 0)
    if key == "error":
        # Few sequences may show no mistake at all, and then no spread.
        ours = max(ours, math.sqrt(recorded[key] * (1 - recorded[key]) / measured["sequences"]))
    spread = math.hypot(recorded.get(f"{key}_se", 0), ours)
    return difference / spread if spread else 0.0 if difference < 1e-9 else math.inf
