"""Order-preserving integer keys of scores, among which a bisection finds a threshold."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def value_keys(x):
    """Unsigned keys in the order of the fp32 values x; -0.0 below 0.0, NaN anywhere."""
    bits = x.to(tl.int32, bitcast=True)
    # a negative value flips all bits, so that it descends with its magnitude, any other only the sign
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def key_value(key):
    """The fp32 value of a key."""
    bits = key.to(tl.int32, bitcast=True)
    return (bits ^ (~(bits >> 31) | -2147483648)).to(tl.float32, bitcast=True)
