"""Publication as a transaction: a record of what pushes wrote, a plan, one commit to the Hugging Face hub, and a look.

It ends in one of three ways, each within a time: published, nothing was published, or unknown.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from vsa.checkpoints.published import RECORD
from vsa.checkpoints.weight_files import some
from vsa.data.remote import PATIENCE, PAUSES, SLOWEST, reason_of, status_of
from vsa.errors import first_of
from vsa.files import file_digest, open_regular, read_json, write_whole
from vsa.threads import within

Files = Mapping[str, Collection[str]]
"""Names of files with `/`, and digests of each."""

_MAKER = "vsa push"
# what the readers of a pushed model look at: of another model, these files would be taken for parts of this one
_READ = re.compile(
    r"checkpoints(/.*)?|diffusion_pytorch_model.*|(config|sparse_attention|sampling|run)\.json|golden\..*"
)


def files_in(folder: Path) -> dict[str, list[str]]:
    """SHA-256 and git's digest of every file below a folder: the hub tells the first of large files, the second of
    others. A link has none, and is not followed."""
    paths = [path for path in sorted(folder.rglob("*")) if path.is_symlink() or not path.is_dir()]
    return {str(path.relative_to(folder)): [] if path.is_symlink() else _digests(path) for path in paths}


def _digests(path: Path) -> list[str]:
    git = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    with open_regular(path) as file:
        return [file_digest(path), hashlib.file_digest(file, lambda: git).hexdigest()]


def write_record(folder: Path) -> None:
    """Write the record of a folder that is complete but for it."""
    write_whole(folder / RECORD, json.dumps({"made_by": _MAKER, "files": files_in(folder)}, indent=1) + "\n")


def read_record(path: Path) -> Files:
    """The files that the record of a target lists, and itself; none without a record of a push."""
    try:
        record = read_json(path, kind={"made_by": str, "files": dict[str, list[str]]})
        return {**record["files"], RECORD: _digests(path)} if record["made_by"] == _MAKER else {}
    except (OSError, ValueError):
        return {}


def changes(new: Files, there: Files, recorded: Files, *, replace: bool, tell: Callable[[str], None]) -> list[str]:
    """Files of a target that a push has to replace or delete, which are told; all others stay.

    Args:
        new: files of the push.
        there: files of the target; what the record says beyond them is of no effect.
        recorded: files that an earlier push recorded.
        replace: whether others than those may change too.
        tell: function called with lines for the user.

    Raises:
        ValueError: no push has written one of them as it is now, and `replace` is false.
    """

    def known(name: str, files: Files) -> bool:
        return not {*there[name]}.isdisjoint(files.get(name, ()))

    def above(name: str) -> set[str]:
        return {str(folder) for folder in PurePosixPath(name.casefold()).parents}

    # also a file where a folder has to be, and the reverse; some systems have one file for both cases of a name
    own = {name.casefold() for name in new}
    names = own.union(*map(above, new))
    in_way = [n for n in there if n.casefold() in names or above(n) & own or known(n, recorded) or _READ.fullmatch(n)]
    changed = [name for name in in_way if not known(name, new)]
    others = [name for name in changed if not known(name, recorded)]
    for line in first_of([f"{'replaces' if name in new else 'deletes'} {name}" for name in changed]):
        tell(line)
    if others and not replace:
        raise ValueError(f"no push wrote {some(others)}: choose another place, or change these files with --replace")
    return changed


def hub_client(repo: str) -> Any:
    """The client of the hub; ValueError without its package, or for a name that the hub does not take."""
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        raise ValueError(f"{repo} is on the hub: pip install 'vsa-train[hub]', or name a folder (./{repo})") from None
    validate_repo_id(repo)
    return HfApi()


def publish(
    api: Any, folder: Path, new: Files, repo: str, *, private: bool, replace: bool, tell: Callable[[str], None]
) -> str:
    """Commit the files of a folder to a repository, and look for them there.

    Args:
        api: client of the hub.
        folder: what is published, with its record.
        new: its files.
        repo: OWNER/NAME, which is created if it is not there.
        private: whether the repository is a private one.
        replace: see `changes`.
        tell: function called with lines for the user.

    Returns:
        URL of what was published.

    Raises:
        ValueError: nothing was published, or it is unknown whether it was; says which, and why.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete
    from huggingface_hub.utils import logging

    # it reports every request that it repeats
    logging.set_verbosity_error()
    url, looks, refused = f"{api.endpoint}/{repo}", (0.0, *PAUSES), False
    patience = PATIENCE + sum((folder / name).stat().st_size for name in new) / SLOWEST
    doomed: list[str] | None = None
    try:
        parent, there, recorded = within(PATIENCE, partial(_plan, api, repo, private))
        tell(f"{repo}: {len(new)} files")
        changed = changes(new, there, recorded, replace=replace, tell=tell)
        files = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in new]
        # one by one, since the process would wait for the threads of a pool
        within(patience, lambda: [api.preupload_lfs_files(repo, [file]) for file in files])
        # from here on the hub may commit
        doomed = [name for name in changed if name not in new]
        operations = [*(CommitOperationDelete(path_in_repo=name) for name in doomed), *files]
        message = {"commit_message": "Publish a run of VSA-Train", "parent_commit": parent}
        made = within(patience, partial(api.create_commit, repo, operations, **message))
        url, reason = made.commit_url, "it does not show all files as they were sent"
    except (Exception, KeyboardInterrupt) as error:
        reason = _reason(error)
        # the client has the card checked before it sends the commit
        refused = doomed is None or "Invalid metadata" in reason or 400 <= (status_of(error) or 0) < 500
        looks = looks[:1] if refused or isinstance(error, KeyboardInterrupt) else looks
    if doomed is not None and _has(api, repo, new, doomed, looks):
        return url
    if refused:
        raise ValueError(f"cannot push to {repo}, nothing was published: {reason}")
    raise ValueError(f"unknown whether {repo} was published ({reason}): look at {url}")


def _plan(api: Any, repo: str, private: bool) -> tuple[str, Files, Files]:
    """Newest commit of a repository, its files, and those that an earlier push recorded."""
    api.create_repo(repo, private=private or None, exist_ok=True)
    info = api.repo_info(repo)
    if bool(info.private) != private:
        state, advice = ("private", "add --private") if info.private else ("public", "leave out --private")
        raise ValueError(f"it is {state} on the hub: {advice}, or change that in its settings there")
    there = _files(api, repo)
    recorded = read_record(Path(api.hf_hub_download(repo, RECORD))) if RECORD in there else {}
    return info.sha, there, recorded


def _files(api: Any, repo: str) -> Files:
    tree = api.list_repo_tree(repo, recursive=True)
    return {item.path: [item.lfs.sha256 if item.lfs else item.blob_id] for item in tree if hasattr(item, "blob_id")}


def _has(api: Any, repo: str, new: Files, doomed: Collection[str], pauses: Collection[float]) -> bool:
    """Whether the hub comes to have the new files as they are, and none of the doomed ones."""
    for pause in pauses:
        # it may answer the next time
        with suppress(Exception, KeyboardInterrupt):
            time.sleep(pause)
            there = within(PATIENCE / 6, partial(_files, api, repo))
            if not there.keys() & doomed and all({*new[name]} & {*there.get(name, ())} for name in new):
                return True
    return False


def _reason(error: BaseException) -> str:
    own = str(error) if type(error) is ValueError else reason_of(error)
    reason = {TimeoutError: "the hub took too long", KeyboardInterrupt: "interrupted"}.get(type(error), own)
    if wait := getattr(getattr(error, "response", None), "headers", {}).get("retry-after"):
        return f"{reason} (try again in {wait} s)"
    return reason + " (log in with `hf auth login`, or set HF_TOKEN)" * (status_of(error) == 401)
