"""SpargeAttn's first stage by its definition: loops over blocks and tokens, in plain Python floats (fp64)."""

from __future__ import annotations

import itertools
import math


def blocks_of(length, size):
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def dot(a, b):
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def mean(rows):
    return [math.fsum(column) / len(rows) for column in zip(*rows, strict=True)]


def similarity(rows):
    """Mean of the Gram matrix of unit rows."""
    rows = [[x / (math.sqrt(dot(row, row)) or 1) for x in row] for row in rows]
    return math.fsum(dot(a, b) for a in rows for b in rows) / len(rows) ** 2


def mask(q, k, *, q_tokens, kv_tokens, tau, theta, topk=None):
    """Rows of 0 and 1 of one head of one sample, and how near the choice was to another one.

    Args:
        q, k: rows of numbers.
        topk: in place of tau.

    Returns:
        Mask and the smallest margin of a decision; ties below 1e-9 could go either way in another order of summation.
    """
    centre = mean(k)
    k = [[x - c for x, c in zip(row, centre, strict=True)] for row in k]
    q_blocks, kv_blocks = blocks_of(len(q), q_tokens), blocks_of(len(k), kv_tokens)
    margins = [1.0]

    def judge(rows, blocks):
        flags = []
        for block in blocks:
            alike = similarity([rows[i] for i in block])
            margins.append(abs(alike - theta))
            flags.append(alike < theta)
        return flags

    q_differs, kv_differs = judge(q, q_blocks), judge(k, kv_blocks)
    q_means = [mean([q[i] for i in block]) for block in q_blocks]
    kv_means = [mean([k[i] for i in block]) for block in kv_blocks]
    rows = []
    for i, query in enumerate(q_means):
        compete = [j for j in range(len(kv_blocks)) if not kv_differs[j]]
        logits = {j: dot(query, kv_means[j]) / math.sqrt(len(query)) for j in compete}
        order = sorted(compete, key=lambda j: (-logits[j], j))
        margins += [logits[a] - logits[b] for a, b in itertools.pairwise(order)]
        selection = set(order[: topk or 1])
        if topk is None and order:
            top = logits[order[0]]
            weights = [math.exp(logits[j] - top) for j in order]
            total, mass = math.fsum(weights), 0.0
            for j, weight in zip(order, weights, strict=True):
                mass += weight
                margins.append(abs(mass / total - tau) if tau < 1 else 1.0)
                if mass / total <= tau or tau == 1:
                    selection.add(j)
        rows.append([int(j in selection or q_differs[i] or kv_differs[j]) for j in range(len(kv_blocks))])
    return rows, min(margins)
