#!/usr/bin/env bash
# Builds the wheel, installs it in a new environment and trains three steps outside the checkout.
# Usage: scripts/check_wheel.sh                  the newest versions of the dependencies
#        scripts/check_wheel.sh lowest-direct    the oldest that pyproject.toml admits; torch and triton stay the newest
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export VIRTUAL_ENV=$work/venv UV_FIND_LINKS=${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}
python3 -m venv "$VIRTUAL_ENV"
"$VIRTUAL_ENV/bin/python" -m pip install -q uv 2>/dev/null
uv=$VIRTUAL_ENV/bin/uv
# the files of the Dockerfile alone: a build in the checkout would also pack what an earlier one left there
git -C "$root" archive HEAD LICENSE README.md pyproject.toml setup.py configs kernels vsa \
    | tar -x -C "$work" --one-top-level=source
"$uv" build -q --wheel --out-dir "$work/dist" "$work/source"
wheel=$(echo "$work"/dist/*.whl)
grep -E '^ +"(torch|triton)[><=]' "$root/pyproject.toml" | sed -E 's/^ +"(.*)",$/\1/' >"$work/torch.txt"
"$uv" pip install -q -r "$work/torch.txt"
"$uv" pip install -q --resolution "${1:-highest}" "$wheel"
mkdir "$work/elsewhere"
cd "$work/elsewhere"
vsa() { env -u PYTHONPATH "$VIRTUAL_ENV/bin/vsa" "$@"; }
vsa info
for command in $("$VIRTUAL_ENV/bin/python" -c 'from vsa.cli import COMMANDS; print(*COMMANDS)'); do
    vsa "$command" --help >/dev/null
done
vsa toy data/toy/videos --count 32
vsa encode data/toy/videos data/toy/shards --text ngrams
vsa train experiment=quickstart data=folder data.root=data/toy/shards trainer.max_steps=3
vsa report outputs/quickstart/default
