"""Plain-Python solvers of the tasks: they read the input as a network would and know nothing of the sampler.

Each takes the steps of one sequence and returns one answer a step, a list of classes or None.
"""

from collections.abc import Callable

Answer = list[int] | None

GATES: list[Callable[[bool, bool], bool]] = [
    lambda p, q: not (p or q),  # NOR
    lambda p, q: not p and q,  # Xq
    lambda p, q: p and not q,  # ABJ
    lambda p, q: p != q,  # XOR
    lambda p, q: not (p and q),  # NAND
    lambda p, q: p and q,  # AND
    lambda p, q: p == q,  # XNOR
    lambda p, q: not p or q,  # if p then q
    lambda p, q: p or not q,  # if q then p
    lambda p, q: p or q,  # OR
]


def one_hots(row: list[float]) -> list[int]:
    """The classes of consecutive one-hot vectors of ten, up to the first that is empty."""
    classes = []
    chunks = [row[i : i + 10] for i in range(0, len(row), 10)]
    for chunk in chunks:
        if not any(chunk):
            break
        assert sorted(chunk) == [0.0] * 9 + [1.0]
        classes.append(chunk.index(1.0))
    assert not any(x for chunk in chunks[len(classes) :] for x in chunk)
    return classes


def parity(steps: list[list[float]]) -> list[Answer]:
    (vector,) = steps
    odd = False
    for x in vector:
        assert x in (-1.0, 0.0, 1.0)
        odd ^= x == 1.0
    return [[int(odd)]]


def logic(steps: list[list[float]]) -> list[Answer]:
    answers: list[Answer] = []
    carried = False
    for t, row in enumerate(steps):
        assert row[0] in ((0.0, 1.0) if t == 0 else (0.0,)) and row[1] in (0.0, 1.0)
        bits = [row[0] == 1.0 if t == 0 else carried, row[1] == 1.0]
        gates = one_hots(row[2:])
        assert gates
        for gate in gates:
            bits.append(GATES[gate](bits[-1], bits[-2]))
        carried = bits[-1]
        answers.append([int(carried)])
    return answers


def addition(steps: list[list[float]], places: int = 6) -> list[Answer]:
    answers: list[Answer] = []
    total = 0
    for row in steps:
        total += int("".join(map(str, one_hots(row))))
        answers.append([10 if c == "*" else int(c) for c in str(total).ljust(places, "*")])
    answers[0] = None
    return answers


def sort(steps: list[list[float]]) -> list[Answer]:
    flags = [flag for _, flag in steps]
    count = flags.index(1.0) + 1
    assert sum(flags) == 1.0 and len(steps) == 2 * count
    assert all(x == 0.0 for x, _ in steps[count:])
    numbers = [x for x, _ in steps[:count]]
    order = sorted(range(count), key=numbers.__getitem__)
    return [None] * count + [[i] for i in order]


def wikipedia(steps: list[int], text: bytes) -> list[Answer]:
    place = text.index(bytes(steps))
    return [[byte] for byte in text[place + 1 : place + 1 + len(steps)]]
