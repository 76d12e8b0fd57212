"""`vsa push`: the weights of a run with its model card, to a repository of the Hugging Face hub or to a folder."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from vsa.checkpoints.published import weights_to_publish, write_published
from vsa.checkpoints.run_checkpoint import resolve_checkpoint
from vsa.checkpoints.run_weights import Group
from vsa.checkpoints.weight_files import HUB_ID, refuse_existing
from vsa.checkpoints.weight_source import is_run
from vsa.files import atomic_folder
from vsa.reports.model_card import CARD, write_card
from vsa.secrets import without_secrets

UNKNOWN = "unknown"
_LICENSE = re.compile(r"[a-z0-9][a-z0-9.+-]*")
# what an earlier push wrote; other files of a repository stay
_OWN = re.compile(
    r"card/.*|checkpoints/.*|diffusion_pytorch_model.*|(config|sparse_attention|sampling|run)\.json|golden\..*"
)


def push(
    run: str,
    repo: str,
    *,
    weights: Group | None = None,
    license: str = UNKNOWN,
    private: bool = False,
    pretrained: str | None = None,
    dry_run: bool = False,
    tell: Callable[[str], None] = print,
) -> None:
    """Publish a run: weights, sampling settings and a model card, in one commit.

    Args:
        run: run folder (newest checkpoint) or checkpoint folder.
        repo: OWNER/NAME on the hub, or a folder that does not exist yet: a path with another number of slashes, or
            one whose parent folder exists here.
        weights: averaged or trained weights; None: averaged ones if there are any.
        license: licence of the weights, an identifier of the hub.
        private: whether a new repository is private.
        pretrained: hub id that replaces a local folder of codec and text encoder.
        dry_run: whether files and model card are only printed.
        tell: function called with lines for the user.

    Raises:
        ValueError: no run, no weights, a folder with other content, a wrong licence, settings of this machine, or no
            client, login or connection for the hub.
    """
    if not _LICENSE.fullmatch(license):
        raise ValueError(f"--license {license}: expected an identifier of the hub, such as apache-2.0 or cc-by-4.0")
    on_hub = bool(HUB_ID.fullmatch(repo)) and not Path(repo).exists() and not Path(repo).parent.exists()
    if private and not on_hub:
        raise ValueError(f"--private applies to repositories of the hub (OWNER/NAME), got the folder {repo}")
    if not on_hub:
        refuse_existing(Path(repo).resolve())
    if not is_run(run):
        raise ValueError(f"{run} is not a run: expected a run folder with checkpoints, or a checkpoint folder")
    source = weights_to_publish(resolve_checkpoint(run), weights, pretrained)
    api = _client(repo) if on_hub and not dry_run else None

    def build(folder: Path) -> None:
        layout = write_published(source, folder)
        write_card(folder, source, name=repo if on_hub else Path(repo).resolve().name, license=license, layout=layout)
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        for path in files if dry_run else ():
            tell(f"{path.stat().st_size:12,} bytes  {path.relative_to(folder)}")
        if dry_run:
            tell((folder / CARD).read_text(encoding="utf-8"))
        if license == UNKNOWN:
            tell("no --license was given: the model card says unknown")

    if on_hub or dry_run:
        with TemporaryDirectory(prefix="vsa-push-") as folder:
            build(Path(folder))
            if api is not None:
                tell(_upload(api, Path(folder), repo, private=private))
    else:
        with atomic_folder(Path(repo).resolve()) as folder:
            build(folder)
        tell(f"{source} in {repo}, with the model card {CARD}; vsa sample and init_from= take it")


def _client(repo: str):
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise ValueError(f"{repo} is on the hub: pip install 'vsa-train[hub]', or name a folder (./{repo})") from None
    return HfApi()


@contextmanager
def _one_line(repo: str) -> Iterator[None]:
    try:
        yield
    # the client has many kinds of errors, with messages of many lines
    except Exception as error:
        reason = without_secrets(" ".join(str(error).split())[:300])
        raise ValueError(f"cannot push to {repo}, nothing was published: {type(error).__name__} {reason}") from None


def _upload(api, folder: Path, repo: str, *, private: bool) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    with _one_line(repo):
        api.create_repo(repo, private=private or None, exist_ok=True)
        new = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        stale = [name for name in api.list_repo_files(repo) if _OWN.fullmatch(name) and name not in new]
        add = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in new.items()]
        delete = [CommitOperationDelete(path_in_repo=name) for name in stale]
        # `upload_folder` may make several commits
        commit = api.create_commit(repo, [*delete, *add], commit_message="Publish a run of VSA-Train")
    return f"published: {commit.commit_url}"
