// Products of small float matrices in a core's cache, and the loads and stores around them, for the chunk-wise forms.
#pragma once

#include <algorithm>

#include "simd.h"

namespace states {

// Columns of matrices in a workspace are padded to whole vectors.
inline int64_t padded(int64_t columns) { return round_up(columns, W); }

#ifdef __AVX512F__
constexpr int VECTORS = 4;
#else
constexpr int VECTORS = 2;
#endif
constexpr int ROWS = 6;

// out [ROWS_, VECTORS_ * W] = a [ROWS_, inner] . b [inner, VECTORS_ * W], or is increased by it.
template <int ROWS_, int VECTORS_>
inline void product_tile(
    int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* out, int64_t out_stride,
    bool add
) {
    vf sums[ROWS_][VECTORS_];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS_; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS_; v++) sums[r][v] = add ? load(out + r * out_stride + v * W) : vf{};
    for (int64_t k = 0; k < inner; k++) {
        vf of_b[VECTORS_];
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS_; v++) of_b[v] = load(b + k * b_stride + v * W);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS_; r++) {
            const vf of_a = splat(a[r * a_stride + k]);
#pragma GCC unroll 8
            for (int v = 0; v < VECTORS_; v++) sums[r][v] = fused(of_a, of_b[v], sums[r][v]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS_; r++)
#pragma GCC unroll 8
        for (int v = 0; v < VECTORS_; v++) store(out + r * out_stride + v * W, sums[r][v]);
}

template <int VECTORS_>
inline void product_rows(
    int rows, int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride, float* out,
    int64_t out_stride, bool add
) {
    switch (rows) {
        case 1: return product_tile<1, VECTORS_>(inner, a, a_stride, b, b_stride, out, out_stride, add);
        case 2: return product_tile<2, VECTORS_>(inner, a, a_stride, b, b_stride, out, out_stride, add);
        case 3: return product_tile<3, VECTORS_>(inner, a, a_stride, b, b_stride, out, out_stride, add);
        case 4: return product_tile<4, VECTORS_>(inner, a, a_stride, b, b_stride, out, out_stride, add);
        case 5: return product_tile<5, VECTORS_>(inner, a, a_stride, b, b_stride, out, out_stride, add);
        default: return product_tile<6, VECTORS_>(inner, a, a_stride, b, b_stride, out, out_stride, add);
    }
}

// out [rows, columns] = a [rows, inner] . b [inner, columns], or is increased by it. `columns` are whole vectors. With
// `lower`, `a` is a lower triangle: row r has no other columns than those up to r.
inline void product(
    int64_t rows, int64_t columns, int64_t inner, const float* a, int64_t a_stride, const float* b, int64_t b_stride,
    float* out, int64_t out_stride, bool add, bool lower = false
) {
    for (int64_t r = 0; r < rows; r += ROWS) {
        const int count = int(std::min<int64_t>(ROWS, rows - r));
        const int64_t used = lower ? std::min(inner, r + count) : inner;
        int64_t c = 0;
        for (; c + VECTORS * W <= columns; c += VECTORS * W)
            product_rows<VECTORS>(count, used, a + r * a_stride, a_stride, b + c, b_stride, out + r * out_stride + c, out_stride, add);
        for (; c < columns; c += W)
            product_rows<1>(count, used, a + r * a_stride, a_stride, b + c, b_stride, out + r * out_stride + c, out_stride, add);
    }
}

// Copies `width` numbers as floats; the rest up to a whole vector is 0.
template <class T>
inline void fetch(const T* from, int64_t width, float* to) {
    int64_t i = 0;
    for (; i + W <= width; i += W) store(to + i, load(from + i));
    if (i == width) return;
    for (int64_t j = i; j < i + W; j++) to[j] = j < width ? number(from[j]) : 0.0f;
}

template <class T>
inline void deliver(const float* from, int64_t width, T* to) {
    int64_t i = 0;
    for (; i + W <= width; i += W) store(to + i, load(from + i));
    for (; i < width; i++) put(to + i, from[i]);
}

// to [columns, rows] = from [rows, columns], where `rows` are padded with zeros to whole vectors.
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to, int64_t to_stride) {
    for (int64_t c0 = 0; c0 < columns; c0 += W) {
        const int64_t end = std::min(columns, c0 + W);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = c0; c < end; c++) to[c * to_stride + r] = from[r * from_stride + c];
    }
    for (int64_t c = 0; c < columns; c++)
        for (int64_t r = rows; r < padded(rows); r++) to[c * to_stride + r] = 0.0f;
}

inline void scale(float* x, int64_t width, float by) {
    for (int64_t i = 0; i < width; i += W) store(x + i, load(x + i) * by);
}

// m [rows, rows] = products * exp(sums[r] - sums[c]) below the diagonal, with it if `diagonal`; each row of it times
// factors[r], and 0 elsewhere. `rows` columns are padded to whole vectors.
inline void decay(
    const float* products, const float* sums, const float* factors, int64_t rows, bool diagonal, float* m, int64_t stride
) {
    for (int64_t r = 0; r < rows; r++) {
        const int64_t end = diagonal ? r + 1 : r;
        const float factor = factors == nullptr ? 1.0f : factors[r];
        int64_t c = 0;
        for (; c < end; c += W)
            store(m + r * stride + c, load(products + r * stride + c) * exp(splat(sums[r]) - load(sums + c)) * factor);
        for (int64_t i = end; i < std::min(c, padded(rows)); i++) m[r * stride + i] = 0.0f;
        for (; c < padded(rows); c += W) store(m + r * stride + c, vf{});
    }
}

}  // namespace states
