"""Runs ``gluon_lstm`` on a CPU: a thread is an element of numpy's arrays, a program is a Python thread.

The kernel's own source is executed with a ``gl`` of numpy, and its inline assembly by a small interpreter that knows
the instructions that occur there. A program that waits for others waits here, too; after a while it says so.
"""

import importlib.util
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import pondertime.fused

THREADS, PATIENCE = 128, 60.0
FUSED = Path(pondertime.fused.__file__).parent


class Variable(np.ndarray):
    """A variable of every thread."""

    def to(self, dtype: Any, bitcast: bool = False) -> "Variable":
        return variable(self.view(dtype) if bitcast else self.astype(dtype))


def variable(a: Any) -> Variable:
    return np.asarray(a).view(Variable)


class Pointer:
    """A place in a flat array; there is nothing outside of it."""

    def __init__(self, memory: np.ndarray, at: Any = 0) -> None:
        self.memory, self.at = memory, at

    def __add__(self, more: Any) -> "Pointer":
        return Pointer(self.memory, self.at + np.asarray(more, np.int64))

    def __sub__(self, less: Any) -> "Pointer":
        return self + -less

    def load(self, mask: Any = None, other: Any = None) -> Any:
        if mask is None:
            return self.memory[self.at]
        made = np.full(np.shape(mask), other, self.memory.dtype)
        made[mask] = self.memory[np.broadcast_to(self.at, made.shape)[mask]]
        assert (np.broadcast_to(self.at, made.shape)[mask] >= 0).all()
        return variable(made)

    def store(self, value: Any, mask: Any) -> None:
        mask = np.broadcast_to(np.asarray(mask), (THREADS,))
        at = np.broadcast_to(self.at, mask.shape)[mask]
        assert len(np.unique(at)) == len(at) and (at >= 0).all()
        self.memory[at] = np.broadcast_to(value, mask.shape)[mask]


class Constant(int):
    """A number of the kernel's source, which takes the type of the variable it meets."""

    __array_ufunc__ = None
    value = property(int)

    def __add__(self, other: Any) -> Any:
        return other + int(self)

    def __mul__(self, other: Any) -> Any:
        return other * int(self)

    __radd__, __rmul__ = __add__, __mul__


class Text(str):
    value = property(str)


class Barrier:
    """Completed by one arrival and the bytes that it expects."""

    def __init__(self) -> None:
        self.phase, self.pending, self.bytes = 0, 1, 0

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase, self.pending = self.phase + 1, 1


class Cluster:
    """Programs that see each other's shared memory."""

    def __init__(self, size: int, shared: int) -> None:
        self.memory = [np.full(shared // 4, 0x7FC00000, np.uint32) for _ in range(size)]  # NaN
        self.barriers: list[dict[int, Barrier]] = [{} for _ in range(size)]
        self.news, self.all = threading.Condition(), threading.Barrier(size)

    def wait(self, rank: int, at: int, parity: int) -> None:
        with self.news:
            barrier = self.barriers[rank][at]
            there = self.news.wait_for(lambda: barrier.phase % 2 != parity, PATIENCE)
        assert there, f"program {rank} waits for ever"


class Program(threading.local):
    cluster: Cluster
    rank: int
    group: int


HERE = Program()
LANE = np.arange(THREADS, dtype=np.uint32) % 32
WARP = np.arange(THREADS) // 32 * 32


def floats(a: np.ndarray) -> np.ndarray:
    return a.view(np.float32)


def across(a: np.ndarray, lane: np.ndarray) -> np.ndarray:
    """What another thread of the warp has."""
    return a[WARP + lane.astype(np.int64) % 32]


# What instructions compute, by how they begin.
COMPUTE: dict[str, Callable[..., np.ndarray]] = {
    "mov": lambda a: a,
    "mapa": lambda a, rank: a | (rank << np.uint32(24)),
    "shfl.sync.idx": lambda a, lane, *_: across(a, lane),
    "shfl.sync.bfly": lambda a, lane, *_: across(a, LANE ^ lane),
    "vote.sync.any": lambda a, _: a.reshape(4, 32).any(1).repeat(32),
    "setp.eq": lambda a, b: a == b,
    "setp.ne": lambda a, b: a != b,
    "setp.lt": lambda a, b: a < b,
    "selp": lambda a, b, which: np.where(which, a, b),
    "add.f32": lambda a, b: (floats(a) + floats(b)).view(np.uint32),
    "sub.f32": lambda a, b: (floats(a) - floats(b)).view(np.uint32),
    "ex2": lambda a: np.exp2(floats(a)).view(np.uint32),
    "rcp": lambda a: (1 / floats(a)).view(np.uint32),
    "add.u32": lambda a, b: a + b,
    "and": lambda a, b: a & b,
    "shl": lambda a, b: a << b,
    "shr": lambda a, b: a >> b,
}


def mma(a: list[np.ndarray], b: list[np.ndarray], c: list[np.ndarray]) -> list[np.ndarray]:
    """A product of a tensor core, m16n8k8, of which it sees ten bits after the point."""
    cut = [floats(x & np.uint32(0xFFFFE000)).astype(np.float64).reshape(4, 8, 4) for x in (*a, *b)]
    left, right = np.zeros((4, 16, 8)), np.zeros((4, 8, 8))
    left[:, :8, :4], left[:, 8:, :4], left[:, :8, 4:], left[:, 8:, 4:] = cut[:4]
    right[:, :4], right[:, 4:] = (x.transpose(0, 2, 1) for x in cut[4:])
    acc = np.zeros((4, 16, 8))
    for k, x in enumerate(c):
        acc[:, 8 * (k // 2) : 8 * (k // 2) + 8, k % 2 :: 2] = floats(x).reshape(4, 8, 4)
    made = (left @ right + acc).astype(np.float32)
    parts = (made[:, 8 * (k // 2) : 8 * (k // 2) + 8, k % 2 :: 2] for k in range(4))
    return [np.ascontiguousarray(x).reshape(THREADS).view(np.uint32) for x in parts]


class Assembly:
    """One execution of a piece of assembly by all threads of a program."""

    def __init__(self, registers: dict[str, np.ndarray]) -> None:
        self.registers = registers
        self.cluster, self.rank = HERE.cluster, HERE.rank

    def get(self, name: str) -> np.ndarray:
        name = name.strip()
        if name in self.registers:
            return self.registers[name]
        if name == "global_smem":
            number = 0
        elif name == "%laneid":
            return LANE
        elif name == "%tid.x":
            return np.arange(THREADS, dtype=np.uint32)
        else:
            number = int(name[2:], 16) if name.startswith(("0f", "0x")) else int(name)
        return np.full(THREADS, number, np.uint32)

    def place(self, text: str) -> np.ndarray:
        """An address, ``[name+number]``."""
        name, _, more = text.strip()[1:-1].partition("+")
        return self.get(name) + np.uint32(int(more or 0))

    def words(self, text: str) -> list[str]:
        return [w.strip() for w in text.strip().strip("{}").split(",")]

    def put(self, name: str, value: Any, where: np.ndarray) -> None:
        if name == "_":
            return
        old = self.registers.get(name)
        value = np.broadcast_to(value, (THREADS,))
        self.registers[name] = value.copy() if where.all() or old is None else np.where(where, value, old)

    def run(self, text: str) -> None:
        lines = [line.strip() for line in text.strip().strip("{}").replace("\n", " ").split(";")]
        for line in lines:
            line = re.sub(r"^\w+: ", "", line)
            if not line or line.startswith((".reg", "bra")):
                continue
            where = np.ones(THREADS, bool)
            if line.startswith("@"):
                name, line = line[1:].split(None, 1)
                where = self.registers[name]
                if line.startswith("bra"):
                    continue  # a wait does not end before it is over
            op, _, rest = line.partition(" ")
            self.step(op, re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", rest), where)

    def step(self, op: str, args: list[str], where: np.ndarray) -> None:
        head = op.split(".")[0]
        if op.startswith("st.async"):
            return self.send(op, args, where)
        if op.startswith(("fence", "bar.warp")):
            return None
        if op.startswith("barrier.cluster.arrive"):
            return None
        if op.startswith("barrier.cluster.wait"):
            self.cluster.all.wait(PATIENCE)
            return None
        if head == "mbarrier":
            return self.barrier(op, args, where)
        if head == "mma":
            to, a, b, c = (self.words(x) for x in args)
            for name, made in zip(to, mma(*([self.get(x) for x in xs] for xs in (a, b, c))), strict=True):
                self.put(name, made, where)
            return None
        if op.startswith(("ld.shared", "st.shared")):
            place, names = (args[1], args[0]) if head == "ld" else (args[0], args[1])
            memory, at = self.cluster.memory[self.rank], self.place(place)
            assert (at % (4 * len(self.words(names))) == 0).all()
            for k, name in enumerate(self.words(names)):
                if head == "ld":
                    self.put(name, memory[at // 4 + k], where)
                else:
                    memory[(at // 4 + k)[where]] = self.get(name)[where]
            return None
        self.put(args[0], self.compute(op, [self.get(a) for a in args[1:]]), where)
        return None

    def compute(self, op: str, a: list[np.ndarray]) -> np.ndarray:
        for name, make in COMPUTE.items():
            if op.startswith(name):
                return make(*a)
        raise NotImplementedError(op)

    def barrier(self, op: str, args: list[str], where: np.ndarray) -> None:
        if "try_wait" in op:
            at, parity = self.place(args[1]), self.get(args[2])
            assert len(set(at)) == len(set(parity)) == 1
            self.cluster.wait(self.rank, int(at[0]), int(parity[0]))
            return self.put(args[0], np.ones(THREADS, bool), where)
        with self.cluster.news:
            for thread in where.nonzero()[0]:
                if "init" in op:
                    self.cluster.barriers[self.rank][int(self.place(args[0])[thread])] = Barrier()
                else:
                    barrier = self.cluster.barriers[self.rank][int(self.place(args[1])[thread])]
                    barrier.bytes += int(self.get(args[2])[thread])
                    barrier.pending -= 1
                    assert barrier.pending == 0
                    barrier.settle()
            self.cluster.news.notify_all()
        return None

    def send(self, op: str, args: list[str], where: np.ndarray) -> None:
        place, names, barrier = args
        to, at, values = self.place(place), self.place(barrier), [self.get(n) for n in self.words(names)]
        assert (to % (4 * len(values)) == 0).all() and len(values) == (4 if ".v4." in op else 1)
        with self.cluster.news:
            for thread in where.nonzero()[0]:
                rank, offset = int(to[thread]) >> 24, int(to[thread]) & 0xFFFFFF
                assert int(at[thread]) >> 24 == rank
                for k, value in enumerate(values):
                    self.cluster.memory[rank][offset // 4 + k] = value[thread]
                counted = self.cluster.barriers[rank][int(at[thread]) & 0xFFFFFF]
                counted.bytes -= 4 * len(values)
                counted.settle()
            self.cluster.news.notify_all()


def inline_asm(text: str, constraints: str, args: Any, dtype: Any, is_pure: bool, pack: int) -> Any:
    kinds = constraints.split(",")
    count = sum(k.startswith("=") for k in kinds)
    registers = {}
    assert len(kinds) == count + len(args) and pack == 1
    for k, a in enumerate(args):
        kind, a = np.float32 if kinds[count + k] == "f" else np.int32, np.asarray(a)
        assert a.dtype == kind or a.ndim == 0, (text, k, a.dtype)
        registers[f"${count + k}"] = np.broadcast_to(a.astype(kind), (THREADS,)).copy().view(np.uint32)
    run = Assembly(registers)
    run.run(text)
    made = [variable(registers[f"${k}"].view(d)) for k, d in enumerate(dtype if isinstance(dtype, tuple) else (dtype,))]
    if all(np.ndim(a) == 0 for a in args):
        assert (made[0] == made[0][0]).all()
        return int(made[0][0])
    return tuple(made) if isinstance(dtype, tuple) else made[0]


class Shared:
    def store(self, value: Any) -> None:
        self.value = value

    def load(self, layout: Any) -> Any:
        return self.value


def number(a: Any) -> Any:
    return np.float32(a) if isinstance(a, float) else np.int32(a) if isinstance(a, int) else a


def fake_gluon() -> dict[str, types.ModuleType]:
    """Modules in the place of Triton's."""
    gl: Any = types.ModuleType("triton.experimental.gluon.language")
    gl.constexpr = lambda a: Text(a) if isinstance(a, str) else a if isinstance(a, float) else Constant(a)
    gl.int32, gl.int64, gl.float32, gl.static_range = np.int32, np.int64, np.float32, range
    gl.BlockedLayout = gl.SwizzledSharedLayout = lambda *a: None
    gl.allocate_shared_memory = lambda *a: Shared()
    gl.arange = lambda first, end, layout=None: variable(np.arange(first, end, dtype=np.int32))
    gl.load = lambda at, mask=None, other=None: at.load(mask, other)
    gl.store = lambda at, value, mask: at.store(value, mask)
    gl.where = lambda c, a, b: variable(np.where(c, number(a), number(b)))
    gl.minimum = lambda a, b: variable(np.minimum(a, number(b)))
    gl.program_id = lambda axis: (HERE.rank, HERE.group)[axis]
    gl.inline_asm_elementwise, gl.thread_barrier = inline_asm, lambda: None
    tl: Any = types.ModuleType("triton.language")
    tl.constexpr, tl.exp, tl.abs, tl.where = None, lambda a: variable(np.exp(a)), abs, gl.where
    gluon, experimental, triton = (types.ModuleType(n) for n in ("gluon", "experimental", "triton"))

    def jit(f: Any = None, **options: Any) -> Any:
        return f if f is not None else jit

    for module in (gluon, triton):
        module.jit = jit  # type: ignore[attr-defined]
    gluon.constexpr_function, gluon.language = jit, gl  # type: ignore[attr-defined]
    experimental.gluon, triton.language = gluon, tl  # type: ignore[attr-defined]
    return {
        "triton": triton, "triton.language": tl, "triton.experimental": experimental,
        "triton.experimental.gluon": gluon, "triton.experimental.gluon.language": gl,
    }  # fmt: skip


def load_kernels() -> Any:
    """``gluon_lstm`` as a module of plain functions."""

    def execute(name: str) -> types.ModuleType:
        spec: Any = importlib.util.spec_from_file_location(f"pondertime.fused.{name}", FUSED / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module

    names = [*fake_gluon(), "pondertime.fused.triton_math", "pondertime.fused.gluon_lstm"]
    before = {name: sys.modules.get(name) for name in names}
    try:
        sys.modules.update(fake_gluon())
        execute("triton_math")
        return execute("gluon_lstm")
    finally:
        for name, module in before.items():
            if module is None:
                sys.modules.pop(name, None)
            else:
                sys.modules[name] = module


def launch(kernels: Any, groups: int, shared: int, args: tuple[Any, ...], meta: dict[str, Any]) -> None:
    """Run the kernel, one cluster after the other."""

    def pointers() -> Iterator[Any]:
        for a in args:
            yield Pointer(a.view(-1).numpy()) if isinstance(a, torch.Tensor) else a

    given, size = list(pointers()), meta["CG"]
    for group in range(groups):
        cluster, failed = Cluster(size, shared), []

        def program(rank: int, cluster: Cluster = cluster, group: int = group, failed: list[Any] = failed) -> None:
            HERE.cluster, HERE.rank, HERE.group = cluster, rank, group
            try:
                with np.errstate(over="ignore"):
                    kernels.lstm_kernel(*given, **meta)
            except BaseException as error:
                failed.append(error)
                cluster.all.abort()

        threads = [threading.Thread(target=program, args=(rank,)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise next((e for e in failed if not isinstance(e, threading.BrokenBarrierError)), failed[0])
