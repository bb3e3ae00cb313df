"""The loop in C: built with the machine's compiler at first use, cached, its products left to torch's BLAS."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import (
    KINDS,
    Grads,
    Inputs,
    Outputs,
    Rules,
    Update,
    by_look_up,
    each,
    look_up,
    nan_error,
)

log = logging.getLogger("pondertime")
SOURCE = Path(__file__).with_name("loop.c")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
DONE, TAPE_FULL, NOT_A_NUMBER = range(3)
ALIGNED = 16  # numbers
# With fewer input steps the products do not pay for a copy of their weights in another layout, with fewer units not
# for MKL's own, which asks for some MiB beside them.
WORTH_A_COPY, WORTH_PACKING = 4, 256

PLAIN = torch.contiguous_format
POINTER, INT, LONG, REAL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class Loop(ctypes.Structure):
    """``Loop`` of loop.c; a number at the end of a name is a place in an array there."""

    _fields_ = [
        *[(k, INT) for k in ("cell", "T", "B", "I", "H", "O", "max_steps", "force_steps", "keep", "threads")],
        ("epsilon", REAL),
        *[(k, POINTER) for k in ("gemm", "compute", "x", "xw", "weight_ih", "bias_ih", "bias_hh", "bias", "weight")],
        *[(k, INT) for k in ("transposed", "begun")],
        ("halt", POINTER),
        ("halt_bias", REAL),
        *[(k, POINTER) for k in ("weight_y", "bias_y", "y", "lengths")],
        *[(k, POINTER) for k in ("state0", "state1", "mean", "steps", "remainder")],
        *[(k, POINTER) for k in ("prev0", "prev1", "gates", "prob", "p", "seen", "row", "count")],
        *[(k, LONG) for k in ("capacity", "capacity_updates")],
        *[(k, POINTER) for k in ("total", "mean_c", "child")],
        *[(k, INT) for k in ("t", "n", "m")],
        *[(k, LONG) for k in ("offset", "used", "updates")],
        *[(k, POINTER) for k in ("d_y", "d_mean", "d_remainder", "d_state0", "d_state1", "d_xw", "d_logit", "d_x")],
        *[(k, POINTER) for k in ("d_weight_ih", "d_bias_ih", "d_bias_hh", "d_weight_hh", "d_halt", "d_halt_bias")],
        *[(k, POINTER) for k in ("d_weight_y", "d_bias_y")],
        *[(k, POINTER) for k in ("carry0", "carry1", "carry2", "carry3", "end_dot", "zeros")],
    ]


class Library:
    """The built loop and the BLAS functions it calls."""

    def __init__(self, path: Path) -> None:
        self.loop = ctypes.CDLL(str(path))
        torch_cpu = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        self.gemm = {torch.float32: address(torch_cpu, "sgemm_"), torch.float64: address(torch_cpu, "dgemm_")}
        if None in self.gemm.values():
            raise OSError("torch's library shows no sgemm_ and dgemm_")
        self.pack: Any = getattr(torch_cpu, "cblas_sgemm_pack", None)
        self.pack_size: Any = getattr(torch_cpu, "cblas_sgemm_pack_get_size", None)
        self.compute = address(torch_cpu, "cblas_sgemm_compute")
        if self.pack_size is not None:
            self.pack_size.restype = ctypes.c_size_t


def address(library: ctypes.CDLL, name: str) -> int | None:
    function = getattr(library, name, None)
    return None if function is None else ctypes.cast(function, POINTER).value


@functools.cache
def library() -> Library | str:
    """The loop, or why there is none."""
    compiler = next((c for c in (os.environ.get("CC"), "cc", "gcc", "clang") if c and shutil.which(c)), None)
    if compiler is None:
        return announce("no C compiler here")
    try:
        return Library(build(compiler))
    except (
        OSError,
        RuntimeError,
        subprocess.SubprocessError,
    ) as error:  # RuntimeError: there is no home to build it in
        return announce(f"the C loop cannot be built or loaded ({error})")


def announce(why: str) -> str:
    log.warning("pondertime: %s, so the fused path uses plain torch calls; the same numbers, slower", why)
    return why


def build(compiler: str) -> Path:
    """Compile loop.c into the user's cache, once for each source, compiler and processor."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    cpuinfo = Path("/proc/cpuinfo")
    flags = next((line for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")
    key = hashlib.sha256("\n".join([SOURCE.read_text(), version, flags, *FLAGS]).encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pondertime"
    target = cache / f"loop-{key}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            beside = Path(folder) / "loop.so"
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(beside), "-lm"]
            subprocess.run(command, capture_output=True, check=True, timeout=120)
            os.replace(beside, target)
        log.info("pondertime: built %s", target)
    return target


class Tape:
    """The memory of one network's loop, one tensor for numbers and one for places; grows while it runs."""

    def __init__(self, run: "Run", rows: int, *, seen: bool) -> None:
        H, kind = run.H, run.rules.kind
        self.widths = {"prev0": H, "gates": kind.slots * H, "prob": 1, "p": 1}
        if kind.leaves == 2:
            self.widths["prev1"] = H
        if seen:
            self.widths["seen"] = H
        self.keep, self.B, self.dtype = run.keep, run.B, run.dtype
        self.capacity = max(rows, 2 * run.B) if run.keep else 2 * run.B
        self.updates = run.T * min(run.rules.force_steps or run.rules.max_steps, 128)
        self.allocate()

    def allocate(self) -> None:
        self.starts, size = {}, 0
        for name, width in self.widths.items():
            self.starts[name] = size
            size += width * (self.B if name == "gates" and not self.keep else self.capacity)
        self.numbers = torch.empty(size, dtype=self.dtype)
        self.places = torch.empty(self.capacity + self.updates, dtype=torch.int32)

    def grow(self) -> None:
        used, old = self.capacity, {name: self.part(name, self.capacity) for name in self.widths}
        places = self.places
        self.capacity, self.updates = self.capacity + self.capacity // 2 + self.B, 2 * self.updates
        self.allocate()
        for name, part in old.items():
            self.part(name, used)[:] = part
        self.places[:used] = places[:used]
        self.places[self.capacity :][: len(places) - used] = places[used:]

    def part(self, name: str, rows: int) -> Tensor:
        """The first rows of one of the buffers, ``[rows, width]``."""
        width, start = self.widths[name], self.starts[name]
        return self.numbers[start : start + rows * width].view(rows, width)

    def attach(self, loop: Loop) -> None:
        """Point the loop to the memory."""
        base, size = self.numbers.data_ptr(), self.numbers.element_size()
        for name, start in self.starts.items():
            setattr(loop, name, base + start * size)
        loop.row = self.places.data_ptr()
        loop.count = loop.row + 4 * self.capacity
        loop.capacity, loop.capacity_updates = self.capacity, self.updates


class Run:
    """A forward pass of E networks, and what its backward pass needs."""

    def __init__(self, lib: Library, inputs: Inputs, rules: Rules, *, rows: int, keep: bool, seen: bool) -> None:
        self.lib, self.rules, self.keep = lib, rules, keep
        self.inputs = each(Tensor.contiguous, inputs)
        self.front = inputs.h.shape[:-2]  # (E,), or nothing
        self.E, (self.B, self.H) = len(inputs.h) if self.front else 1, inputs.h.shape[-2:]
        self.T, self.I = inputs.x.shape[len(self.front)], inputs.weight_ih.shape[-1] - 1
        self.X = inputs.weight_ih.shape[-2]
        self.dtype = inputs.h.dtype
        self.suffix = "f64" if self.dtype == torch.float64 else "f32"
        self.held: list[Tensor] = []  # what the loops point to
        self.threads = torch.get_num_threads()
        self.tapes = [Tape(self, rows, seen=seen) for _ in range(self.E)]
        self.loops = [Loop() for _ in range(self.E)]
        self.out: Any = self.forward()

    def point(self, **tensors: Tensor | None) -> None:
        """Point every loop to its part of the tensors, which are contiguous."""
        for name, a in tensors.items():
            if a is None:
                continue
            assert a.is_contiguous()
            self.held.append(a)
            start = a.data_ptr()
            if self.E == 1:
                setattr(self.loops[0], name, start)
                continue
            size = a.numel() // self.E * a.element_size()
            for e, loop in enumerate(self.loops):
                setattr(loop, name, start + e * size)

    def work(self, **sizes: int) -> Tensor:
        """Memory that nobody else sees, of so many numbers a network, as one tensor."""
        starts, total = {}, 0
        for name, size in sizes.items():
            starts[name] = total
            total += -(-size // ALIGNED) * ALIGNED
        memory = torch.empty(self.E, total, dtype=self.dtype)
        self.held.append(memory)
        base, width = memory.data_ptr(), memory.element_size()
        for e, loop in enumerate(self.loops):
            for name, start in starts.items():
                setattr(loop, name, base + (e * total + start) * width)
        return memory

    def empty(self, *shape: int) -> Tensor:
        """Memory for every network."""
        return torch.empty(*self.front, *shape, dtype=self.dtype)

    def weights(self, *, transpose: bool) -> None:
        """Lay W_h out for its product: packed by MKL or a copy, or as it is where that does not pay."""
        weight = self.inputs.weight_hh
        P, H = weight.shape[-2:]
        pays = self.T >= WORTH_A_COPY
        packs = self.lib.pack is not None and H >= WORTH_PACKING
        if pays and packs and self.lib.compute and self.dtype == torch.float32:
            n, k = (P, H) if transpose else (H, P)
            size = self.lib.pack_size(162, self.B, n, k) // 4 + 64
            packed = torch.empty(self.E, size)
            layout, one = 112 if transpose else 111, ctypes.c_float(1)
            for a, b in zip(weight.view(self.E, P, H), packed, strict=True):
                self.lib.pack(101, 162, layout, self.B, n, k, one, POINTER(a.data_ptr()), H, POINTER(b.data_ptr()))
            self.point(weight=packed)
            for loop in self.loops:
                loop.compute = self.lib.compute
            return
        as_it_is = transpose and not pays and (H > 256 or P == H)
        self.point(weight=weight if as_it_is or not transpose else weight.transpose(-2, -1).contiguous())
        for loop in self.loops:
            loop.compute, loop.transposed = None, int(as_it_is)

    def forward(self) -> Outputs:
        i, rules, T, B, H, empty = self.inputs, self.rules, self.T, self.B, self.H, self.empty
        h = torch.clone(i.h)
        c = None if i.c is None else torch.clone(i.c)
        self.mean, remainder = empty(T, B, H), empty(T, B)
        y = self.mean if i.weight_y is None else empty(T, B, i.weight_y.shape[-2])
        self.steps = torch.empty(*self.front, T, B, dtype=torch.int64)
        self.zeros = torch.zeros(H, dtype=self.dtype)
        # Without features there is nothing to project, and no address of x.
        floating = i.x.is_floating_point() and self.I > 0
        xw = None
        if not floating:
            xw = look_up(i) if self.I else torch.zeros(*self.front, T, B, self.X, dtype=self.dtype)
        child = torch.empty(self.E, B, dtype=torch.int32)
        work = self.work(
            total=B, bias=2 * self.X, **({"mean_c": B * H} if c is not None else {}),
            **({"xw": T * B * self.X} if floating else {}),
        )  # fmt: skip
        self.point(
            x=i.x if floating else None, xw=xw, weight_ih=i.weight_ih,
            bias_ih=i.bias_ih, bias_hh=i.bias_hh, halt=i.halt, weight_y=i.weight_y, bias_y=i.bias_y, y=y,
            lengths=rules.lengths, state0=h, state1=c, mean=self.mean, steps=self.steps, remainder=remainder,
            child=child,
        )  # fmt: skip
        self.weights(transpose=True)
        for loop, tape, bias in zip(self.loops, self.tapes, i.halt_bias.flatten().tolist(), strict=True):
            loop.cell, loop.T, loop.B, loop.I, loop.H, loop.O = KINDS.index(rules.kind), T, B, self.I, H, y.shape[-1]
            loop.max_steps, loop.force_steps = min(rules.max_steps, 2**31 - 1), min(rules.force_steps or 0, 2**31 - 1)
            loop.keep, loop.threads = int(self.keep), self.threads if self.E == 1 else 1
            loop.epsilon, loop.halt_bias = rules.epsilon, bias
            loop.gemm, loop.zeros = self.lib.gemm[self.dtype], self.zeros.data_ptr()
            tape.attach(loop)
        self.run_forward()
        # Results must not be held by what they hold, or they would never be freed.
        self.held = [work, child]
        self.mean = None if i.weight_y is None else self.mean
        # The loop goes back by N, which is theirs to change.
        return Outputs(y, h, c, self.steps.clone(), remainder)

    def run_forward(self) -> None:
        loops = (ctypes.POINTER(Loop) * self.E)(*map(ctypes.pointer, self.loops))
        status = (INT * self.E)(*[TAPE_FULL] * self.E)
        run = getattr(self.lib.loop, f"forward_all_{self.suffix}")
        while TAPE_FULL in status:
            run(loops, status, self.E, self.threads)
            for e, (loop, tape, s) in enumerate(zip(self.loops, self.tapes, status, strict=True)):
                if s == NOT_A_NUMBER:
                    raise nan_error(loop.t, loop.n - 1, e)
                if s == TAPE_FULL:
                    tape.grow()
                    tape.attach(loop)

    @property
    def rows(self) -> int:
        """Rows that the longest tape used."""
        return max(loop.used for loop in self.loops)

    def backward(self, d: Grads, *, x: bool) -> Inputs:
        """Derivatives by every input, by x only where it is asked for. The tape is used up."""
        i, empty, B, H = self.inputs, self.empty, self.B, self.H
        d_y, d_h, d_c, d_remainder = d.filled(i, self.T)
        # Copies of what is not ours: the loop writes to these.
        d_h = d_h if d.h is None else torch.clone(d_h, memory_format=PLAIN)
        d_c = d_c if d.c is None else torch.clone(d.c, memory_format=PLAIN)
        d_y = d_y.contiguous() if self.rules.lengths is None or d.y is None else torch.clone(d_y, memory_format=PLAIN)
        d_x: Any = torch.empty_like(i.x) if x and i.x.is_floating_point() else None
        made = each(torch.empty_like, i._replace(x=d_x))._replace(x=d_x, h=d_h, c=d_c)
        d_xw = None if i.x.is_floating_point() and self.I else empty(self.T, B, self.X)
        self.work(
            end_dot=B, carry0=B * H, carry2=B * H, **({"carry1": B * H, "carry3": B * H} if d_c is not None else {}),
            d_logit=self.rows + B, **({"d_xw": self.T * B * self.X} if d_xw is None else {}),
        )  # fmt: skip
        self.point(
            d_y=d_y, d_mean=d_y if i.weight_y is None else self.mean, d_remainder=d_remainder.contiguous(),
            d_state0=d_h, d_state1=d_c, d_xw=d_xw, d_x=made.x, d_weight_ih=made.weight_ih, d_bias_ih=made.bias_ih,
            d_bias_hh=made.bias_hh, d_weight_hh=made.weight_hh, d_halt=made.halt, d_halt_bias=made.halt_bias,
            d_weight_y=made.weight_y, d_bias_y=made.bias_y,
        )  # fmt: skip
        self.weights(transpose=False)
        loops = (ctypes.POINTER(Loop) * self.E)(*map(ctypes.pointer, self.loops))
        getattr(self.lib.loop, f"backward_all_{self.suffix}")(loops, self.E, self.threads)
        if d_xw is not None and self.I:
            by_look_up(i, d_xw, made.weight_ih)
        return made

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        tape, used, at, u = self.tapes[0], self.loops[0].used, 0, 0
        counts, rows = tape.places[tape.capacity :].tolist(), tape.places[:used].long()
        prob, p = tape.part("prob", used).squeeze(1), tape.part("p", used).squeeze(1)
        seen = tape.part("seen", used)
        updates = []
        steps = self.steps.view(self.E, self.T, self.B)[0]
        for t in range(self.T):
            for n in range(1, int(steps[t].max()) + 1):
                here = slice(at, at + counts[u])
                updates.append(Update(t, n, rows[here], prob[here], p[here], seen[here]))
                at, u = here.stop, u + 1
        assert at == used
        return updates
