"""`vsa push`: the weights of a run with its model card, to a repository of the Hugging Face hub or to a folder."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from vsa.checkpoints.published import weights_to_publish, write_published
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.run_folder import refuse_inside_run
from vsa.checkpoints.run_weights import Group
from vsa.checkpoints.weight_files import refuse_existing
from vsa.checkpoints.weight_source import is_run
from vsa.data.pretrained import HUB_ID
from vsa.files import atomic_folder
from vsa.reports.hub import files_in, hub_client, publish, write_record
from vsa.reports.model_card import CARD, write_card

UNKNOWN = "unknown"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")


def push(
    run: str,
    repo: str,
    *,
    weights: Group | None = None,
    license: str = UNKNOWN,
    private: bool = False,
    replace: bool = False,
    pretrained: str | None = None,
    dry_run: bool = False,
    tell: Callable[[str], None] = print,
) -> None:
    """Publish a run: weights, sampling settings and a model card, in one commit.

    Args:
        run: run folder (newest checkpoint) or checkpoint folder.
        repo: OWNER/NAME on the hub, or a folder that does not exist yet, see `_folder_named`.
        weights: averaged or trained weights; None: averaged ones if there are any.
        license: licence of the weights, an identifier of the hub.
        private: whether the repository is private.
        replace: whether files of the repository change that no push wrote, see `changes`.
        pretrained: hub id that replaces a local folder of codec and text encoder.
        dry_run: whether files and model card are only printed.
        tell: function called with lines for the user.

    Raises:
        ValueError: no run, no weights, a folder with other content, a wrong licence, settings of this machine, or
            see `vsa.reports.hub.publish`.
    """
    if not _LICENSE.fullmatch(license):
        raise ValueError(f"--license {license}: expected an identifier of the hub, such as apache-2.0 or cc-by-4.0")
    place = _folder_named(repo)
    if private and place is not None:
        raise ValueError(f"--private applies to repositories of the hub (OWNER/NAME), got the folder {repo}")
    if place is not None:
        refuse_existing(place)
        refuse_inside_run(place, repo)
    if not is_run(run):
        raise ValueError(f"{run} is not a run: expected a run folder with checkpoints, or a checkpoint folder")
    source = weights_to_publish(resolve_checkpoint(run), weights, pretrained)
    api = hub_client(repo) if place is None else None

    passing = TemporaryDirectory(prefix="vsa-push-")
    with passing if place is None or dry_run else atomic_folder(place) as temporary:
        folder = Path(temporary)
        layout = write_published(source, folder)
        write_card(folder, source, name=repo if place is None else place.name, license=license, layout=layout)
        write_record(folder)
        new = files_in(folder)
        for name in new if dry_run else ():
            tell(f"{(folder / name).stat().st_size:12,} bytes  {name}")
        if dry_run:
            tell((folder / CARD).read_text(encoding="utf-8"))
        if license == UNKNOWN:
            tell("no --license was given: the model card says unknown")
        if dry_run:
            return
        if place is None:
            tell(f"published: {publish(api, folder, new, repo, private=private, replace=replace, tell=tell)}")
            return
    tell(f"{source} in {repo}, with the model card {CARD}; vsa sample and init_from= take it")


def _folder_named(repo: str) -> Path | None:
    """The folder that a target names, None for a repository of the hub.

    Raises:
        ValueError: it is no OWNER/NAME, and a folder would only come of it by mistake: a web address, a place on
            another machine, a path below folders that are not there and without `./`.
    """
    path = Path(repo)
    if repo.startswith(("/", "./", "../")) or path.exists() or (path.parent.exists() and not {*":\\"} & {*repo}):
        return path.resolve()
    if HUB_ID.fullmatch(repo):
        return None
    raise ValueError(f"{repo} is no OWNER/NAME of the hub: expected that, or a folder with its place (./NAME)")
