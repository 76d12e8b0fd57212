"""`python -m vsa.cli` is the same as `vsa`; a sweep starts its runs with it."""

from vsa.sweeps.lifeline import end_with_parent

if __name__ == "__main__":
    end_with_parent()

    from vsa.cli import main

    main()
