/* What two CPU cores gain by C: attention by segment, norm and softmax in one pass over memory each.

   Plain C with the vector types of GCC and Clang; compiled and called by native.py. Nothing is kept between calls, so
   that threads may call at once, and sums are added up in one order, so that a result is the same every time. No part
   may be compiled with -ffast-math: a number that is not finite must reach the loss. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
enum { LANES = 16, ROWS = 4, COLS = 4 };
#elif defined(__AVX__)
enum { LANES = 8, ROWS = 4, COLS = 2 };
#else
enum { LANES = 4, ROWS = 4, COLS = 4 };
#endif
enum { WIDTH = LANES * COLS }; /* of a tile of a product; rows are padded to PAD numbers, a multiple of LANES */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#define AT(p) (*(vec *)(p))
#define GET(p) (*(const vec *)(p))
#define INLINE static inline __attribute__((always_inline))

static long least(long a, long b) { return a < b ? a : b; }
static long most(long a, long b) { return a > b ? a : b; }
static long padded(long n, long to) { return (n + to - 1) / to * to; }
INLINE vec all(float x) { return x - (vec){0}; }
INLINE vec pick(ints where, vec yes, vec no) { return (vec)((where & (ints)yes) | (~where & (ints)no)); }

INLINE float total(vec x)
{
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

INLINE float highest(vec x)
{
    float part[LANES];
    memcpy(part, &x, sizeof part);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] = part[i + half] > part[i] ? part[i + half] : part[i];
    return part[0];
}

/* exp of numbers up to 0, to the last bit or two: 2^n times a polynomial (that of Cephes). NaN stays NaN. */
INLINE vec exponential(vec x)
{
    const float round = 12582912.0f; /* 1.5 * 2^23: added, it leaves an integer in the lowest bits */
    ints gone = x < all(-87.0f);
    vec n = x * 1.44269504088896341f + round;
    ints power = ((ints)n << 23) + (127 << 23);
    n -= round;
    vec r = x - n * 0.693359375f;
    r += n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return pick(gone, all(0), p * (vec)power);
}

/* A tile of `product`, held in registers: so many rows by so many vectors, both known when this is compiled. */
INLINE void tile(int rows, int cols, float *out, long out_row, const float *a, long a_row, long a_step, const float *b,
                 long b_row, long from, long to, float scale)
{
    vec sum[ROWS][COLS];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) sum[r][c] = all(0);
    for (long t = from; t < to; t++)
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
            for (int c = 0; c < cols; c++) sum[r][c] += a[r * a_row + t * a_step] * GET(b + t * b_row + c * LANES);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int c = 0; c < cols; c++) AT(out + r * out_row + c * LANES) = sum[r][c] * scale;
}

/* out[r][x] = scale * the sum over t of a[r][t] * b[t][x], for at most ROWS rows, from <= t < to, first <= x < last.
   `first` is a multiple of WIDTH; a[r][t] is a[r * a_row + t * a_step], so that `a` may be read transposed; b is in
   panels of WIDTH columns, b_panel apart. Up to the next whole vector, columns after the last are written too. */
static void product(float *out, long out_row, const float *a, long a_row, long a_step, const float *b, long b_row,
                    long b_panel, long rows, long from, long to, long first, long last, float scale)
{
    for (long x = first; x < last; x += WIDTH) {
        const float *panel = b + x / WIDTH * b_panel;
        switch (rows * 8 + least(COLS, (last - x + LANES - 1) / LANES)) {
#define CASE(r, c)                                                                                                     \
    case r * 8 + c: tile(r, c < COLS ? c : COLS, out + x, out_row, a, a_row, a_step, panel, b_row, from, to, scale); break;
#define CASES(r) CASE(r, 1) CASE(r, 2) CASE(r, 3) CASE(r, 4)
            CASES(1) CASES(2) CASES(3) CASES(4)
        }
    }
}

/* Ask for what the next head will need: it lies right behind this one's channels, slot after slot far apart. */
#define FETCH_NEXT(p, write)                                                                                           \
    for (long c = 0; c < channels; c += 16) __builtin_prefetch((p) + channels + c, write)

/* Slots of one head, brought together; `row` channels each, those beyond `channels` 0. */
static void gather(float *to, long row, const float *from, long slot, long count, long channels)
{
    for (long i = 0; i < count; i++) {
        FETCH_NEXT(from + i * slot, 0);
        memcpy(to + i * row, from + i * slot, channels * sizeof(float));
        memset(to + i * row + channels, 0, (row - channels) * sizeof(float));
    }
}

static void scatter(float *to, long slot, const float *from, long row, long count, long channels)
{
    for (long i = 0; i < count; i++) {
        FETCH_NEXT(to + i * slot, 1);
        memcpy(to + i * slot, from + i * row, channels * sizeof(float));
    }
}

/* The same transposed: panels of WIDTH slots, a row a channel; 0 after the last slot. */
static void turn(float *to, const float *from, long slot, long count, long channels)
{
    memset(to + count / WIDTH * WIDTH * channels, 0, count % WIDTH ? WIDTH * channels * sizeof(float) : 0);
    for (long i = 0; i < count; i++) {
        float *panel = to + i / WIDTH * WIDTH * channels + i % WIDTH;
        FETCH_NEXT(from + i * slot, 0);
        for (long c = 0; c < channels; c++) panel[c * WIDTH] = from[i * slot + c];
    }
}

/* Attention of every segment's queries to its keys. Slots are counted over all rows, one row after the other. */
struct attention {
    const float *q, *k, *v;     /* of the first slot; then q_slot and k_slot numbers to the next */
    const float *bias;          /* [heads, 2 * reach - 1] by the distance key - query + reach - 1, or null */
    float *weights;             /* of each segment [heads, queries, padded keys]; negative where dropped */
    const int64_t *segments;    /* [count, 4]: first query, queries, first key, keys */
    const int64_t *dropped;     /* which of all segments' weights [heads, queries, keys], in order */
    int64_t q_slot, k_slot, count, heads, channels, reach, dropped_count, causal, window;
    float scale, kept;          /* of the scores; of the weights that are left */
};

/* Which keys a query sees, and of some queries, which any of them sees. */
static long seen_from(const struct attention *x, long query)
{
    return x->causal && x->window ? most(0, query - x->window + 1) : 0;
}
static long seen_to(const struct attention *x, long query, long keys) { return x->causal ? least(keys, query + 1) : keys; }

static void softmax(float *row, const float *bias, long from, long to, long keys)
{
    long first = from / LANES * LANES, last = padded(to, LANES);
    if (bias)
        for (long j = first; j < last; j += LANES) AT(row + j) += GET(bias + j);
    for (long j = first; j < from; j++) row[j] = -INFINITY;
    for (long j = to; j < last; j++) row[j] = -INFINITY;
    vec top = all(-INFINITY), sum = all(0);
    for (long j = first; j < last; j += LANES) top = pick(GET(row + j) > top, GET(row + j), top);
    float highest_score = highest(top);
    for (long j = first; j < last; j += LANES) sum += AT(row + j) = exponential(GET(row + j) - highest_score);
    float share = 1.0f / total(sum);
    for (long j = first; j < last; j += LANES) AT(row + j) *= share;
    memset(row, 0, first * sizeof(float));
    memset(row + last, 0, (keys - last) * sizeof(float));
}

static float *room(const struct attention *x, long *queries, long *keys, long *row, int backward)
{
    *queries = *keys = 0, *row = padded(x->channels, PAD);
    for (long s = 0; s < x->count; s++) {
        *queries = most(*queries, x->segments[4 * s + 1]);
        *keys = most(*keys, x->segments[4 * s + 3]);
    }
    long wide = padded(*keys, PAD), scores = (backward ? 2 * *queries : ROWS) * wide;
    long slots = 2 * *queries + *keys + (backward ? most(*queries, *keys) : 0);
    return aligned_alloc(64, padded(4 * (PAD + scores + slots * *row + padded(*keys, WIDTH) * x->channels), 64));
}

int attention_forward(const struct attention *x, float *out)
{
    long most_queries, most_keys, row, channels = x->channels;
    float *memory = room(x, &most_queries, &most_keys, &row, 0), *weights = x->weights;
    if (!memory) return 1;
    float *q = memory, *mixed = q + most_queries * row, *v = mixed + most_queries * row;
    float *kept = v + most_keys * row, *turned = kept + ROWS * padded(most_keys, PAD);
    const int64_t *next = x->dropped, *end = next + x->dropped_count;
    int64_t before = 0; /* weights of earlier segments and heads */
    for (long s = 0; s < x->count; s++) {
        const int64_t *segment = x->segments + 4 * s;
        long queries = segment[1], keys = segment[3], wide = padded(keys, PAD);
        for (long h = 0; h < x->heads; h++, weights += queries * wide, before += queries * keys) {
            gather(q, row, x->q + segment[0] * x->q_slot + h * channels, x->q_slot, queries, channels);
            gather(v, row, x->v + segment[2] * x->k_slot + h * channels, x->k_slot, keys, channels);
            turn(turned, x->k + segment[2] * x->k_slot + h * channels, x->k_slot, keys, channels);
            for (long i = 0; i < queries; i += ROWS) {
                long rows = least(ROWS, queries - i), from = seen_from(x, i), to = seen_to(x, i + rows - 1, keys);
                float *block = weights + i * wide;
                product(block, wide, q + i * row, row, 1, turned, WIDTH, WIDTH * channels, rows, 0, channels,
                        from / WIDTH * WIDTH, to, x->scale);
                for (long r = i; r < i + rows; r++)
                    softmax(weights + r * wide, x->bias ? x->bias + h * (2 * x->reach - 1) + x->reach - 1 - r : 0,
                            seen_from(x, r), seen_to(x, r, keys), wide);
                if (x->dropped) {
                    block = memcpy(kept, block, rows * wide * sizeof(float));
                    for (; next < end && *next < before + (i + rows) * keys; next++) {
                        long r = (*next - before) / keys, j = (*next - before) % keys;
                        weights[r * wide + j] *= -1;
                        kept[(r - i) * wide + j] = 0;
                    }
                }
                product(mixed + i * row, row, block, wide, 1, v, row, WIDTH, rows, from, to, 0, channels, x->kept);
            }
            scatter(out + (segment[0] * x->heads + h) * channels, x->heads * channels, mixed, row, queries, channels);
        }
    }
    free(memory);
    return 0;
}

/* The gradients of q, k and v, in tensors like theirs, and of the bias, which is added to. */
int attention_backward(const struct attention *x, const float *grad, float *grad_q, float *grad_k, float *grad_v,
                       float *grad_bias)
{
    long most_queries, most_keys, row, channels = x->channels;
    float *memory = room(x, &most_queries, &most_keys, &row, 1);
    if (!memory) return 1;
    float *q = memory, *g = q + most_queries * row, *k = g + most_queries * row, *found = k + most_keys * row;
    float *slope = found + most(most_queries, most_keys) * row, *kept = slope + most_queries * padded(most_keys, PAD);
    float *turned = kept + most_queries * padded(most_keys, PAD);
    const float *weights = x->weights;
    for (long s = 0; s < x->count; s++) {
        const int64_t *segment = x->segments + 4 * s;
        long queries = segment[1], keys = segment[3], wide = padded(keys, PAD);
        for (long h = 0; h < x->heads; h++, weights += queries * wide) {
            long q_first = segment[0] * x->q_slot + h * channels, k_first = segment[2] * x->k_slot + h * channels;
            gather(q, row, x->q + q_first, x->q_slot, queries, channels);
            gather(k, row, x->k + k_first, x->k_slot, keys, channels);
            gather(g, row, grad + (segment[0] * x->heads + h) * channels, x->heads * channels, queries, channels);
            turn(turned, x->v + k_first, x->k_slot, keys, channels);
            for (long i = 0; i < queries; i += ROWS) {
                long rows = least(ROWS, queries - i), from = seen_from(x, i), to = seen_to(x, i + rows - 1, keys);
                long first = from / WIDTH * WIDTH, last = padded(to, LANES);
                product(slope + i * wide, wide, g + i * row, row, 1, turned, WIDTH, WIDTH * channels, rows, 0, channels,
                        first, to, x->kept);
                for (long r = i; r < i + rows; r++) {
                    float *own = slope + r * wide, *left = kept + r * wide;
                    const float *weight = weights + r * wide;
                    vec mean = all(0);
                    for (long j = first; j < last; j += LANES) {
                        ints gone = (ints)GET(weight + j) < 0; /* the sign says it */
                        AT(left + j) = pick(gone, all(0), GET(weight + j));
                        AT(own + j) = pick(gone, all(0), GET(own + j));
                        mean += GET(left + j) * GET(own + j);
                    }
                    float offset = total(mean);
                    for (long j = first; j < last; j += LANES)
                        AT(own + j) = (GET(own + j) - offset) * (vec)((ints)GET(weight + j) & INT32_MAX);
                    if (grad_bias) {
                        float *bias = grad_bias + h * (2 * x->reach - 1) + x->reach - 1 - r;
                        for (long j = first; j < last; j += LANES) AT(bias + j) += GET(own + j);
                    }
                    memset(own, 0, first * sizeof(float));
                    memset(left, 0, first * sizeof(float));
                    memset(own + last, 0, (wide - last) * sizeof(float));
                    memset(left + last, 0, (wide - last) * sizeof(float));
                }
                product(found + i * row, row, slope + i * wide, wide, 1, k, row, WIDTH, rows, from, to, 0, channels,
                        x->scale);
            }
            scatter(grad_q + q_first, x->q_slot, found, row, queries, channels);
            for (int values = 0; values < 2; values++) {
                for (long j = 0; j < keys; j += ROWS) {
                    long rows = least(ROWS, keys - j), from = x->causal ? j : 0, to = queries;
                    if (x->causal && x->window) to = least(to, j + rows - 1 + x->window);
                    product(found + j * row, row, (values ? kept : slope) + j, 1, wide, values ? g : q, row, WIDTH, rows,
                            from, to, 0, channels, values ? x->kept : x->scale);
                }
                scatter((values ? grad_v : grad_k) + k_first, x->k_slot, found, row, keys, channels);
            }
        }
    }
    free(memory);
    return 0;
}

/* y = x * inverse * weight, where inverse is one over the root mean square of a row. */
int norm_forward(const float *x, const float *weight, float *y, float *inverse, int64_t rows, int64_t width, float eps)
{
    for (long i = 0; i < rows; i++, x += width, y += width) {
        vec squares = all(0);
        float rest = 0;
        long c = 0;
        for (; c + LANES <= width; c += LANES) squares += GET(x + c) * GET(x + c);
        for (; c < width; c++) rest += x[c] * x[c];
        float own = inverse[i] = 1.0f / sqrtf((total(squares) + rest) / width + eps);
        for (c = 0; c < width; c++) y[c] = x[c] * own * weight[c];
    }
    return 0;
}

/* One term of the gradient goes through x, one through inverse, which has a sum over the row in it. grad_weight is
   added to. */
int norm_backward(const float *x, const float *weight, const float *inverse, const float *grad, float *grad_x,
                  float *grad_weight, int64_t rows, int64_t width)
{
    for (long i = 0; i < rows; i++, x += width, grad += width, grad_x += width) {
        vec products = all(0);
        float rest = 0, own = inverse[i];
        long c = 0;
        for (; c + LANES <= width; c += LANES) products += GET(grad + c) * GET(x + c) * GET(weight + c);
        for (; c < width; c++) rest += grad[c] * x[c] * weight[c];
        float slope = -(total(products) + rest) * own * own * own / width;
        for (c = 0; c < width; c++) grad_x[c] = grad[c] * weight[c] * own + x[c] * slope;
        for (c = 0; c < width; c++) grad_weight[c] += grad[c] * x[c] * own;
    }
    return 0;
}

/* Each row's cross-entropy against its target; the logits become its gradient in place. */
int cross_entropy(float *x, const int64_t *target, float *loss, int64_t rows, int64_t width, float smoothing)
{
    long whole = width / LANES * LANES;
    for (long i = 0; i < rows; i++, x += width) {
        vec highs = all(-INFINITY), sums = all(0), mean = all(0);
        float last[LANES], own = x[target[i]], mean_logit = 0;
        for (long c = 0; c < whole; c += LANES) {
            highs = pick(GET(x + c) > highs, GET(x + c), highs);
            mean += GET(x + c);
        }
        for (long c = 0; c < LANES; c++) last[c] = whole + c < width ? x[whole + c] : -INFINITY;
        float high = highest(pick(GET(last) > highs, GET(last), highs));
        for (long c = whole; c < width; c++) mean_logit += x[c];
        mean_logit = (mean_logit + total(mean)) / width;
        for (long c = 0; c < whole; c += LANES) sums += AT(x + c) = exponential(GET(x + c) - high);
        AT(last) = exponential(GET(last) - high);
        float sum = total(sums + GET(last));
        memcpy(x + whole, last, (width - whole) * sizeof(float));
        float log_sum = logf(sum); /* of the logits less the highest; taken off these first, small losses stay exact */
        loss[i] = (1 - smoothing) * (log_sum - (own - high));
        if (smoothing) loss[i] += smoothing * (log_sum - (mean_logit - high));
        for (long c = 0; c < width; c++) x[c] = x[c] * (1 / sum) - smoothing / width;
        x[target[i]] += smoothing - 1;
    }
    return 0;
}
