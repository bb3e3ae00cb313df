"""The loop in C: built with the machine's compiler at first use, cached, its products left to torch's BLAS."""

import ctypes
import functools
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pondertime.fused.common import KINDS, Inputs, Outputs, Rules, Update, each, nan_error

log = logging.getLogger("pondertime")
SOURCE = Path(__file__).with_name("loop.c")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC"]
DONE, TAPE_FULL, NOT_A_NUMBER = range(3)
# Below so many rows a product does not pay for a copy of its weights in another layout.
WORTH_A_COPY = 4

POINTER, INT, LONG, REAL = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_double


class Loop(ctypes.Structure):
    """``Loop`` of loop.c."""

    _fields_ = [
        *[(k, INT) for k in ("cell", "T", "B", "H", "max_steps", "force_steps", "keep", "threads")],
        ("epsilon", REAL),
        *[(k, POINTER) for k in ("gemm", "compute", "xw", "flag", "weight")],
        *[(k, INT) for k in ("transposed", "unused")],
        *[(k, POINTER) for k in ("bias_n", "halt")],
        ("halt_bias", REAL),
        ("lengths", POINTER),
        ("state", POINTER * 2),
        *[(k, POINTER) for k in ("mean", "steps", "remainder")],
        ("prev", POINTER * 2),
        *[(k, POINTER) for k in ("gates", "prob", "p", "seen", "row", "count")],
        *[(k, LONG) for k in ("capacity", "capacity_updates")],
        *[(k, POINTER) for k in ("total", "mean_c", "child")],
        *[(k, INT) for k in ("t", "n", "m")],
        *[(k, LONG) for k in ("offset", "used", "updates")],
        *[(k, POINTER) for k in ("d_mean", "d_remainder")],
        ("d_state", POINTER * 2),
        *[(k, POINTER) for k in ("d_xw", "d_flag", "d_logit")],
        ("carry", POINTER * 4),
        *[(k, POINTER) for k in ("end_dot", "zeros")],
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
    except (OSError, subprocess.SubprocessError) as error:
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


def pointer(a: Tensor | None) -> int | None:
    return None if a is None else a.data_ptr()


class Tape:
    """The buffers of one network's loop; grows while it runs."""

    def __init__(self, inputs: Inputs, e: int, rules: Rules, rows: int, *, keep: bool, seen: bool) -> None:
        self.like, self.kind = inputs.xw, rules.kind
        T, self.B, self.H = inputs.xw.shape[1], inputs.h.shape[1], inputs.h.shape[2]
        self.keep, self.seen = keep, seen
        self.capacity = max(rows, 2 * self.B) if keep else 2 * self.B
        self.updates = max(2 * T, 16)
        self.buffers: dict[str, Tensor] = {}
        self.allocate()

    def allocate(self) -> None:
        H, rows = self.H, self.capacity
        shapes: dict[str, tuple[int, ...]] = {"prev0": (rows, H), "prob": (rows,), "p": (rows,), "row": (rows,)}
        if self.kind.leaves == 2:
            shapes["prev1"] = (rows, H)
        shapes["gates"] = (rows if self.keep else self.B, self.kind.slots * H)
        shapes["count"] = (self.updates,)
        if self.seen:
            shapes["seen"] = (rows, H)
        for name, shape in shapes.items():
            dtype = torch.int32 if name in ("row", "count") else self.like.dtype
            new = torch.empty(shape, dtype=dtype)
            old = self.buffers.get(name)
            if old is not None:
                new[: len(old)] = old
            self.buffers[name] = new

    def grow(self) -> None:
        self.capacity, self.updates = 2 * self.capacity, 2 * self.updates
        self.allocate()

    def attach(self, loop: Loop) -> None:
        """Point the loop to the buffers."""
        b = {name: a.data_ptr() for name, a in self.buffers.items()}
        loop.prev[0], loop.prev[1] = b["prev0"], b.get("prev1")
        loop.gates, loop.prob, loop.p, loop.row, loop.count = b["gates"], b["prob"], b["p"], b["row"], b["count"]
        loop.seen = b.get("seen")
        loop.capacity, loop.capacity_updates = self.capacity, self.updates


class Run:
    """A forward pass of E networks, and what its backward pass needs."""

    def __init__(
        self, lib: Library, inputs: Inputs, rules: Rules, *, rows: int, keep: bool, seen: bool = False
    ) -> None:
        self.lib, self.rules, self.keep = lib, rules, keep
        self.inputs = each(lambda a: a.detach().contiguous(), inputs)
        self.E, self.T, self.B, self.H = *inputs.xw.shape[:3], inputs.h.shape[2]
        self.suffix = "f64" if inputs.xw.dtype == torch.float64 else "f32"
        self.keep_alive: list[Any] = []
        self.tapes = [Tape(self.inputs, e, rules, rows, keep=keep, seen=seen) for e in range(self.E)]
        self.threads = torch.get_num_threads()
        self.out = self.forward()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        a = torch.empty(shape, dtype=dtype or self.inputs.xw.dtype)
        self.keep_alive.append(a)
        return a

    def weights(self, loop: Loop, weight: Tensor, *, transpose: bool) -> None:
        """Lay W_h out for its product: MKL's packing, a copy, or as it is where a copy does not pay."""
        P, H = weight.shape
        n, k = (P, H) if transpose else (H, P)
        few = transpose and self.T < WORTH_A_COPY and H > 256
        if self.lib.pack is not None and self.lib.compute and weight.dtype == torch.float32 and not few:
            size = self.lib.pack_size(162, self.B, n, k)
            packed = self.empty(size // 4 + 64)
            self.lib.pack(
                101, 162, 112 if transpose else 111, self.B, n, k, ctypes.c_float(1), POINTER(weight.data_ptr()), H,
                POINTER(packed.data_ptr()),
            )  # fmt: skip
            loop.compute, loop.weight = self.lib.compute, packed.data_ptr()
            return
        loop.compute, loop.transposed = None, int(few)
        laid = weight.t().contiguous() if transpose and not few else weight
        self.keep_alive.append(laid)
        loop.weight = laid.data_ptr()

    def forward(self) -> Outputs:
        i, rules = self.inputs, self.rules
        E, T, B, H = self.E, self.T, self.B, self.H
        mean, remainder = self.empty(E, T, B, H), self.empty(E, T, B)
        self.steps = self.empty(E, T, B, dtype=torch.int64)
        h = i.h.clone()
        c = None if i.c is None else i.c.clone()
        flag = torch.stack([i.flag, torch.zeros_like(i.flag)], 1)
        lengths = None if rules.lengths is None else rules.lengths.contiguous()
        total, child = self.empty(E, B), self.empty(E, B, dtype=torch.int32)
        mean_c = None if c is None else self.empty(E, B, H)
        self.keep_alive += [flag, lengths]
        self.loops = [Loop() for _ in range(E)]
        for e, loop in enumerate(self.loops):
            loop.cell, loop.T, loop.B, loop.H = KINDS.index(rules.kind), T, B, H
            loop.max_steps, loop.force_steps = rules.max_steps, rules.force_steps or 0
            loop.keep, loop.threads = int(self.keep), self.threads if E == 1 else 1
            loop.epsilon, loop.halt_bias = rules.epsilon, i.halt_bias[e].item()
            loop.gemm = self.lib.gemm[i.xw.dtype]
            loop.xw, loop.flag, loop.halt = i.xw[e].data_ptr(), flag[e].data_ptr(), i.halt[e].data_ptr()
            loop.bias_n = None if i.bias_n is None else i.bias_n[e].data_ptr()
            loop.lengths = None if lengths is None else lengths[e].data_ptr()
            loop.state[0], loop.state[1] = h[e].data_ptr(), None if c is None else c[e].data_ptr()
            loop.mean, loop.steps = mean[e].data_ptr(), self.steps[e].data_ptr()
            loop.remainder, loop.total, loop.child = remainder[e].data_ptr(), total[e].data_ptr(), child[e].data_ptr()
            loop.mean_c = None if mean_c is None else mean_c[e].data_ptr()
            self.weights(loop, i.weight[e], transpose=True)
            self.tapes[e].attach(loop)
        self.run_forward()
        return Outputs(mean, h, c, self.steps, remainder)

    def run_forward(self) -> None:
        pointers = (ctypes.POINTER(Loop) * self.E)(*map(ctypes.pointer, self.loops))
        status = (INT * self.E)(*[TAPE_FULL] * self.E)
        run = getattr(self.lib.loop, f"forward_all_{self.suffix}")
        while TAPE_FULL in status:
            run(pointers, status, self.E, self.threads)
            for e, s in enumerate(status):
                if s == NOT_A_NUMBER:
                    raise nan_error(self.loops[e].t, self.loops[e].n - 1)
                if s == TAPE_FULL:
                    self.tapes[e].grow()
                    self.tapes[e].attach(self.loops[e])

    @property
    def rows(self) -> int:
        """Rows that the longest tape used."""
        return max(loop.used for loop in self.loops)

    def backward(self, d_mean: Tensor, d_h: Tensor, d_c: Tensor | None, d_remainder: Tensor) -> Inputs:
        """Derivatives by every input. The tape is used up."""
        i, E, B, H = self.inputs, self.E, self.B, self.H
        d_mean, d_remainder = d_mean.contiguous(), d_remainder.contiguous()
        d_h = d_h.clone(memory_format=torch.contiguous_format)
        d_c = None if d_c is None else d_c.clone(memory_format=torch.contiguous_format)
        d_xw, d_flag = torch.zeros_like(i.xw), torch.zeros_like(i.flag)
        carry, end_dot = self.empty(E, 4, B, H), self.empty(E, B)
        zeros = i.h.new_zeros(H)
        logits = [self.empty(tape.capacity) for tape in self.tapes]
        for e, loop in enumerate(self.loops):
            loop.d_mean, loop.d_remainder = d_mean[e].data_ptr(), d_remainder[e].data_ptr()
            loop.d_state[0], loop.d_state[1] = d_h[e].data_ptr(), None if d_c is None else d_c[e].data_ptr()
            loop.d_xw, loop.d_flag, loop.d_logit = d_xw[e].data_ptr(), d_flag[e].data_ptr(), logits[e].data_ptr()
            for k in range(4):
                loop.carry[k] = carry[e, k].data_ptr()
            loop.end_dot, loop.zeros = end_dot[e].data_ptr(), zeros.data_ptr()
            self.weights(loop, i.weight[e], transpose=False)
        pointers = (ctypes.POINTER(Loop) * E)(*map(ctypes.pointer, self.loops))
        getattr(self.lib.loop, f"backward_all_{self.suffix}")(pointers, E, self.threads)

        d_weight, d_halt = torch.empty_like(i.weight), torch.empty_like(i.halt)
        d_halt_bias = torch.empty_like(i.halt_bias)
        d_bias_n = None if i.bias_n is None else torch.empty_like(i.bias_n)
        P = i.weight.shape[1]
        for e, (tape, loop) in enumerate(zip(self.tapes, self.loops, strict=True)):
            used = loop.used
            gates, prev, logit = tape.buffers["gates"][:used, :P], tape.buffers["prev0"][:used], logits[e][:used]
            torch.mm(gates.t(), prev, out=d_weight[e])
            torch.mv(prev.t(), logit, out=d_halt[e])
            d_halt_bias[e] = logit.sum()
            if d_bias_n is not None:
                d_bias_n[e] = gates[:, 2 * H :].sum(0)
        return Inputs(d_xw, d_flag, d_weight, d_bias_n, d_halt, d_halt_bias, d_h, d_c)

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        tape, loop, at, u = self.tapes[0].buffers, self.loops[0], 0, 0
        updates = []
        for t in range(self.T):
            for n in range(1, int(self.steps[0, t].max()) + 1):
                here = slice(at, at + int(tape["count"][u]))
                rows = tape["row"][here].long()
                updates.append(Update(t, n, rows, tape["prob"][here], tape["p"][here], tape["seen"][here]))
                at, u = here.stop, u + 1
        assert at == loop.used
        return updates
