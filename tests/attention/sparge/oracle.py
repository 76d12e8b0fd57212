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


def similarity(rows, kind):
    """Mean of the Gram matrix of the rows, of unit rows (cosine) or over its largest entry (gram)."""
    if kind == "cosine":
        rows = [[x / (math.sqrt(dot(row, row)) or 1) for x in row] for row in rows]
    gram = [dot(a, b) for a in rows for b in rows]
    average = math.fsum(gram) / len(gram)
    return average if kind == "cosine" else average / (abs(max(gram)) or 1)


def mask(q, k, *, q_tokens, kv_tokens, tau, theta, similar="cosine", scaled=True, smooth=True, ragged=False,
         sink=False, causal=False, topk=None):  # fmt: skip
    """Rows of 0 and 1 of one head of one sample, and how near the choice was to another one.

    Args:
        q, k: rows of numbers.
        topk: in place of tau.

    Returns:
        Mask and the smallest margin of a decision; ties below 1e-9 could go either way in another order of summation.
    """
    if smooth:
        centre = mean(k)
        k = [[x - c for x, c in zip(row, centre, strict=True)] for row in k]
    q_blocks, kv_blocks = blocks_of(len(q), q_tokens), blocks_of(len(k), kv_tokens)
    margins = [1.0]

    def judge(rows, blocks, size):
        flags = []
        for block in blocks:
            alike = similarity([rows[i] for i in block], similar)
            margins.append(abs(alike - theta))
            flags.append(alike < theta or (ragged and len(block) < min(size, len(rows))))
        return flags

    q_differs, kv_differs = judge(q, q_blocks, q_tokens), judge(k, kv_blocks, kv_tokens)
    q_means = [mean([q[i] for i in block]) for block in q_blocks]
    kv_means = [mean([k[i] for i in block]) for block in kv_blocks]
    rows = []
    for i, query in enumerate(q_means):
        visible = [not causal or block.start < q_blocks[i].stop for block in kv_blocks]
        compete = [j for j in range(len(kv_blocks)) if visible[j] and not kv_differs[j]]
        logits = {j: dot(query, kv_means[j]) / (math.sqrt(len(query)) if scaled else 1) for j in compete}
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
        additions = {j for j in range(len(kv_blocks)) if q_differs[i] or kv_differs[j] or (sink and j == 0)}
        rows.append([int(visible[j] and (j in selection or j in additions)) for j in range(len(kv_blocks))])
    return rows, min(margins)
