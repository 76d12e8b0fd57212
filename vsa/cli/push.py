"""Arguments of `vsa push`."""

from __future__ import annotations

from typing import Annotated

from typer import Argument

from vsa.cli.options import Group, option


def push(
    run: Annotated[str, Argument(help="run folder (newest checkpoint) or checkpoint folder")],
    repo: Annotated[str, Argument(help="OWNER/NAME on the Hugging Face hub, or a new folder (./NAME)")],
    license: Annotated[str, option("licence of the weights, an identifier of the hub: apache-2.0, ...")] = "unknown",
    private: Annotated[bool, option("the repository is private, a new one is made so", "--private")] = False,
    replace: Annotated[bool, option("also change files of the repository that no push wrote", "--replace")] = False,
    dry_run: Annotated[bool, option("print files and model card, publish nothing", "--dry-run")] = False,
    weights: Annotated[Group | None, option("averaged (if any) or trained weights")] = None,
    pretrained: Annotated[
        str | None, option("hub id that replaces a local folder of codec and text encoder", metavar="OWNER/NAME")
    ] = None,
) -> None:
    """Publish a run on the Hugging Face hub, or to a folder: weights, sampling settings and a model card.

    The card has loss curves, sampled clips with their captions, the attention and a summary of the data, but no clip
    of the data and no path. The hub's own login is used (`hf auth login`), and everything is one commit. Another push
    to the same place changes only what the one before wrote there.

    \b
    vsa push outputs/own_videos/default ./my-model --license apache-2.0
    vsa push outputs/own_videos/default OWNER/my-model --license apache-2.0 --private
    """
    from vsa.reports.push import push as publish

    publish(
        run,
        repo,
        weights=weights,
        license=license,
        private=private,
        replace=replace,
        pretrained=pretrained,
        dry_run=dry_run,
    )
