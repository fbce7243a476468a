"""Applies shapings to logits, on the device where these are; `kvrelay.engine.shaping` has the formulas."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvrelay.engine.constrain.grammar import STEP_WAIT_SECONDS, ConstraintError, MaskNotReadyError
from kvrelay.engine.plan import NOT_READY
from kvrelay.engine.shaping import Shaping

NO_TOKEN = "no token is left to choose: the constraint, bad words or stop ids exclude all of them"


def shape(logits: Tensor, shapings: Sequence[tuple[int, Shaping]]) -> dict[int, str]:
    """Changes the logits of some rows.

    Args:
        logits: float32 [R, V]; changed in place.
        shapings: the rows, each at most once, and what changes them.

    Returns:
        The rows whose constraint can't be followed any more, and why, and those whose mask isn't there. Their logits
        mean nothing.
    """
    _add_bias(logits, shapings)
    _penalize(logits, [(row, shaping) for row, shaping in shapings if shaping.params.penalized])
    ban(logits, [(row, token) for row, shaping in shapings for token in shaping.banned()])
    return _mask(logits, shapings)


def ban(logits: Tensor, banned: Sequence[tuple[int, int]], first: int = 0) -> None:
    """Excludes tokens: pairs of a row and a token id, those without a logit too.

    Args:
        logits: [R, V]; changed in place.
        first: token of the first logit of a row, if they are of a part of the vocabulary.
    """
    if banned:
        rows, tokens = np.array(banned, np.int64).T
        index, _ = _index(logits, rows, tokens, first)
        logits[index] = -torch.inf


def _add_bias(logits: Tensor, shapings: Sequence[tuple[int, Shaping]]) -> None:
    rows = [(row, shaping) for row, shaping in shapings if len(shaping.bias)]
    if rows:
        index, own = _index(logits, *_pairs([(row, shaping.bias_ids) for row, shaping in rows]))
        logits[index] += _to(logits, np.concatenate([shaping.bias for _, shaping in rows])[own])


def _penalize(logits: Tensor, shapings: Sequence[tuple[int, Shaping]]) -> None:
    if not shapings:
        return
    seen = [shaping.seen() for _, shaping in shapings]
    pairs = _pairs([(row, ids) for (row, _), (ids, _) in zip(shapings, seen, strict=True)])
    index, own = _index(logits, *pairs)
    lengths = [len(ids) for ids, _ in seen]
    factors = np.array([_factors(shaping) for _, shaping in shapings], np.float32).repeat(lengths, axis=0)
    repetition, frequency, presence = _to(logits, np.ascontiguousarray(factors[own].T))
    counts = _to(logits, np.concatenate([counts for _, counts in seen])[own])
    values = logits[index]
    values = torch.where(values > 0, values / repetition, values * repetition)
    logits[index] = values - (frequency * counts + torch.where(counts > 0, presence, 0.0))


def _factors(shaping: Shaping) -> tuple[float, float, float]:
    params = shaping.params
    return params.repetition_penalty, params.frequency_penalty, params.presence_penalty


def _mask(logits: Tensor, shapings: Sequence[tuple[int, Shaping]]) -> dict[int, str]:
    rows, masks, failed = [], [], {}
    deadline = time.monotonic() + STEP_WAIT_SECONDS
    for row, shaping in shapings:
        if shaping.matcher is None:
            continue
        try:
            masks.append(shaping.matcher.mask(max(0.0, deadline - time.monotonic())))
        except ConstraintError as error:
            failed[row] = str(error)
        except MaskNotReadyError:
            failed[row] = NOT_READY
        else:
            rows.append(row)
    if rows:
        words = _to(logits, np.stack(masks))
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((words[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]].bool()
        index = _to(logits, np.array(rows, np.int64))
        logits[index] = logits[index].masked_fill(~allowed, -torch.inf)
    return failed


def _pairs(entries: Sequence[tuple[int, NDArray[np.int64]]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows and tokens of the tokens of several rows."""
    rows = np.repeat(np.array([row for row, _ in entries], np.int64), [len(ids) for _, ids in entries])
    return rows, np.concatenate([ids for _, ids in entries])


def _index(
    logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], first: int = 0
) -> tuple[tuple[Tensor, Tensor], NDArray[np.bool_]]:
    """The index of those of these tokens that have logits, and which ones they are."""
    own = (tokens >= first) & (tokens < first + logits.shape[1])
    return (_to(logits, rows[own]), _to(logits, tokens[own] - first)), own


def _to(logits: Tensor, array: NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(logits.device, non_blocking=True)
