"""The race for a row's token: each token's time is exponential noise over its weight, and the first one wins.

    score[v] = exp(s[v]) / e[v],  e exponential noise, a function of (keys, v) only

So token v wins with probability exp(s[v]) / sum(exp(s)), whoever runs in which program, and in which order.
Source: Gumbel-max in the form of an exponential race; the noise is that of `engine.sampling.noise`.
"""

import triton
import triton.language as tl

NO_TOKEN = tl.constexpr(2147483647)


@triton.jit
def _exponential(key_0, key_1, token):
    """-log(1 - u) as `engine.sampling.noise.exponential` has it; uint32 arithmetic wraps."""
    x = (token.to(tl.uint32) ^ key_0) * 0x7FEB352D
    x ^= x >> 15
    x = (x + key_1) * 0x846CA68B
    x ^= x >> 16
    x *= 0x2C1B3C6D
    x ^= x >> 15
    u = ((x & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * 4.656612873077393e-10
    # log1p(-u) from log: the quotient corrects the rounding error of 1 - u (Goldberg 1991, theorem 4).
    # Where u rounds to 1, w would be 0: 2^-24 is what it is for the largest u below.
    w = tl.maximum(1.0 - u, 5.9604644775390625e-08)
    exact = tl.log(w) * (u / tl.where(w == 1.0, 1.0, 1.0 - w))
    return tl.where(w == 1.0, u, -exact)


@triton.jit
def race(s, ids, bound, key_0, key_1):
    """The best score, and its token, of those `ids` whose s is `bound` or more; the first of equal ones."""
    score = tl.where(s >= bound, tl.exp(s) / _exponential(key_0, key_1, ids), -1.0)
    best = tl.max(score, 0)
    return best, tl.min(tl.where(score == best, ids, NO_TOKEN), 0)


@triton.jit
def better(best, token, other, other_token):
    """The better one of two results of `race`."""
    wins = (other > best) | ((other == best) & (other_token < token))
    return tl.where(wins, other, best), tl.where(wins, other_token, token)
