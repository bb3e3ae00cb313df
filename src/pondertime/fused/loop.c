/* The loop over t and n of an ACT network, forward and backward, for the cells of torch.nn.

   Letters as in the paper; README.md beside this file derives the backward pass. Rows that have halted
   leave the batch, so update u of the tape has m rows, stored one after the other in the order of the batch:

     prev   the state before the update, one array a leaf (h, and c of an LSTM)   [rows, H]
     gates  the activations of the update, in the backward pass their derivatives [rows, S]
     prob   h^n, p, row (the row's place in the batch)                            [rows]
     count  m of every update                                                     [updates]

   The state after an update is not stored: it is the next update's prev, or made again from the gates.
   Products are left to BLAS, whose functions come as pointers. This file includes itself, once a type. */

#ifndef REAL

#include <math.h>
#include <stdint.h>
#include <string.h>

enum { RNN_TANH, RNN_RELU, LSTM, GRU };
enum { DONE, TAPE_FULL, NOT_A_NUMBER };
#define PARALLEL_FROM 4096 /* elements of a state from which threads pay */

typedef struct {
  int32_t cell, T, B, I, H, O, max_steps, force_steps, keep, threads;
  double epsilon;
  void *gemm, *compute;  /* Fortran ?gemm; MKL's cblas_?gemm_compute, or null */
  const void *x;         /* [T, B, I], or null: xw is there already (integers) */
  void *xw;              /* [T, B, X] W_x x_t */
  const void *weight_ih; /* [X, I + 1] W_x, and the flag's column */
  const void *bias_ih, *bias_hh; /* [X] or null */
  void *bias;            /* [2, X] work space: what the first update adds to W_x x_t, and what the others do */
  const void *weight;    /* forward W_h^T [H, P], backward W_h [P, H]; packed by MKL if compute is set */
  int32_t transposed, begun; /* forward: weight is W_h [P, H] as it is; the inputs are projected */
  const void *halt;      /* [H] */
  double halt_bias;
  const void *weight_y, *bias_y; /* [O, H], [O], or null: no read-out */
  void *y;                /* [T, B, O] */
  const int64_t *lengths; /* [B] or null */
  void *state[2];         /* [B, H] in: before t = 0, out: after t = T - 1 */
  void *mean;             /* [T, B, H] mean of the visible state */
  int64_t *steps;         /* [T, B] N */
  void *remainder;        /* [T, B] R */
  void *prev[2], *gates, *prob, *p, *seen; /* seen: [rows, H] visible states for a trace, or null */
  int32_t *row, *count;
  int64_t capacity, capacity_updates;
  void *total, *mean_c; /* [B], [B, H] work space */
  int32_t *child;       /* [B] work space */
  /* where the loop stands, so that it can go on after the tape has grown */
  int32_t t, n, m;
  int64_t offset, used, updates;
  /* backward */
  void *d_y, *d_mean;      /* [T, B, O] (padding is set to 0), [T, B, H]: made from d_y, in place of mean, if there
                              is a read-out */
  const void *d_remainder; /* [T, B] */
  void *d_state[2];        /* [B, H] in: by the last state, out: by the first */
  void *d_xw, *d_logit;    /* [T, B, X], [rows] by the logit before the row's prev */
  void *d_x;               /* [T, B, I] or null */
  void *d_weight_ih, *d_bias_ih, *d_bias_hh; /* like what they are derivatives by; all but the flag's column of */
  void *d_weight_hh, *d_halt, *d_halt_bias;  /* d_weight_ih is left out where x is null */
  void *d_weight_y, *d_bias_y;
  void *carry[4];          /* [B, H] work space */
  void *end_dot;           /* [B] work space */
  const void *zeros;       /* [H] zeros */
} Loop;

#define REAL float
#define NAME(x) x##_f32
#include __FILE__
#undef REAL
#undef NAME
#define REAL double
#define NAME(x) x##_f64
#define IS_DOUBLE
#include __FILE__

#else

typedef void (*NAME(Gemm))(const char *, const char *, const int *, const int *, const int *, const REAL *,
                           const REAL *, const int *, const REAL *, const int *, const REAL *, REAL *, const int *);
typedef void (*NAME(Compute))(int, int, int, int, int, int, const REAL *, int, const REAL *, int, REAL, REAL *, int);

/* C [m, n] = A B, row by row in memory, ld?: from one row to the next; A is stored [k, m] if ta is 'T', B [n, k] if
   tb is 'T'. */
static void NAME(gemm)(const Loop *a, char ta, char tb, int64_t m, int n, int64_t k, const REAL *A, int lda, const REAL *B,
                       int ldb, REAL *C, int ldc) {
  const REAL one = 1, zero = 0;
  const int rows = (int)m, inner = (int)k;
  ((NAME(Gemm))a->gemm)(&tb, &ta, &n, &rows, &inner, &one, B, &ldb, A, &lda, &zero, C, &ldc);
}

/* to [n] = the sum of the rows of A [m, n], one from the other by ld. */
static void NAME(sum_rows)(int64_t m, int n, const REAL *A, int64_t ld, REAL *restrict to) {
  memset(to, 0, sizeof(REAL) * n);
  for (int64_t j = 0; j < m; j++)
#pragma omp simd
    for (int k = 0; k < n; k++) to[k] += A[j * ld + k];
}

/* C [m, n] = A [m, k] weight [k, n] + beta C, row by row in memory. */
static void NAME(product)(const Loop *a, int m, int n, int k, const REAL *A, int lda, REAL beta, REAL *C, int ldc) {
  const REAL one = 1;
  if (m == 0) return;
  if (a->compute)
    ((NAME(Compute))a->compute)(101, 111, 151, m, n, k, A, lda, a->weight, n, beta, C, ldc);
  else
    ((NAME(Gemm))a->gemm)(a->transposed ? "T" : "N", "N", &n, &m, &k, &one, a->weight, a->transposed ? &k : &n, A,
                          &lda, &beta, C, &ldc);
}

/* exp(x) - 1 = 2^n (e^r - 1) + (2^n - 1) with x = n ln 2 + r; plain operations, so that compilers vectorise. */
static inline REAL NAME(scaled)(REAL x, REAL *power) {
#ifdef IS_DOUBLE
  const double magic = 6755399441055744.0;
  x = x < -700 ? -700 : x > 700 ? 700 : x;
  const double shifted = x * 1.4426950408889634 + magic, n = shifted - magic;
  const double r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  double q = 1.0 / 6227020800.0;
  q = q * r + 1.0 / 479001600.0, q = q * r + 1.0 / 39916800.0, q = q * r + 1.0 / 3628800.0;
  q = q * r + 1.0 / 362880.0, q = q * r + 1.0 / 40320.0, q = q * r + 1.0 / 5040.0, q = q * r + 1.0 / 720.0;
  q = q * r + 1.0 / 120.0, q = q * r + 1.0 / 24.0, q = q * r + 1.0 / 6.0, q = q * r + 0.5;
  union { double f; int64_t i; } bits = {shifted};
  bits.i = (bits.i + 1023) << 52;
#else
  const float magic = 12582912.0f;
  x = x < -87 ? -87 : x > 87 ? 87 : x;
  const float shifted = x * 1.44269504f + magic, n = shifted - magic;
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float q = 1.0f / 5040;
  q = q * r + 1.0f / 720, q = q * r + 1.0f / 120, q = q * r + 1.0f / 24, q = q * r + 1.0f / 6, q = q * r + 0.5f;
  union { float f; int32_t i; } bits = {shifted};
  bits.i = (bits.i + 127) << 23;
#endif
  *power = bits.f;
  return r + r * r * q;
}

static inline REAL NAME(sigmoid)(REAL x) {
  REAL power, e = NAME(scaled)(-x, &power);
  return 1 / (1 + (power * e + power));
}

static inline REAL NAME(tanh)(REAL x) {
  x = x < -20 ? -20 : x > 20 ? 20 : x;
  REAL power, e = NAME(scaled)(2 * x, &power), minus1 = power * e + (power - 1);
  return minus1 / (minus1 + 2);
}

/* The state after an update from the sums of its gates, which become activations. */
static void NAME(activate)(const Loop *a, REAL *restrict g, const REAL *restrict x, const REAL *restrict f,
                           const REAL *restrict h0, const REAL *restrict c0, REAL *restrict h, REAL *restrict c) {
  const int H = a->H;
  const REAL *restrict bias = a->cell == GRU && a->bias_hh ? (const REAL *)a->bias_hh + 2 * H : a->zeros;
  switch (a->cell) {
  case RNN_TANH:
#pragma omp simd
    for (int k = 0; k < H; k++) h[k] = g[k] = NAME(tanh)(g[k] + x[k] + f[k]);
    break;
  case RNN_RELU:
#pragma omp simd
    for (int k = 0; k < H; k++) {
      REAL v = g[k] + x[k] + f[k];
      h[k] = g[k] = v < 0 ? 0 : v;
    }
    break;
  case LSTM:
#pragma omp simd
    for (int k = 0; k < 4 * H; k++) g[k] += x[k] + f[k];
#pragma omp simd
    for (int k = 0; k < H; k++) {
      const REAL i = NAME(sigmoid)(g[k]), u = NAME(sigmoid)(g[H + k]);
      const REAL w = NAME(tanh)(g[2 * H + k]), o = NAME(sigmoid)(g[3 * H + k]);
      g[k] = i, g[H + k] = u, g[2 * H + k] = w, g[3 * H + k] = o;
      c[k] = u * c0[k] + i * w;
      h[k] = o * NAME(tanh)(c[k]);
    }
    break;
  case GRU:
#pragma omp simd
    for (int k = 0; k < H; k++) {
      const REAL r = NAME(sigmoid)(g[k] + x[k] + f[k]), z = NAME(sigmoid)(g[H + k] + x[H + k] + f[H + k]);
      const REAL q = g[2 * H + k] + bias[k], v = NAME(tanh)(x[2 * H + k] + f[2 * H + k] + r * q);
      g[k] = r, g[H + k] = z, g[2 * H + k] = q, g[3 * H + k] = v;
      h[k] = (1 - z) * v + z * h0[k];
    }
  }
}

static inline int NAME(x_width)(const Loop *a) { return a->H * (a->cell == LSTM ? 4 : a->cell == GRU ? 3 : 1); }
static inline int NAME(slots)(const Loop *a) { return a->H * (a->cell >= LSTM ? 4 : 1); }

/* Before the first step: W_x x_t for all t, and what is added to it. */
static void NAME(project)(Loop *a) {
  const int I = a->I, H = a->H, X = NAME(x_width)(a);
  const REAL *weight = a->weight_ih, *ih = a->bias_ih, *hh = a->bias_hh;
  REAL *first = a->bias, *later = first + X;
  if (a->x)
    NAME(gemm)(a, 'N', 'T', (int64_t)a->T * a->B, X, I, a->x, I, weight, I + 1, a->xw, X);
  for (int k = 0; k < X; k++) {
    later[k] = ih ? ih[k] + (a->cell == GRU && k >= 2 * H ? 0 : hh[k]) : 0;
    first[k] = later[k] + weight[(int64_t)k * (I + 1) + I];
  }
  a->begun = 1;
}

/* Put the rows that have an input at step t at the front of a new update. */
static void NAME(begin)(Loop *a) {
  const int B = a->B, H = a->H;
  REAL *total = a->total, *mean = (REAL *)a->mean + (int64_t)a->t * B * H;
  a->offset = a->keep ? a->used : 0;
  a->m = 0, a->n = 1;
  memset(mean, 0, sizeof(REAL) * B * H);
  memset(a->steps + (int64_t)a->t * B, 0, sizeof(int64_t) * B);
  memset((REAL *)a->remainder + (int64_t)a->t * B, 0, sizeof(REAL) * B);
  for (int r = 0; r < B; r++) {
    if (a->lengths && a->lengths[r] <= a->t) continue;
    const int64_t to = a->offset + a->m;
    for (int leaf = 0; leaf < 2; leaf++)
      if (a->prev[leaf])
        memcpy((REAL *)a->prev[leaf] + to * H, (REAL *)a->state[leaf] + (int64_t)r * H, sizeof(REAL) * H);
    if (a->mean_c) memset((REAL *)a->mean_c + (int64_t)r * H, 0, sizeof(REAL) * H);
    a->row[to] = r;
    total[a->m++] = 0;
  }
}

/* Update n of the running rows; returns NOT_A_NUMBER or DONE. Leaves the rows that go on as the next update. */
static int NAME(update)(Loop *a) {
  const int B = a->B, H = a->H, m = a->m, X = NAME(x_width)(a), S = NAME(slots)(a), P = a->cell == GRU ? 3 * H : S;
  const int64_t at = a->offset, next = a->keep || at == 0 ? at + m : 0;
  REAL *gates = (REAL *)a->gates + (a->keep ? at * S : 0);
  REAL *prev = (REAL *)a->prev[0], *prev_c = (REAL *)a->prev[1], *total = a->total;
  REAL *prob = (REAL *)a->prob + (a->keep ? at : 0), *p = (REAL *)a->p + (a->keep ? at : 0);
  const REAL *xw = (const REAL *)a->xw + (int64_t)a->t * B * X, *halt = a->halt;
  const REAL *bias = (const REAL *)a->bias + (a->n == 1 ? 0 : X), threshold = (REAL)(1 - a->epsilon);
  const int last = a->force_steps ? a->n == a->force_steps : a->n == a->max_steps;
  int bad = 0;
  NAME(product)(a, m, P, H, prev + at * H, H, 0, gates, S);
#pragma omp parallel for num_threads(a->threads) if (m > 1 && m * H >= PARALLEL_FROM) reduction(| : bad)
  for (int j = 0; j < m; j++) {
    const int r = a->row[at + j];
    REAL *h = prev + (next + j) * H, *c = prev_c ? prev_c + (next + j) * H : 0;
    REAL *mean = (REAL *)a->mean + ((int64_t)a->t * B + r) * H, logit = 0;
    NAME(activate)(a, gates + (int64_t)j * S, xw + (int64_t)r * X, bias, prev + (at + j) * H,
                   prev_c ? prev_c + (at + j) * H : 0, h, c);
#pragma omp simd reduction(+ : logit)
    for (int k = 0; k < H; k++) logit += h[k] * halt[k];
    const REAL sum = total[j], v = NAME(sigmoid)(logit + (REAL)a->halt_bias);
    if (logit != logit) bad = 1;
    const REAL u = a->force_steps ? (REAL)last : v;
    const int going = !last && (a->force_steps || sum + u < threshold);
    const REAL weight = going ? u : 1 - sum;
    prob[j] = u, p[j] = weight;
    if (a->seen) memcpy((REAL *)a->seen + (at + j) * H, h, sizeof(REAL) * H);
    if (weight != 0) {
#pragma omp simd
      for (int k = 0; k < H; k++) mean[k] += weight * h[k];
      if (c) {
        REAL *mean_c = (REAL *)a->mean_c + (int64_t)r * H;
#pragma omp simd
        for (int k = 0; k < H; k++) mean_c[k] += weight * c[k];
      }
    }
    a->child[j] = going;
    if (going) {
      total[j] = sum + u;
    } else {
      a->steps[(int64_t)a->t * B + r] = a->n;
      ((REAL *)a->remainder)[(int64_t)a->t * B + r] = weight;
    }
  }
  int kept = 0;
  for (int j = 0; j < m; j++) {
    if (!a->child[j]) continue;
    if (kept < j) {
      memcpy(prev + (next + kept) * H, prev + (next + j) * H, sizeof(REAL) * H);
      if (prev_c) memcpy(prev_c + (next + kept) * H, prev_c + (next + j) * H, sizeof(REAL) * H);
      total[kept] = total[j];
    }
    a->row[next + kept++] = a->row[at + j];
  }
  if (a->keep) a->count[a->updates] = m, a->used += m;
  a->updates++, a->offset = next, a->m = kept, a->n++;
  return bad ? NOT_A_NUMBER : DONE;
}

/* After the last step: y_t = W_y s_t + b_y for all t, zeros at padding. */
static void NAME(read_out)(Loop *a) {
  const int64_t rows = (int64_t)a->T * a->B;
  const int O = a->O;
  const REAL *restrict bias = a->bias_y;
  if (!a->weight_y) return;
  NAME(gemm)(a, 'N', 'T', rows, O, a->H, a->mean, a->H, a->weight_y, a->H, a->y, O);
  if (!bias) return;
  for (int64_t j = 0; j < rows; j++) {
    REAL *restrict y = (REAL *)a->y + j * O;
    if (!a->steps[j]) continue;
#pragma omp simd
    for (int k = 0; k < O; k++) y[k] += bias[k];
  }
}

/* Run from where the loop stands to the end, or until the tape is full. */
static int NAME(forward)(Loop *a) {
  const int B = a->B, H = a->H;
  if (!a->begun) NAME(project)(a);
  for (; a->t < a->T; a->t++) {
    if (a->keep && a->m == 0 && a->used + 2 * B > a->capacity) return TAPE_FULL;
    if (a->m == 0) NAME(begin)(a);
    while (a->m) {
      if (a->keep && (a->offset + 2 * a->m > a->capacity || a->updates >= a->capacity_updates)) return TAPE_FULL;
      const int status = NAME(update)(a);
      if (status != DONE) return status;
    }
    for (int r = 0; r < B; r++) {
      if (a->lengths && a->lengths[r] <= a->t) continue;
      memcpy((REAL *)a->state[0] + (int64_t)r * H, (REAL *)a->mean + ((int64_t)a->t * B + r) * H, sizeof(REAL) * H);
      if (a->mean_c)
        memcpy((REAL *)a->state[1] + (int64_t)r * H, (REAL *)a->mean_c + (int64_t)r * H, sizeof(REAL) * H);
    }
  }
  NAME(read_out)(a);
  return DONE;
}

/* One row of an update backwards: activations become derivatives. Returns the derivative by the logit.
   G, Gc: by s_t; D, Dc: by s^n from later updates, zeros for the last; out, out_c: direct part by s^{n-1}. */
static REAL NAME(backward_row)(const Loop *a, REAL *restrict g, const REAL *restrict h0, const REAL *restrict c0,
                               const REAL *restrict G, const REAL *restrict Gc, const REAL *restrict D,
                               const REAL *restrict Dc, int last, REAL p, REAL prob, REAL r, REAL *end_dot,
                               REAL *restrict out, REAL *restrict out_c, REAL *restrict h, REAL *restrict dx) {
  const int H = a->H;
  const REAL *restrict halt = a->halt;
  REAL dot = 0, d_logit = 0;
  if (a->cell == LSTM) {
#pragma omp simd reduction(+ : dot)
    for (int k = 0; k < H; k++) {
      const REAL c = g[H + k] * c0[k] + g[k] * g[2 * H + k], y = NAME(tanh)(c);
      h[k] = y;
      dot += G[k] * g[3 * H + k] * y + Gc[k] * c;
    }
  } else if (a->cell == GRU) {
#pragma omp simd reduction(+ : dot)
    for (int k = 0; k < H; k++) dot += G[k] * ((1 - g[H + k]) * g[3 * H + k] + g[H + k] * h0[k]);
  } else {
#pragma omp simd reduction(+ : dot)
    for (int k = 0; k < H; k++) dot += G[k] * g[k];
  }
  if (last)
    *end_dot = dot;
  else if (!a->force_steps)
    d_logit = (dot - *end_dot - r) * prob * (1 - prob);
  switch (a->cell) {
  case RNN_TANH:
#pragma omp simd
    for (int k = 0; k < H; k++) {
      const REAL y = g[k], d = (p * G[k] + D[k] + d_logit * halt[k]) * (1 - y * y);
      g[k] = d, dx[k] += d, out[k] = 0;
    }
    break;
  case RNN_RELU:
#pragma omp simd
    for (int k = 0; k < H; k++) {
      const REAL d = g[k] > 0 ? p * G[k] + D[k] + d_logit * halt[k] : 0;
      g[k] = d, dx[k] += d, out[k] = 0;
    }
    break;
  case LSTM:
#pragma omp simd
    for (int k = 0; k < H; k++) {
      const REAL i = g[k], f = g[H + k], w = g[2 * H + k], o = g[3 * H + k], y = h[k];
      const REAL dh = p * G[k] + D[k] + d_logit * halt[k];
      const REAL dc = p * Gc[k] + Dc[k] + dh * o * (1 - y * y);
      const REAL di = dc * w * i * (1 - i), df = dc * c0[k] * f * (1 - f);
      const REAL dw = dc * i * (1 - w * w), d_o = dh * y * o * (1 - o);
      g[k] = di, g[H + k] = df, g[2 * H + k] = dw, g[3 * H + k] = d_o;
      dx[k] += di, dx[H + k] += df, dx[2 * H + k] += dw, dx[3 * H + k] += d_o;
      out[k] = 0, out_c[k] = dc * f;
    }
    break;
  case GRU:
#pragma omp simd
    for (int k = 0; k < H; k++) {
      const REAL rr = g[k], z = g[H + k], q = g[2 * H + k], v = g[3 * H + k];
      const REAL dh = p * G[k] + D[k] + d_logit * halt[k];
      const REAL dv = dh * (1 - z) * (1 - v * v), dz = dh * (h0[k] - v) * z * (1 - z);
      const REAL dr = dv * q * rr * (1 - rr);
      g[k] = dr, g[H + k] = dz, g[2 * H + k] = dv * rr, g[3 * H + k] = dv;
      dx[k] += dr, dx[H + k] += dz, dx[2 * H + k] += dv;
      out[k] = dh * z;
    }
  }
  return d_logit;
}

/* Run E networks, each on one thread where there are several; statuses come back in status. One network must not
   be inside a parallel region, not even of one thread: libgomp would make new threads for every region in it. */
void NAME(forward_all)(Loop **loops, int32_t *status, int E, int threads) {
  if (E == 1) {
    status[0] = NAME(forward)(loops[0]);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int e = 0; e < E; e++)
    if (status[e] == TAPE_FULL) status[e] = NAME(forward)(loops[e]);
}

/* Before the tape: from y_t to W_y, b_y and s_t. */
static void NAME(by_read_out)(Loop *a) {
  const int64_t rows = (int64_t)a->T * a->B;
  const int H = a->H, O = a->O;
  if (!a->weight_y) return;
  for (int64_t j = 0; j < rows; j++)
    if (!a->steps[j]) memset((REAL *)a->d_y + j * O, 0, sizeof(REAL) * O);
  NAME(gemm)(a, 'T', 'N', O, H, rows, a->d_y, O, a->mean, H, a->d_weight_y, H);
  NAME(gemm)(a, 'N', 'N', rows, H, O, a->d_y, O, a->weight_y, H, a->d_mean, H);
  if (a->bias_y) NAME(sum_rows)(rows, O, a->d_y, O, a->d_bias_y);
}

/* After the tape: to the weights and to x. The flag's column of d_weight_ih was added up on the way, in bias. */
static void NAME(by_weights)(Loop *a) {
  const int I = a->I, H = a->H, X = NAME(x_width)(a), S = NAME(slots)(a), P = a->cell == GRU ? 3 * H : S;
  const int64_t inputs = (int64_t)a->T * a->B, rows = a->used;
  REAL *d_weight_ih = a->d_weight_ih, *d_halt_bias = a->d_halt_bias;
  const REAL *d_flag = a->bias, *d_logit = a->d_logit;
  NAME(gemm)(a, 'T', 'N', P, H, rows, a->gates, S, a->prev[0], H, a->d_weight_hh, H);
  NAME(gemm)(a, 'N', 'N', 1, H, rows, d_logit, (int)rows, a->prev[0], H, a->d_halt, H);
  *d_halt_bias = 0;
  for (int64_t j = 0; j < rows; j++) *d_halt_bias += d_logit[j];
  if (a->x && I) NAME(gemm)(a, 'T', 'N', X, I, inputs, a->d_xw, X, a->x, I, d_weight_ih, I + 1);
  for (int k = 0; k < X; k++) d_weight_ih[(int64_t)k * (I + 1) + I] = d_flag[k];
  if (a->d_x && I) NAME(gemm)(a, 'N', 'N', inputs, I, X, a->d_xw, X, a->weight_ih, I + 1, a->d_x, I);
  if (!a->bias_ih) return;
  NAME(sum_rows)(inputs, X, a->d_xw, X, a->d_bias_ih);
  memcpy(a->d_bias_hh, a->d_bias_ih, sizeof(REAL) * P);
  if (a->cell == GRU) NAME(sum_rows)(rows, H, (REAL *)a->gates + 2 * H, S, (REAL *)a->d_bias_hh + 2 * H);
}

/* The whole tape backwards. d_state goes from the derivative by the last state to that by the first. */
static void NAME(backward)(Loop *a) {
  const int B = a->B, H = a->H, X = NAME(x_width)(a), S = NAME(slots)(a), P = a->cell == GRU ? 3 * H : S;
  REAL *prev = a->prev[0], *prev_c = a->prev[1], *G = a->d_state[0], *Gc = a->d_state[1], *d_flag = a->bias;
  const REAL *d_remainder = a->d_remainder, *all_prob = a->prob, *all_p = a->p, *zeros = a->zeros;
  REAL *d_logit = a->d_logit, *end_dot = a->end_dot;
  int64_t after = a->used, u = a->updates; /* rows and updates not yet gone through */
  NAME(by_read_out)(a);
  memset(d_flag, 0, sizeof(REAL) * X);
  memset(a->d_xw, 0, sizeof(REAL) * a->T * B * X);
  for (int t = a->T - 1; t >= 0; t--) {
    const int64_t *steps = a->steps + (int64_t)t * B;
    const REAL *d_mean = (const REAL *)a->d_mean + (int64_t)t * B * H;
    int N = 0;
    for (int r = 0; r < B; r++) {
      if (!steps[r]) continue;
      if (steps[r] > N) N = (int)steps[r];
#pragma omp simd
      for (int k = 0; k < H; k++) G[(int64_t)r * H + k] += d_mean[(int64_t)r * H + k];
    }
    REAL *D = a->carry[0], *Dc = a->carry[1], *out = a->carry[2], *out_c = a->carry[3];
    for (int n = N; n >= 1; n--) {
      const int m = a->count[--u];
      const int64_t at = after - m;
      int next = 0;
      for (int j = 0; j < m; j++) a->child[j] = steps[a->row[at + j]] > n ? next++ : -1;
#pragma omp parallel for num_threads(a->threads) if (m > 1 && m * H >= PARALLEL_FROM)
      for (int j = 0; j < m; j++) {
        const int r = a->row[at + j], k = a->child[j];
        REAL tanh_c[a->cell == LSTM ? H : 1];
        const REAL d = NAME(backward_row)(
            a, (REAL *)a->gates + (at + j) * S, prev + (at + j) * H, prev_c ? prev_c + (at + j) * H : 0,
            G + (int64_t)r * H, Gc ? Gc + (int64_t)r * H : 0, k < 0 ? zeros : D + (int64_t)k * H,
            k < 0 ? zeros : Dc + (int64_t)k * H, k < 0, all_p[at + j], all_prob[at + j],
            d_remainder[(int64_t)t * B + r], end_dot + r, out + (int64_t)j * H, Gc ? out_c + (int64_t)j * H : 0,
            tanh_c, (REAL *)a->d_xw + ((int64_t)t * B + r) * X);
        if (k >= 0) d_logit[after + k] = d;
        if (n == 1) d_logit[at + j] = 0;
      }
      NAME(product)(a, m, H, P, (REAL *)a->gates + at * S, S, 1, out, H);
      REAL *swap = D;
      D = out, out = swap, swap = Dc, Dc = out_c, out_c = swap;
      after = at;
      if (n > 1) continue;
      for (int j = 0; j < m; j++) {
        const REAL *g = (REAL *)a->gates + (at + j) * S;
        for (int part = 0; part < X / H; part++) { /* a GRU's input sees dn, not dq */
          const REAL *from = g + (a->cell == GRU && part == 2 ? 3 : part) * H;
#pragma omp simd
          for (int k = 0; k < H; k++) d_flag[part * H + k] += from[k];
        }
        const int64_t to = (int64_t)a->row[at + j] * H;
        memcpy(G + to, D + (int64_t)j * H, sizeof(REAL) * H);
        if (Gc) memcpy(Gc + to, Dc + (int64_t)j * H, sizeof(REAL) * H);
      }
    }
  }
  NAME(by_weights)(a);
}

void NAME(backward_all)(Loop **loops, int E, int threads) {
  if (E == 1) {
    NAME(backward)(loops[0]);
    return;
  }
#pragma omp parallel for num_threads(threads) schedule(dynamic)
  for (int e = 0; e < E; e++) NAME(backward)(loops[e]);
}

#endif
