// Products of integers: weights of 4 or 8 bits with inputs that each row rounds to integers of 16 or 8 bits.
//
//     y[t, n] = scale[t] * sum over groups g of scale[n, g] * sum over k in g of (q[n, k] - zero[n, g]) * x[t, k]
//                                             + minimum[n, g] * sum over k in g of x[t, k]
//
// The inner sums are exact, so a row's result depends neither on the other rows nor on the instructions that make it:
//
//     words    8 by 16 bits, added in pairs, any CPU, best for the few rows of decode
//     bytes    8 by 8 bits, added in fours (VNNI)
//     tiles    the same by AMX; inputs of 16 bits in two products, of their high and of their low bytes
//     nibbles  4 by 8 bits, added in fours (VNNI), or in pairs. Inputs are rounded span by span: span s of 32 or 64 inputs,
//              whose weights have the same scale, has a scale[t, s] of its own instead of scale[t]
//
// Scales of groups are applied to sums of tiles nowhere: they would cost more than the product. So with groups, AMX multiplies
// many rows with weights that are decoded to bfloat16 (linear.cpp); so does AVX512_BF16 with weights of 8 bits.
#pragma once

#include "linear.h"

// Whether this product is one of integers.
bool multiplied_as_integers(const LinearArgs& args, int64_t rows);
void multiply_integers(const LinearArgs& args, const Portion& portion);
// Floats of workspace for each thread.
int64_t integer_workspace(int64_t inputs);
