"""The loop in plain torch calls: needs no compiler, and serves E networks with batched products.

Rows of all networks lie in one axis: row e * m + j is row j of network e. The networks keep the same number m of
rows, that of the one with most running; ``alive`` marks the rows of the others that only fill up.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from pondertime.fused.common import GRU, LSTM, RNN_TANH, Inputs, Outputs, Rules, Sums, Update, nan_error, project

# Rows of derivatives gathered before they are multiplied into the weight gradient.
WEIGHT_ROWS = 512

sigmoid_backward = torch.ops.aten.sigmoid_backward
tanh_backward = torch.ops.aten.tanh_backward


class Step(NamedTuple):
    """What the backward pass needs of one update; all rows of the batch where ``rows`` is None."""

    n: int
    rows: Tensor | None  # [E m] places in [E B]
    alive: Tensor | None  # [E m]; None: all
    h0: Tensor
    c0: Tensor | None
    gates: Tensor  # [E m, slots H]
    h: Tensor
    c: Tensor | None
    tanh_c: Tensor | None
    prob: Tensor
    weight: Tensor  # p
    going: Tensor | None  # [E m] which rows went on; None: all of them
    kept: Tensor | None  # the places of the next update's rows among these; None: the same rows


class Run:
    """A forward pass of E networks, and what its backward pass needs."""

    def __init__(self, inputs: Inputs, rules: Rules, *, keep: bool, seen: bool = False) -> None:
        self.inputs, self.rules, self.keep = inputs, rules, keep or seen
        self.E, self.T, self.B, self.H = *inputs.x.shape[:3], inputs.h.shape[2]
        self.xw, self.bias_n = project(inputs, rules.kind)
        self.flag = inputs.weight_ih[:, :, -1].contiguous()
        self.halt = inputs.halt.squeeze(1)
        self.halt_column = inputs.halt.transpose(1, 2).contiguous()
        self.halt_bias = inputs.halt_bias.squeeze(1)
        self.transposed = inputs.weight_hh.transpose(1, 2).contiguous()
        self.steps: list[list[Step]] = []
        self.out = self.forward()

    def product(self, a: Tensor, weight: Tensor, add: Tensor | None = None) -> Tensor:
        """a [E m, k] times weight [E, k, n], plus ``add`` [E m, n]."""
        if self.E == 1:
            return torch.mm(a, weight[0]) if add is None else torch.addmm(add, a, weight[0])
        stacked = a.view(self.E, -1, a.shape[1])
        if add is None:
            return torch.bmm(stacked, weight).flatten(0, 1)
        return torch.baddbmm(add.view(self.E, -1, add.shape[1]), stacked, weight).flatten(0, 1)

    def spread(self, a: Tensor, m: int) -> Tensor:
        """One row a network ``[E, k]``, for each of its m rows: ``[E m, k]`` or something that broadcasts."""
        return a if self.E == 1 else a.unsqueeze(1).expand(-1, m, *a.shape[1:]).flatten(0, 1)

    def choose(self, mask: Tensor) -> tuple[Tensor, Tensor | None]:
        """The places of the true rows of each network, filled up to the largest count, and which are real."""
        if self.E == 1:
            return mask.nonzero().squeeze(1), None
        mask = mask.view(self.E, -1)
        counts = mask.sum(1)
        m = int(counts.max())
        order = torch.argsort(mask.to(torch.int8), dim=1, descending=True, stable=True)[:, :m]
        places = (order + torch.arange(self.E).unsqueeze(1) * mask.shape[1]).flatten()
        alive = None if int(counts.min()) == m else (torch.arange(m) < counts.unsqueeze(1)).flatten()
        return places, alive

    def activate(self, x: Tensor, h0: Tensor, c0: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """One update: the gates' activations, h, c and tanh(c)."""
        H, kind = self.H, self.rules.kind
        if kind is GRU:
            assert self.bias_n is not None
            gates = h0.new_empty(len(h0), 4 * H)
            gates[:, : 3 * H] = self.product(h0, self.transposed)
            r, z, q, v = gates.chunk(4, 1)
            gates[:, : 2 * H].add_(x[:, : 2 * H]).sigmoid_()
            q += self.spread(self.bias_n, len(h0) // self.E)
            torch.addcmul(x[:, 2 * H :], r, q, out=v)
            v.tanh_()
            return gates, torch.lerp(v, h0, z), None, None
        gates = self.product(h0, self.transposed, x)
        if kind is LSTM:
            assert c0 is not None
            i, f, g, o = gates.chunk(4, 1)
            gates[:, : 2 * H].sigmoid_()
            g.tanh_()
            o.sigmoid_()
            c = torch.mul(f, c0).addcmul_(i, g)
            tanh_c = torch.tanh(c)
            return gates, torch.mul(o, tanh_c), c, tanh_c
        gates = gates.tanh_() if kind is RNN_TANH else gates.relu_()
        # The gates become derivatives in the backward pass, so h is a tensor of its own.
        return gates, gates.clone() if self.keep else gates, None, None

    def forward(self) -> Outputs:
        i, E, T, B, H = self.inputs, self.E, self.T, self.B, self.H
        mean = self.xw.new_zeros(T, E * B, H)
        steps, remainder = torch.zeros(T, E * B, dtype=torch.int64), self.xw.new_zeros(T, E * B)
        h = i.h.reshape(E * B, H)
        c = None if i.c is None else i.c.reshape(E * B, H)
        for t in range(T):
            rows, alive = None, None
            lengths = self.rules.lengths
            if lengths is not None and not bool((lengths > t).all()):
                rows, alive = self.choose((lengths > t).flatten())
            if rows is not None and len(rows) == 0:
                self.steps.append([])
                continue
            mean_c = None if c is None else torch.zeros_like(c)
            self.steps.append([])
            self.ponder(t, rows, alive, h, c, mean[t], mean_c, steps[t], remainder[t])
            if mean[t].isnan().any():
                raise nan_error(t, int(steps[t][mean[t].isnan().any(1)].min()))
            if rows is None:
                h, c = mean[t], mean_c
            else:
                real = rows if alive is None else rows[alive]
                h = h.index_copy(0, real, mean[t][real])
                c = None if c is None or mean_c is None else c.index_copy(0, real, mean_c[real])
        shape = (E, B, H)
        return Outputs(
            mean.view(T, E, B, H).transpose(0, 1),
            h.reshape(shape).clone(),
            None if c is None else c.reshape(shape).clone(),
            steps.view(T, E, B).transpose(0, 1),
            remainder.view(T, E, B).transpose(0, 1),
        )

    def ponder(
        self,
        t: int,
        rows: Tensor | None,
        alive: Tensor | None,
        h: Tensor,
        c: Tensor | None,
        mean: Tensor,
        mean_c: Tensor | None,
        steps: Tensor,
        remainder: Tensor,
    ) -> None:
        """The updates of input step t; fills the means, N and R of the rows."""
        rules = self.rules
        xw = self.xw[:, t].flatten(0, 1)
        if rows is not None:
            xw, h = xw[rows], h[rows]
            c = None if c is None else c[rows]
        x = xw + self.spread(self.flag, len(xw) // self.E)
        total = h.new_zeros(len(h))
        threshold = 1 - rules.epsilon
        limit = rules.force_steps or rules.max_steps
        for n in range(1, limit + 1):
            h0, c0 = h, c
            gates, h, c, tanh_c = self.activate(x, h0, c0)
            x = xw
            if rules.force_steps is None:
                logit = self.product(h, self.halt_column).squeeze(1)
                prob = logit.add_(self.spread(self.halt_bias, len(h) // self.E)).sigmoid_()
                going = (total + prob < threshold) if n < limit else torch.zeros(len(h), dtype=torch.bool)
                weight = torch.where(going, prob, 1 - total)
            else:
                prob = weight = torch.full((len(h),), float(n == limit), dtype=h.dtype)
                going = torch.full((len(h),), n < limit)
            if alive is not None:
                weight, going = weight * alive, going & alive
            column = weight.unsqueeze(1)
            for whole, part in ((mean, h), (mean_c, c)):
                if whole is not None and part is not None:
                    _ = whole.addcmul_(column, part) if rows is None else whole.index_add_(0, rows, column * part)
            kept, still = self.choose(going)
            full = len(kept) == len(h) and still is None
            if self.keep:
                after = (None, None) if full else (going, kept)
                self.steps[t].append(Step(n, rows, alive, h0, c0, gates, h, c, tanh_c, prob, weight, *after))
            if full:
                total = total + prob
                continue
            ended = ~going if alive is None else ~going & alive
            places = ended.nonzero().squeeze(1)
            where = places if rows is None else rows[places]
            steps[where] = n
            remainder[where] = weight[places]
            if len(kept) == 0:
                return
            total, xw, h = (total + prob)[kept], xw[kept], h[kept]
            x, c = xw, None if c is None else c[kept]
            rows, alive = kept if rows is None else rows[kept], still

    def backward(self, d_mean: Tensor, d_h: Tensor, d_c: Tensor | None, d_remainder: Tensor) -> Sums:
        """The sums of the backward pass. What the forward pass kept is used up."""
        E, T, B, H = self.E, self.T, self.B, self.H
        G = d_h.reshape(E * B, H).clone()
        Gc = None if d_c is None else d_c.reshape(E * B, H).clone()
        grad = Gradients(self)
        for t in reversed(range(T)):
            steps = self.steps.pop()
            if not steps:
                continue
            present, alive = steps[0].rows, steps[0].alive
            d_mean_t, r = d_mean[:, t].flatten(0, 1), d_remainder[:, t].flatten()
            if present is None:
                G, Gc = grad.input_step(t, steps, G + d_mean_t, Gc, r)
                continue
            real = slice(None) if alive is None else alive
            rows = present[real]
            D, Dc = grad.input_step(t, steps, G.index_add(0, rows, d_mean_t[rows]), Gc, r)
            G = G.index_copy(0, rows, D[real])
            Gc = None if Gc is None or Dc is None else Gc.index_copy(0, rows, Dc[real])
        grad.flush()
        shape = (E, B, H)
        return Sums(
            grad.xw, grad.flag, grad.weight, grad.bias_n, grad.halt.unsqueeze(1), grad.halt_bias.unsqueeze(1),
            G.view(shape), None if Gc is None else Gc.view(shape),
        )  # fmt: skip

    def trace(self) -> list[Update]:
        """Every update of the first network."""
        everyone = torch.arange(self.B)
        return [
            Update(t, s.n, everyone if s.rows is None else s.rows, s.prob, s.weight, s.h)
            for t, steps in enumerate(self.steps)
            for s in steps
        ]


class Gradients:
    """The sums of the backward pass."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.xw, self.flag, self.weight, self.halt, self.halt_bias = (
            torch.zeros_like(a) for a in (run.xw, run.flag, run.inputs.weight_hh, run.halt, run.halt_bias)
        )
        self.bias_n = None if run.bias_n is None else torch.zeros_like(run.bias_n)
        self.pending: list[tuple[Tensor, Tensor]] = []

    def input_step(
        self, t: int, steps: list[Step], G: Tensor, Gc: Tensor | None, d_remainder: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """The updates of input step t backwards; returns the derivatives by s_{t-1} of its rows."""
        run = self.run
        D: Tensor | None = None
        Dc: Tensor | None = None
        end_dot = torch.empty(len(G), dtype=G.dtype)
        d_xw = G.new_zeros(len(G), self.xw.shape[3])
        while steps:
            s = steps.pop()
            g, gc = (G, Gc) if s.rows is None else (G[s.rows], None if Gc is None else Gc[s.rows])
            if s.kept is not None:
                D, Dc = self.back(s, D, Dc)
            assert D is not None
            dot = torch.linalg.vecdot(g, s.h)
            if gc is not None and s.c is not None:
                dot += torch.linalg.vecdot(gc, s.c)
            d_logit = self.by_logit(s, dot, end_dot, d_remainder)
            dh = torch.addcmul(D, s.weight.unsqueeze(1), g)
            if d_logit is not None:
                dh.addcmul_(d_logit.unsqueeze(1), run.spread(run.halt, len(dh) // run.E))
                self.by_halt(d_logit, s.h)
            dc = None if gc is None or Dc is None else torch.addcmul(Dc, s.weight.unsqueeze(1), gc)
            direct, Dc, d_x = self.by_gates(s, dh, dc)
            mask = None if s.alive is None else s.alive.unsqueeze(1)
            if mask is not None:
                s.gates.mul_(mask)
                d_x = d_x * mask
            _ = d_xw.add_(d_x) if s.rows is None else d_xw.index_add_(0, s.rows, d_x)
            if self.bias_n is not None:
                self.bias_n += s.gates[:, 2 * run.H : 3 * run.H].reshape(run.E, -1, run.H).sum(1)
            if s.n == 1:
                self.flag += d_x.view(run.E, -1, d_x.shape[1]).sum(1)
            P = run.inputs.weight_hh.shape[1]
            D = run.product(s.gates[:, :P], run.inputs.weight_hh, direct)
            if mask is not None:
                D, Dc = D * mask, None if Dc is None else Dc * mask
            self.by_weight(s.gates[:, :P], s.h0)
        self.xw[:, t] = d_xw.view(run.E, -1, d_xw.shape[1])
        assert D is not None
        return D, Dc

    def back(self, s: Step, D: Tensor | None, Dc: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Derivatives of the rows that went on, among all rows of the update; zeros for those that ended."""
        assert s.kept is not None
        whole = torch.zeros_like(s.h)
        whole_c = None if s.c is None else torch.zeros_like(s.c)
        if D is not None and len(s.kept):
            # Rows that fill up have derivatives of zero, so adding them to any row is harmless.
            whole.index_add_(0, s.kept, D)
            if whole_c is not None and Dc is not None:
                whole_c.index_add_(0, s.kept, Dc)
        return whole, whole_c

    def by_logit(self, s: Step, dot: Tensor, end_dot: Tensor, d_remainder: Tensor) -> Tensor | None:
        """d(loss)/d(h^n) h^n (1 - h^n) = (G . (s^n - s^N) - r) h^n (1 - h^n) for n < N, 0 for n = N."""
        if self.run.rules.force_steps is not None:
            return None
        rows = slice(None) if s.rows is None else s.rows
        if s.going is not None and s.kept is not None:
            ended = ~s.going if s.alive is None else ~s.going & s.alive
            places = ended.nonzero().squeeze(1)
            end_dot[places if s.rows is None else s.rows[places]] = dot[places]
            if len(s.kept) == 0:
                return None
        d = (dot - end_dot[rows] - d_remainder[rows]) * s.prob * (1 - s.prob)
        return d if s.going is None else torch.where(s.going, d, 0)

    def by_gates(self, s: Step, dh: Tensor, dc: Tensor | None) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Turn the gates' activations into derivatives; returns the direct parts by h0, c0, and the one by W_x x."""
        kind = self.run.rules.kind
        if kind is LSTM:
            assert dc is not None and s.tanh_c is not None and s.c0 is not None
            i, f, g, o = s.gates.chunk(4, 1)
            dc = dc + tanh_backward(dh * o, s.tanh_c)
            d_c0 = dc * f
            sigmoid_backward(dh * s.tanh_c, o, grad_input=o)
            d_i = dc * g
            tanh_backward(dc * i, g, grad_input=g)
            sigmoid_backward(d_i, i, grad_input=i)
            sigmoid_backward(dc * s.c0, f, grad_input=f)
            return None, d_c0, s.gates
        if kind is GRU:
            r, z, q, v = s.gates.chunk(4, 1)
            dv = tanh_backward(dh * (1 - z), v)
            dz = sigmoid_backward(dh * (s.h0 - v), z)
            dr = sigmoid_backward(dv * q, r)
            direct = dh * z
            torch.mul(dv, r, out=q)
            r.copy_(dr)
            z.copy_(dz)
            v.copy_(dv)
            return direct, None, torch.cat([dr, dz, dv], 1)
        if kind is RNN_TANH:
            tanh_backward(dh, s.gates, grad_input=s.gates)
        else:
            s.gates.copy_(dh * (s.gates > 0))
        return None, None, s.gates

    def by_halt(self, d_logit: Tensor, h: Tensor) -> None:
        d = d_logit.view(self.run.E, 1, -1)
        self.halt += torch.bmm(d, h.view(self.run.E, -1, h.shape[1])).squeeze(1)
        self.halt_bias += d.sum((1, 2))

    def by_weight(self, d_gates: Tensor, h0: Tensor) -> None:
        self.pending.append((d_gates, h0))
        if sum(len(h) for _, h in self.pending) >= WEIGHT_ROWS * self.run.E:
            self.flush()

    def flush(self) -> None:
        """Add the gathered rows to the weight gradient with one product."""
        if not self.pending:
            return
        E = self.run.E
        d, h = (torch.cat([a.view(E, -1, a.shape[1]) for a in parts], 1) for parts in zip(*self.pending, strict=True))
        self.weight.baddbmm_(d.transpose(1, 2), h)
        self.pending = []
