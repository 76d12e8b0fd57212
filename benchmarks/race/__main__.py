"""The race of docs/race.md: trains what is missing of a leg, says what is missing, packs runs, and makes the tables.

python -m benchmarks.race run scratch --seeds 0 --jobs 5     what is missing of a leg; again after an interruption
python -m benchmarks.race pack                               outputs/race to benchmarks/raw/race-LEG.tar.xz
python -m benchmarks.race missing                            runs and GPU minutes to go, by the archives
python -m benchmarks.race table scratch                      tables of a leg, from its archive
python -m benchmarks.race page scratch                       its curves and tables as one HTML file, by `vsa report`
"""

from __future__ import annotations

import argparse

from benchmarks.race.archive import pack
from benchmarks.race.legs import LEGS
from benchmarks.race.points import missing
from benchmarks.race.tables import page, table
from benchmarks.race.training import train
from vsa.errors import one_line_errors


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run")
    run.add_argument("leg", choices=LEGS)
    run.add_argument("--jobs", type=int, default=5, help="runs on a GPU at a time (default %(default)s)")
    run.add_argument("--seeds", type=int, nargs="+", help="seeds to train (all of the leg)")
    commands.add_parser("pack").add_argument(
        "--unscored", action="store_true", help="also finished runs whose clips were not scored and never will be"
    )
    commands.add_parser("missing")
    for command in ("table", "page"):
        commands.add_parser(command).add_argument("leg", choices=LEGS, nargs="?", default="scratch")
    args = parser.parse_args()
    with one_line_errors():
        if args.command == "run":
            train(args.leg, args.seeds or LEGS[args.leg].seeds, args.jobs)
        elif args.command == "page":
            page(args.leg)
        else:
            lines = {"missing": missing, "pack": lambda: pack(unscored=args.unscored), "table": lambda: table(args.leg)}
            print(*lines[args.command](), sep="\n")


if __name__ == "__main__":
    main()
