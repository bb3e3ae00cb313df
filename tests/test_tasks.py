import functools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import solvers
from compare import assert_same
from pondertime import tasks
from pondertime.tasks import Addition, Batch, Logic, Parity, Sort, Task, Wikipedia
from pondertime.tasks.logic import GATES, TABLES

# The chi-square statistic exceeds these with a chance of 1e-4, by degrees of freedom.
CRITICAL = {1: 15.137, 4: 23.513, 5: 25.745, 9: 33.720, 13: 40.871, 14: 42.579, 63: 113.505}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def assert_uniform(values: Tensor, low: int, high: int) -> None:
    """Chi-square of integers against equal chances of low..high."""
    values = values.flatten()
    assert low <= int(values.min()) and int(values.max()) <= high
    counts = torch.bincount(values - low, minlength=high - low + 1).double()
    assert_counts(counts, torch.full_like(counts, 1 / len(counts)))


def assert_counts(counts: Tensor, chances: Tensor) -> None:
    expected = chances * counts.sum()
    assert expected.min() > 20
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < CRITICAL[len(counts) - 1]


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "text"
    path.write_bytes(bytes(torch.randint(256, (20_000,), generator=seeded()).tolist()))
    return path


@pytest.fixture(params=tasks.TASKS)
def task(request: pytest.FixtureRequest, text_file: Path) -> Task:
    options = {"data": text_file, "length": 40} if request.param == "wikipedia" else {}
    return tasks.make(request.param, **options)


def perfect(task: Task, batch: Batch) -> Tensor:
    """Logits that are right with near certainty."""
    target = batch.target.clamp(min=0)
    if task.output_size == task.targets:
        return 40.0 * target - 20
    shape = (*target.shape, task.output_size // task.targets)
    return torch.zeros(shape).scatter_(-1, target.unsqueeze(-1), 40.0).flatten(2)


def assert_solved(task: Task, batch: Batch, solve) -> None:
    inputs, targets, masks = batch.input.tolist(), batch.target.tolist(), batch.mask.tolist()
    for i, length in enumerate(batch.lengths.tolist()):
        answers = solve([inputs[t][i] for t in range(length)])
        answers += [None] * (task.steps - length)
        assert [masks[t][i] for t in range(task.steps)] == [answer is not None for answer in answers]
        expected = [answer or [-100] * task.targets for answer in answers]
        assert [targets[t][i] for t in range(task.steps)] == expected
    ended = torch.arange(task.steps).unsqueeze(1) >= batch.lengths
    assert not batch.input[ended].any()


@pytest.mark.parametrize(
    "task",
    [
        Parity(),
        Parity(placement="scatter"),
        Parity(bits=5),
        Logic(),
        Addition(),
        Sort(),
        Sort(separation=0.2),
    ],
    ids=lambda task: f"{task.name}-{task.input_size}",
)
def test_targets_equal_the_solver(task: Task):
    assert_solved(task, task.sample(10_000, seeded()), getattr(solvers, task.name))


def test_wikipedia_targets_equal_the_solver(text_file: Path):
    task = Wikipedia(data=text_file, length=20)
    solve = functools.partial(solvers.wikipedia, text=text_file.read_bytes())
    assert_solved(task, task.sample(10_000, seeded()), solve)


def test_other_sizes_equal_the_solver():
    logic, addition, sort = Logic(length=3, gates=2), Addition(length=2, digits=1), Sort(length=4)
    assert (logic.input_size, addition.output_size, sort.steps) == (22, 22, 8)
    assert_solved(logic, logic.sample(500, seeded()), solvers.logic)
    assert_solved(addition, addition.sample(500, seeded()), functools.partial(solvers.addition, places=2))
    addition = Addition(digits=18)
    assert_solved(addition, addition.sample(500, seeded()), functools.partial(solvers.addition, places=19))
    assert_solved(sort, sort.sample(500, seeded()), solvers.sort)


def test_sizes(task: Task):
    sizes = {
        "parity": (64, 1, 128, "rnn", 128, 100, 1, range(1, 65)),
        "logic": (102, 1, 128, "lstm", 16, 100, 10, range(1, 11)),
        "addition": (50, 66, 512, "lstm", 32, 20, 5, range(1, 6)),
        "sort": (2, 15, 512, "lstm", 16, 100, 30, range(2, 16)),
        "wikipedia": (256, 256, 1500, "lstm", 32, 100, 40, ()),
    }
    names = "input_size output_size hidden_size cell batch_size max_steps steps difficulties"
    assert tuple(getattr(task, name) for name in names.split()) == sizes[task.name]
    batch = task.sample(3, seeded())
    T, K = task.steps, task.targets
    assert batch.input.shape == ((T, 3) if task.name == "wikipedia" else (T, 3, task.input_size))
    assert batch.input.dtype == (torch.int64 if task.name == "wikipedia" else torch.float32)
    assert (batch.target.shape, batch.target.dtype) == ((T, 3, K), torch.int64)
    assert (batch.mask.shape, batch.mask.dtype) == ((T, 3), torch.bool)
    assert (batch.lengths.shape, batch.lengths.dtype) == ((3,), torch.int64)


@pytest.mark.parametrize("bits", [1, 7, 32, 33, 64, 100])
def test_parity_packed_to_bits_is_what_it_draws(bits: int) -> None:
    task = Parity(bits=bits)
    batch, made = task.sample(200, seeded()), task.packed(200, seeded())
    assert made is not None and task.packed(0, seeded()) is not None
    words, target = made
    unpacked = (words.unsqueeze(-1) >> torch.arange(32) & 1).flatten(2)
    positive, negative = unpacked.chunk(2, 2)
    assert torch.equal((positive - negative)[..., :bits].float(), batch.input)
    assert not (positive + negative)[..., bits:].any()
    assert torch.equal(target, batch.target.squeeze(-1))


def test_scattered_parity_has_no_shorter_way_to_bits() -> None:
    assert Parity(placement="scatter").packed(3, seeded()) is None


def test_parity_is_uniform():
    for placement in ("prefix", "scatter"):
        batch = Parity(placement=placement).sample(20_000, seeded())
        assert batch.difficulty is not None
        assert torch.equal(batch.difficulty, batch.input.abs().sum((0, 2)).long())
        assert_uniform(batch.difficulty, 1, 64)
        signs = batch.input[batch.input != 0]
        assert_uniform((signs > 0).long(), 0, 1)
    used = Parity().sample(1000, seeded()).input[0] != 0
    assert torch.equal(used.sum(1), (used.cumprod(1)).sum(1))


def test_scattered_bits_are_every_subset_with_equal_chance():
    used = Parity(bits=6, placement="scatter").sample(20_000, seeded(), difficulty=2).input[0] != 0
    counts = torch.bincount((used * 2 ** torch.arange(6)).sum(1), minlength=64).double()
    assert_counts(counts[counts > 0], torch.full([15], 1 / 15))


def test_logic_is_uniform():
    batch = Logic().sample(10_000, seeded())
    assert_uniform(batch.lengths, 1, 10)
    there = batch.mask
    gates = batch.input[there][:, 2:].unflatten(1, (10, 10))
    assert_uniform(gates.sum((1, 2)).long(), 1, 10)
    assert_uniform(gates[gates.any(-1)].argmax(-1), 0, 9)
    assert_uniform(gates[:, 0].argmax(-1), 0, 9)
    assert_uniform(batch.input[0, :, 0].long(), 0, 1)
    assert_uniform(batch.input[..., 1][there].long(), 0, 1)


def test_addition_is_uniform():
    batch = Addition().sample(10_000, seeded())
    assert_uniform(batch.lengths, 1, 5)
    there = torch.arange(5).unsqueeze(1) < batch.lengths
    digits = batch.input[there].unflatten(1, (5, 10))
    assert_uniform(digits.sum((1, 2)).long(), 1, 5)
    assert_uniform(digits[digits.any(-1)].argmax(-1), 0, 9)
    assert_uniform(digits[:, 0].argmax(-1), 0, 9)


def test_sort_is_uniform_and_normal():
    batch = Sort().sample(20_000, seeded())
    assert batch.difficulty is not None
    assert_uniform(batch.difficulty, 2, 15)
    for length in (2, 5, 15):
        first = Sort().sample(5000, seeded(), difficulty=length).target[length, :, 0]
        assert_uniform(first, 0, length - 1)
    numbers = Sort().sample(10_000, seeded(), difficulty=15).input[:15, :, 0].double()
    assert abs(float(numbers.mean())) < 4 / math.sqrt(150_000)
    assert abs(float(numbers.var()) - 1) < 4 * math.sqrt(2 / 150_000)


def test_sort_separation():
    batch = Sort(separation=0.25).sample(2000, seeded(), difficulty=15)
    gaps = batch.input[:15, :, 0].sort(0).values.diff(dim=0)
    assert gaps.min() > 0.25 - 1e-6
    assert torch.equal(batch.target, Sort().sample(2000, seeded(), difficulty=15).target)


def test_difficulty():
    logic = Logic().sample(500, seeded(), difficulty=7)
    assert (logic.lengths == 5).all() and (logic.input[:5, :, 2:].sum(-1) == 7).all()
    addition = Addition().sample(500, seeded(), difficulty=4)
    assert (addition.lengths == 3).all() and (addition.input[:3].sum(-1) == 4).all()
    sort = Sort().sample(500, seeded(), difficulty=9)
    assert (sort.lengths == 18).all()
    for placement in ("prefix", "scatter"):
        parity = Parity(placement=placement).sample(500, seeded(), difficulty=33)
        assert (parity.input.abs().sum(-1) == 33).all()
    for batch, difficulty in ((logic, 7), (addition, 4), (sort, 9), (parity, 33)):
        assert batch.difficulty is not None and (batch.difficulty == difficulty).all()


def test_a_seed_gives_one_batch_and_nothing_else_is_random(task: Task):
    before = torch.get_rng_state()
    first, again, other = (task.sample(50, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert_same(first, again)
    assert not torch.equal(first.input, other.input)


def test_rows_and_to(task: Task):
    batch = task.sample(10, seeded())
    part = batch.rows(slice(4, 7)).to("cpu")
    output = torch.randn(task.steps, 10, task.output_size, generator=seeded())
    for score in (task.loss, task.error, task.target_error):
        assert_same(score(output[:, 4:7], part), score(output, batch)[4:7])
    assert [task.render(part, i) for i in range(3)] == [task.render(batch, i) for i in range(4, 7)]
    assert (part.difficulty is None) == (batch.difficulty is None)


def test_loss_is_summed_over_targets_in_nats(task: Task):
    batch = task.sample(50, seeded())
    classes = max(2, task.output_size // task.targets)
    targets = batch.mask.sum(0) * task.targets
    assert_same(task.loss(torch.zeros(task.steps, 50, task.output_size), batch), targets * math.log(classes))
    assert task.loss(perfect(task, batch), batch).max() < 1e-4

    output = torch.randn(task.steps, 50, task.output_size, generator=seeded(), dtype=torch.float64)
    logits = output.unflatten(-1, (task.targets, -1))
    if task.output_size == task.targets:
        logits = torch.cat([torch.zeros_like(logits), logits], -1)
    chosen = logits.log_softmax(-1).gather(-1, batch.target.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    assert_same(task.loss(output, batch), -(chosen * batch.mask.unsqueeze(-1)).sum((0, 2)))


def test_errors_count_mistakes(task: Task):
    batch = task.sample(50, seeded())
    right = perfect(task, batch)
    assert not task.error(right, batch).any() and not task.target_error(right, batch).any()
    i = int(batch.mask.sum(0).argmax())
    last = int(batch.mask[:, i].nonzero()[-1])
    wrong = right.clone()
    wrong[last, i] = -wrong[last, i]
    one_mistake = torch.zeros(50)
    one_mistake[i] = 1
    assert_same(task.error(wrong, batch), one_mistake)
    assert_same(task.target_error(wrong, batch), one_mistake / batch.mask[:, i].sum())
    # What stands where no target is makes no difference.
    noisy = torch.where(batch.mask.unsqueeze(-1), right, torch.randn(right.shape, generator=seeded()))
    assert not task.error(noisy, batch).any()


def test_a_single_number_is_added_rightly():
    task = Addition()
    batch = task.sample(200, seeded())
    single = batch.lengths == 1
    output = torch.randn(5, 200, 66, generator=seeded())
    assert single.any()
    assert not task.error(output, batch)[single].any() and not task.target_error(output, batch)[single].any()
    assert not task.loss(output, batch)[single].any()
    assert task.error(output, batch)[~single].all()


def test_truth_tables():
    for name, gate in zip(GATES, solvers.GATES, strict=True):
        rows = [(True, True), (True, False), (False, True), (False, False)]
        assert TABLES[name] == "".join("T" if gate(p, q) else "F" for p, q in rows)


def test_predictions_have_the_form_of_labels(task: Task):
    batch = task.sample(20, seeded())
    for i in range(20):
        inputs, targets = task.labels(batch, i)
        assert len(inputs) == len(targets) == int(batch.lengths[i])
        assert task.predictions(perfect(task, batch), batch, i) == targets
        assert [bool(label) for label in targets] == batch.mask[: len(targets), i].tolist()


def test_wrong_names_and_options():
    with pytest.raises(ValueError, match=r"expected one of parity, logic, addition, sort, wikipedia, got 'chess'"):
        tasks.make("chess")
    with pytest.raises(ValueError, match=r"placement: expected prefix or scatter, got 'suffix'"):
        tasks.make("parity", placement="suffix")
    with pytest.raises(ValueError, match=r"bits: expected at least 1, got 0"):
        Parity(bits=0)
    with pytest.raises(ValueError, match=r"digits: expected sums below 2\^63, got 5 numbers of 19 digits"):
        Addition(digits=19)
    with pytest.raises(ValueError, match=r"got 5 numbers of 1000000000 digits"):
        Addition(digits=10**9)
    with pytest.raises(ValueError, match=r"separation: expected a number from 0 on, got nan"):
        Sort(separation=math.nan)
    with pytest.raises(ValueError, match=r"difficulty: expected 2 to 15, got 16"):
        Sort().sample(1, seeded(), difficulty=16)
    with pytest.raises(ValueError, match=r"difficulty: wikipedia has none, got 3"):
        Wikipedia(data="excerpt").sample(1, seeded(), difficulty=3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_batches_are_made_on_the_generators_device(task: Task):
    batch = task.sample(200, torch.Generator("cuda").manual_seed(0))
    assert all(x is None or x.device.type == "cuda" for x in batch)
    if task.name != "wikipedia":
        assert_solved(task, batch.to("cpu"), getattr(solvers, task.name))
    assert not task.error(perfect(task, batch.to("cpu")).cuda(), batch).any()
