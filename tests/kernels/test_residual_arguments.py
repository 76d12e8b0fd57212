"""Wrong arguments of `residual_norm` are refused by name, with what was expected and what was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vsa_kernels import residual_norm

WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "states that are no floats": ({"x": torch.zeros(2, 3, 4, dtype=torch.int32)}, "x must be a float"),
    "no tokens": ({"x": torch.zeros(2, 0, 4)}, "with tokens"),
    "another update": ({"update": torch.zeros(2, 3, 5)}, r"update must be torch.float32 \[2, 3, 4\] like x"),
    "an update of another dtype": ({"update": torch.zeros(2, 3, 4, dtype=torch.half)}, "update must be torch.float32"),
    "a gate without an update": ({"update": None}, "gate must be None without an update"),
    "a projection without an update": (
        {"update": None, "gate": None, "projection": (torch.zeros(4, 4), torch.zeros(4))},
        "projection must be None without an update",
    ),
    "a projection of another width": (
        {"projection": (torch.zeros(4, 3), torch.zeros(4))},
        r"the weight of projection must be a float \[4, 4\] like update, got torch.float32 \[4, 3\]",
    ),
    "a projection to another width": (
        {"projection": (torch.zeros(5, 4), torch.zeros(5))},
        "must be a float .4, 4. like",
    ),
    "another bias of a projection": (
        {"projection": (torch.zeros(4, 4), torch.zeros(1, 4))},
        r"the bias of projection must be a float \[4\] like its weight",
    ),
    "another gate": ({"gate": torch.zeros(2, 2, 4)}, r"gate must be a float \[2, 1, 4\] or \[2, 3, 4\]"),
    "another weight": ({"weight": torch.zeros(5)}, r"weight must be a float \[4\] or \[2, 1, 4\] or \[2, 3, 4\]"),
    "another bias": ({"bias": torch.zeros(2, 1, 4)}, r"bias must be a float \[4\], got torch.float32 \[2, 1, 4\]"),
    "an eps below 0": ({"eps": -1.0}, "eps must be finite and at least 0, got -1.0"),
    "an unknown backend": ({"backend": "gather"}, "backend must be reference, triton or None"),
    "places of other tokens": (
        {"places": (torch.zeros(4, dtype=torch.int32), 1)},
        r"places must hold an int32 \[3\], got torch.int32 \[4\]",
    ),
    "more places than tokens": (
        {"places": (torch.arange(3, dtype=torch.int32), 4)},
        "places must hold a number of tokens up to 3, got 4",
    ),
    "places of one row": (
        {"places": (torch.arange(3, dtype=torch.int32), 1)},
        r"gate must be a float \[2, 2, 4\], got",
    ),
    "another device": ({"bias": torch.zeros(4, device="meta")}, "bias"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_refused_by_name(name):
    changes, message = WRONG[name]
    p = {"x": torch.zeros(2, 3, 4), "update": torch.zeros(2, 3, 4), "gate": torch.zeros(2, 1, 4)}
    p |= {"weight": torch.zeros(4), "bias": torch.zeros(4), "eps": 1e-3}
    with pytest.raises(ValueError, match=message):
        residual_norm(**p | changes)
