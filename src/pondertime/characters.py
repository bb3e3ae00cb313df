"""What a network does at each kind of character of a text, and how well that tells where words and sentences end.

A text is the bytes x_0 .. x_T; the value at t (rho, loss or entropy, ``[T]``) belongs to the step that reads x_t and
predicts x_{t+1}. The first characters of a sequence are read with a state that is almost empty and do not count.

Characters of a sequence are not independent, so every standard error is one over sequences. For the mean of a kind of
character, the ratio m = sum(a_s) / sum(c_s) of the sums a_s and counts c_s of the S sequences that have some,
se = sqrt(S / (S - 1) sum((a_s - m c_s)^2)) / sum(c_s).

A boundary is a stretch of characters: between two words, all that is no word; between two sentences, the mark that ends
the first (with quotes and brackets after it) and the white space before the capital letter of the next, or to the end
of the line. It is found if the measure reaches the threshold anywhere in it; every character outside where it does is
a false alarm. An abbreviation before a name counts as the end of a sentence. The threshold is the one with the best F1
on every other sequence; precision, recall and F1 are those of the rest, the standard error of F1 from leaving out
one sequence at a time. ``always`` is a boundary everywhere: what is reached without looking. A threshold uses
any difference of rho, however small, so even an untrained network, whose rho depends on the character that it reads,
does better than that: ``steps``, the whole number N, counts only what costs time.
"""

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from pondertime.results.records import Boundary, CharacterClass

SKIP = 20

# Kinds may overlap; "tag" is the bracket that opens an XML tag. ID digits are found by ID.
KINDS = {
    "letter": rb"[A-Za-z]",
    "space": rb" ",
    "comma": rb",",
    "full stop": rb"\.",
    "newline": rb"\n",
    "bracket": rb"[<>\[\]{}]",
    "tag": rb"<",
    "digit": rb"[0-9]",
}
# The digits of <id>123</id>, also where a sequence begins or ends inside.
ID = re.compile(rb"<id>([0-9]+)|\A([0-9]+)</id>")
WORD = re.compile(rb"[A-Za-z0-9\x80-\xff]+(?:'[A-Za-z]+)*")
SENTENCE = re.compile(rb"[.!?][\"')\]]*(?:\s*\n|\s+(?=[\"'(\[]*[A-Z]))")

Values = Mapping[str, np.ndarray]  # by measure, [S, T]


def kinds_of(text: bytes) -> dict[str, np.ndarray]:
    """Which of the T characters that are read belong to a kind."""
    found = {name: _marked(text, [m.span() for m in re.finditer(kind, text)]) for name, kind in KINDS.items()}
    found["ID digit"] = _marked(text, [m.span(m.lastindex or 0) for m in ID.finditer(text)])
    found["digit"] &= ~found["ID digit"]
    return found


def _marked(text: bytes, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    marked = np.zeros(len(text), bool)
    for start, stop in spans:
        marked[start:stop] = True
    return marked[:-1]


def classes(texts: Sequence[bytes], values: Values, *, skip: int = SKIP) -> list[CharacterClass]:
    """Means of every measure at every kind of character that occurs."""
    kinds = [kinds_of(text) for text in texts]
    table = []
    for name in kinds[0]:
        chosen = np.stack([kind[name] for kind in kinds])
        chosen[:, :skip] = False
        if not chosen.any():
            continue
        numbers = {}
        for measure, value in values.items():
            numbers[measure], numbers[f"{measure}_se"] = ratio(np.where(chosen, value, 0).sum(1), chosen.sum(1))
        table.append(CharacterClass(name, int(chosen.sum()), int(chosen.any(1).sum()), **numbers))
    return table


def ratio(sums: np.ndarray, counts: np.ndarray) -> tuple[float, float]:
    """sum(sums) / sum(counts) and its standard error over sequences."""
    S, total = int((counts > 0).sum()), counts.sum()
    mean = sums.sum() / total
    spread = math.sqrt(S / (S - 1) * ((sums - mean * counts) ** 2).sum()) / total if S > 1 else 0.0
    return float(mean), float(spread)


def boundaries_of(text: bytes) -> dict[str, list[tuple[int, int]]]:
    """The boundaries between words and between sentences, first character and the one after the last."""
    words = [m.span() for m in WORD.finditer(text)]
    between = [(first[1], second[0]) for first, second in pairwise(words)]
    # What ends with the text may go on after it.
    return {"word": between, "sentence": [m.span() for m in SENTENCE.finditer(text) if m.end() < len(text)]}


def boundaries(texts: Sequence[bytes], values: Values, *, skip: int = SKIP) -> list[Boundary]:
    """How well each measure tells the boundaries of each kind, where both halves of the sequences have some."""
    found = [boundaries_of(text) for text in texts]
    values = {**values, "always": np.zeros_like(next(iter(values.values())))}
    table = []
    for kind in found[0]:
        for measure, value in values.items():
            cases = [items(spans[kind], row, skip) for spans, row in zip(found, value, strict=True)]
            chosen, tested = cases[::2], cases[1::2]
            if not all(any(len(inside) for inside, _ in half) for half in (chosen, tested)):
                continue
            threshold = best_threshold(*(np.concatenate(part) for part in zip(*chosen, strict=True)))
            table.append(Boundary(kind, measure, sum(len(i) for i, _ in tested), *score(tested, threshold)))
    return table


def items(spans: Sequence[tuple[int, int]], values: np.ndarray, skip: int) -> tuple[np.ndarray, np.ndarray]:
    """The largest value in each boundary, and the values outside of all."""
    outside = np.ones(len(values), bool)
    outside[:skip] = False
    for start, stop in spans:
        outside[start:stop] = False
    inside = [values[start:stop].max() for start, stop in spans if start >= skip]
    return np.array(inside, float), values[outside]


def best_threshold(inside: np.ndarray, outside: np.ndarray) -> float:
    """The value from which on to say "boundary" for the highest F1; the highest of equals."""
    cuts = np.unique(np.concatenate([inside, outside]))[::-1]
    hits = len(inside) - np.searchsorted(np.sort(inside), cuts)
    alarms = len(outside) - np.searchsorted(np.sort(outside), cuts)
    return float(cuts[np.argmax(2 * hits / (len(inside) + hits + alarms))])


def score(cases: Sequence[tuple[np.ndarray, np.ndarray]], threshold: float) -> tuple[float, float, float, float, float]:
    """The threshold, precision, recall, F1 and its standard error over sequences."""
    counts = np.array([[(i >= threshold).sum(), (o >= threshold).sum(), len(i)] for i, o in cases], float)
    hits, alarms, boundaries = counts.sum(0)
    S = len(counts)
    without = [f1(*(counts.sum(0) - row)) for row in counts]
    spread = math.sqrt((S - 1) / S * sum((v - sum(without) / S) ** 2 for v in without))
    precision = hits / (hits + alarms) if hits else 0.0
    return threshold, float(precision), float(hits / boundaries), f1(hits, alarms, boundaries), spread


def f1(hits: float, alarms: float, boundaries: float) -> float:
    """The harmonic mean of precision and recall."""
    return float(2 * hits / (hits + alarms + boundaries)) if hits else 0.0
