import torch
from torch import Tensor

from pondertime.tasks import Addition, Batch, Logic, Parity, Sort, Task, Wikipedia


def batch_of(input: Tensor, target: list[list[int]]) -> Batch:
    """One sequence by hand; an empty list where there is no target."""
    width = max(map(len, target))
    rows = torch.tensor([row or [-100] * width for row in target]).unsqueeze(1)
    return Batch(input.unsqueeze(1), rows, rows[..., 0] >= 0, torch.tensor([len(target)]), None)


def one_hots(classes: list[int], places: int) -> Tensor:
    return torch.eye(11, 10)[classes + [10] * (places - len(classes))].flatten()


def logits(task: Task, answers: list[list[int]]) -> Tensor:
    """An output ``[T, 1, O]`` whose likeliest classes are these."""
    classes = torch.tensor(answers)
    if task.output_size == task.targets:
        return (classes * 2.0 - 1).unsqueeze(1)
    return torch.nn.functional.one_hot(classes, task.output_size // task.targets).float().flatten(1).unsqueeze(1)


def test_parity():
    task = Parity()
    vector = torch.zeros(1, 64)
    vector[0, :4] = torch.tensor([1.0, -1, 1, 1])
    batch = batch_of(vector, [[1]])
    assert task.render(batch, 0) == "+-++ -> 3 ones (odd) -> 1"
    assert task.labels(batch, 0) == (["+-++"], ["1"])
    assert task.predictions(logits(task, [[0]]), batch, 0) == ["0"]
    vector = torch.zeros(1, 64)
    vector[0, [1, 3]] = torch.tensor([1.0, -1])
    assert task.render(batch_of(vector, [[1]]), 0) == "0+0- -> 1 one (odd) -> 1"


def test_logic():
    task = Logic()
    steps = [([0.0, 1.0], [0, 3]), ([0.0, 0.0], [7]), ([0.0, 1.0], [5, 2])]
    rows = torch.stack([torch.cat([torch.tensor(bits), one_hots(gates, 10)]) for bits, gates in steps])
    batch = batch_of(rows, [[1], [1], [0]])
    assert task.render(batch, 0) == "01 NOR XOR -> 1\n.0 if/then -> 1\n.1 AND ABJ -> 0"
    assert task.labels(batch, 0) == (["01 NOR XOR", ".0 if/then", ".1 AND ABJ"], ["1", "1", "0"])
    assert task.predictions(logits(task, [[1], [0], [0]]), batch, 0) == ["1", "0", "0"]


def test_addition():
    task = Addition()
    rows = torch.stack([one_hots([1, 2, 3], 5), one_hots([4, 5], 5), one_hots([0, 0, 7], 5)])
    batch = batch_of(rows, [[], [1, 6, 8, 10, 10, 10], [1, 7, 5, 10, 10, 10]])
    assert task.render(batch, 0) == "123 + 45 = 168, + 007 = 175"
    assert task.labels(batch, 0) == (["123", "45", "007"], ["", "168", "175"])
    answers = [[1] * 6, [1, 10, 8, 10, 10, 10], [10] * 6]
    assert task.predictions(logits(task, answers), batch, 0) == ["", "1*8", "*"]
    two = batch_of(rows[:2], [[], [1, 6, 8, 10, 10, 10]])
    assert task.render(two, 0) == "123 + 45 = 168"
    zero = batch_of(torch.stack([one_hots([0], 5), one_hots([0, 0], 5)]), [[], [0, 10, 10, 10, 10, 10]])
    assert task.render(zero, 0) == "0 + 00 = 0"
    assert task.render(batch_of(rows[:1], [[-100] * 6]), 0) == "123"


def test_sort():
    task = Sort()
    rows = torch.tensor([[0.31, 0], [-1.2, 0], [0.054, 1], [0, 0], [0, 0], [0, 0]])
    batch = batch_of(rows, [[], [], [], [1], [2], [0]])
    assert task.render(batch, 0) == "0.31 -1.20 0.05 -> 1 2 0"
    assert task.labels(batch, 0) == (["0.31", "-1.20", "0.05", "", "", ""], ["", "", "", "1", "2", "0"])
    answers = [[0], [0], [0], [14], [2], [0]]
    assert task.predictions(logits(task, answers), batch, 0) == ["", "", "", "14", "2", "0"]


def test_wikipedia():
    task = Wikipedia(length=6)
    text = list("a é\nb.".encode())
    batch = batch_of(torch.tensor(text[:-1]), [[byte] for byte in text[1:]])
    assert task.render(batch, 0) == "a é\nb."
    labels = ["a", " ", "\\xc3", "\\xa9", "↵", "b", "."]
    assert task.labels(batch, 0) == (labels[:-1], labels[1:])
    assert task.predictions(logits(task, [[ord("x")]] * 6), batch, 0) == ["x"] * 6
