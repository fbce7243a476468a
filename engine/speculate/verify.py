"""Which drafts are kept. A pure function of a step's plan and output.

A chain is a sequence's next token and k drafts of the tokens behind it, as k + 1 rows of one plan:

    row          r        r + 1    ...  r + k
    token        t0       d1            dk        t0 is known; each d is a draft
    sampled      s0       s1            sk        what the model chooses behind the row's token

d1 is kept if s0 == d1, d2 if also s1 == d2, and so on. A row is what a decode row for the same token is: the same
kernels see the same KV, and its noise depends on (seed, position) alone. So the tokens s0 ... sa, up to the first draft
that isn't kept, are those that decoding one by one yields, to the last bit of their log-probabilities.

The probability that a draft is kept is that of two coupled draws being equal: at most sum over v of min(p[v], q[v]) for
any coupling, which the rejection rule min(1, p/q) reaches (Leviathan, Kalman, Matias 2023, theorem 3.5), and at least
sum min(p, q) / (2 - sum min(p, q)) for draws that share exponential noise (Daliri, Musco, Suresh 2024).
"""

from collections.abc import Sequence

from kvrelay.engine.plan import StepPlan


def kept_rows(plan: StepPlan, sampled: Sequence[int | None]) -> list[bool]:
    """[R] whether each row computed a token that its sequence has. Rows that aren't drafts always did.

    Args:
        sampled: [R] what each row yielded.
    """
    if plan.drafts is None:
        return [True] * plan.num_rows
    kept: list[bool] = []
    # A draft is its row's only token.
    last = plan.tokens if plan.kind == "decode" else plan.tokens[plan.lengths.cumsum() - 1]
    tokens = last.tolist()
    for row, draft in enumerate(plan.drafts.tolist()):
        kept.append(not draft or (kept[row - 1] and sampled[row - 1] == tokens[row]))
    return kept
