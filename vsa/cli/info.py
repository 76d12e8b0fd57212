"""Arguments of `vsa info`."""

from __future__ import annotations


def info() -> None:
    """Show the machine, versions, GPUs and available attention backends.

    \b
    vsa info
    """
    from vsa.machine import describe_here

    for line in describe_here():
        print(line)
