"""The files of a task's results, from records to bytes and back; every value is checked on reading."""

import csv
import io
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pondertime.results.records import QUANTITIES, Boundary, CharacterClass, Curve, Key, Point, Row, SequenceTrace

# The columns of the table of networks; OWNER's say in the other tables which network a line belongs to.
ROW = {field.name: field.type for field in fields(Row)}
OWNER = {name: ROW[name] for name in ("task", "preset", "halting", "tau", "seed", "updates")}


def _columns(kind: type[Any]) -> dict[str, Any]:
    return {field.name: field.type for field in fields(kind)}


def _cell(text: str, kind: Any) -> Any:
    """A value of a csv table; ``kind`` is str, int, float or ``float | None``."""
    if kind is str or (text == "" and kind not in (int, float)):
        return text if kind is str else None
    value = int(text) if kind is int else float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _lines(path: Path, data: bytes, task: str, columns: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Where a line of a csv table stands and its values, each checked."""
    try:
        reader = csv.reader(io.StringIO(data.decode(), newline=""), strict=True)
        lines = [(f"{path}, line {reader.line_num}", line) for line in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path}: expected a table in UTF-8 with commas: {error}") from None
    if not lines or lines[0][1] != list(columns):
        raise ValueError(f"{path}, line 1: expected the columns {','.join(columns)}")
    for where, line in lines[1:]:
        if len(line) != len(columns):
            raise ValueError(f"{where}: expected {len(columns)} columns, got {len(line)}")
        values = {}
        for (name, kind), text in zip(columns.items(), line, strict=True):
            try:
                values[name] = _cell(text, kind)
            except ValueError:
                expected = "a whole number" if kind is int else "a finite number"
                raise ValueError(f"{where}: {name}: expected {expected}, got {text!r}") from None
        if values["task"] != task:
            raise ValueError(f"{where}: task: expected {task}, got {values['task']!r}")
        yield where, values


def _write_lines(columns: dict[str, Any], lines: Iterable[Sequence[Any]]) -> bytes:
    def text(value: Any, kind: Any) -> str:
        return "" if value is None else str(kind(value)) if kind in (str, int) else repr(float(value))

    file = io.StringIO(newline="")
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([text(*pair) for pair in zip(line, columns.values(), strict=True)] for line in lines)
    return file.getvalue().encode()


def _key(values: dict[str, Any]) -> Key:
    return values["preset"], values["halting"], values["tau"], values["seed"]


def _parse_rows(path: Path, data: bytes, task: str) -> dict[Key, Row]:
    rows: dict[Key, Row] = {}
    for where, values in _lines(path, data, task, ROW):
        try:
            row = Row(**values)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if row.key in rows:
            raise ValueError(f"{where}: expected every network once, got {row.key} again")
        rows[row.key] = row
    return rows


def _write_rows(_: dict[Key, Row], table: dict[Key, Row]) -> bytes:
    return _write_lines(ROW, [[getattr(row, name) for name in ROW] for row in table.values()])


def _parse_many(kind: type[Any], path: Path, data: bytes, task: str) -> dict[Key, list[Any]]:
    """A csv table with several records a network."""
    found: dict[Key, list[Any]] = {}
    columns = _columns(kind)
    for _, values in _lines(path, data, task, OWNER | columns):
        found.setdefault(_key(values), []).append(kind(**{name: values[name] for name in columns}))
    return found


def _rounded(value: Any) -> Any:
    """Numbers with float32's seven digits, which keeps a file small."""
    if isinstance(value, list | tuple):
        return [_rounded(item) for item in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _write_many(kind: type[Any], rows: dict[Key, Row], table: dict[Key, Sequence[Any]]) -> bytes:
    columns = _columns(kind)
    return _write_lines(
        OWNER | columns,
        [
            [getattr(rows[key], name) for name in OWNER] + [_rounded(getattr(item, name)) for name in columns]
            for key in table
            for item in table[key]
        ],
    )


def _parse_curves(path: Path, data: bytes, task: str) -> dict[Key, Curve]:
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("preset", "halting", "tau", "seed", "updates", *QUANTITIES)}
        curves = {}
        for e, (preset, halting, tau, seed) in enumerate(zip(*list(arrays.values())[:4], strict=True)):
            made = arrays["updates"][e] >= 0
            key = str(preset), str(halting), None if math.isnan(tau) else float(tau), int(seed)
            curves[key] = Curve(*(arrays[name][e][made] for name in ("updates", *QUANTITIES)))
    except Exception as error:  # A damaged archive raises half a dozen kinds.
        raise ValueError(f"{path}: expected the learning curves of {task} in NumPy's npz format: {error}") from None
    return curves


def _write_curves(rows: dict[Key, Row], curves: dict[Key, Curve]) -> bytes:
    longest = max([len(curve.updates) for curve in curves.values()], default=0)

    def padded(name: str, fill: float, dtype: Any) -> np.ndarray:
        array = np.full((len(curves), longest), fill, dtype)
        for line, curve in zip(array, curves.values(), strict=True):
            line[: len(curve.updates)] = getattr(curve, name)
        return array

    owners = [rows[key] for key in curves]
    file = io.BytesIO()
    np.savez_compressed(
        file,
        preset=np.array([row.preset for row in owners], str),
        halting=np.array([row.halting for row in owners], str),
        tau=np.array([math.nan if row.tau is None else row.tau for row in owners], float),
        seed=np.array([row.seed for row in owners], int),
        workers=np.array([row.workers for row in owners], int),
        updates=padded("updates", -1, np.int64),
        **{name: padded(name, math.nan, np.float32) for name in QUANTITIES},  # pyrefly: ignore
    )
    return file.getvalue()


def _parse_traces(path: Path, data: bytes, task: str) -> dict[Key, list[SequenceTrace]]:
    traces: dict[Key, list[SequenceTrace]] = {}
    try:
        for entry in json.loads(data):
            traces[_key(entry)] = [SequenceTrace(**sequence) for sequence in entry["sequences"]]
    except (KeyError, TypeError, ValueError) as error:
        where = f"{path}, network {len(traces) + 1}"
        raise ValueError(
            f"{where}: expected the traces of {task}, a list of networks with sequences: {error}"
        ) from None
    return traces


def _write_traces(rows: dict[Key, Row], traces: dict[Key, Sequence[SequenceTrace]]) -> bytes:
    networks = []
    for key, sequences in traces.items():
        owner = {name: getattr(rows[key], name) for name in OWNER if name != "task"}
        listed = [{name: _rounded(value) for name, value in asdict(sequence).items()} for sequence in sequences]
        networks.append(json.dumps(owner | {"sequences": listed}, separators=(",", ":")))
    return ("[\n" + ",\n".join(networks) + "\n]\n").encode()


class Format(NamedTuple):
    """How one of the files is read, ``parse(path, data, task)``, and written, ``write(rows, table)``."""

    parse: Callable[[Path, bytes, str], dict[Key, Any]]
    write: Callable[[dict[Key, Row], dict[Key, Any]], bytes]
    always: bool = True  # there, even if it holds nothing


def _many(kind: type[Any], *, always: bool) -> Format:
    return Format(partial(_parse_many, kind), partial(_write_many, kind), always)


# In the order in which they are moved into place.
FORMATS = {
    "-curves.npz": Format(_parse_curves, _write_curves),
    "-difficulty.csv": _many(Point, always=True),
    "-traces.json": Format(_parse_traces, _write_traces),
    "-classes.csv": _many(CharacterClass, always=False),
    "-boundaries.csv": _many(Boundary, always=False),
    ".csv": Format(_parse_rows, _write_rows),
}
