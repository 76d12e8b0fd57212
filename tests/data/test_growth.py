"""Data sets that grow: what is added, what stays, and that earlier revisions are read as they were."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest

from tests.data.conftest import write_dataset
from tests.data.encoding import encode_folder
from tests.data.test_datamodule import assert_equal, attach, batches, module
from tests.forged_samples import abouts, edit_index
from vsa.data.check import check_dataset
from vsa.data.codecs import HaarCodec
from vsa.data.index import INDEX_NAME, DatasetIndex
from vsa.data.plan_datamodule import PlanDataModule
from vsa.data.resumable_writer import OutputOptions, PartContent, join_parts, write_parts
from vsa.data.revisions import continued, open_local_index
from vsa.data.stream_datamodule import StreamDataModule
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import ToyClips, write_toy_videos


def grow(root: Path, prefix: str, *, videos: int = 7, images: int = 5) -> None:
    """Add random latents to a set, as encoding adds them."""
    write_dataset(root / "parts" / "00000", videos=videos, images=images, prefix=prefix)
    join_parts(root, add=True)


@pytest.fixture
def grown(tmp_path: Path) -> tuple[Path, Path]:
    """A set of two revisions, and what it was before."""
    before = write_dataset(tmp_path / "before")
    root = Path(shutil.copytree(before, tmp_path / "shards"))
    grow(root, "more-")
    return root, before


def test_a_newer_revision_holds_the_earlier_one_unchanged(grown, capsys):
    root, before = grown
    grow(root, "third-", images=0)
    old, newest = DatasetIndex.load(before / INDEX_NAME), DatasetIndex.load(root / INDEX_NAME)
    assert (root / "index-1.json").read_bytes() == (before / INDEX_NAME).read_bytes()
    for path in before.glob("*.tar"):
        assert (root / path.name).read_bytes() == path.read_bytes()
    assert newest.revision == 3
    assert len(newest.samples) == 32 + 12 + 7
    assert list(newest.samples)[:32] == list(old.samples)
    assert newest.null_text == old.null_text
    assert newest.previous == hashlib.sha256((root / "index-2.json").read_bytes()).hexdigest()
    for revision, count in ((1, 32), (2, 44), (3, 51), (None, 51)):
        index, last = open_local_index(root, revision)
        assert (len(index.samples), len(last.samples)) == (count, 51)
    assert newest.latent_mean != old.latent_mean
    # statistics, digests and every sample of the whole
    check_dataset(root)
    out = capsys.readouterr().out
    assert "51 samples" in out
    assert "revision 3 of the data set" in out
    # a set that has not grown is written as before
    assert '"revision"' not in (before / INDEX_NAME).read_text()


def test_what_is_wrong_with_revisions_is_told(grown):
    root, _ = grown
    with pytest.raises(ValueError, match=r"data\.revision=3: .*shards has only revisions 1 to 2$"):
        open_local_index(root, 3)
    other = write_dataset(root.parent / "other", videos=3)
    with pytest.raises(ValueError, match=r"data\.revision=2: .*other has only revision 1$"):
        open_local_index(other, 2)
    shutil.copy(other / INDEX_NAME, root / "index-1.json")
    assert open_local_index(root, 2)[0].revision == 2
    for read in (lambda: open_local_index(root, 1), lambda: check_dataset(root)):
        with pytest.raises(ValueError, match=r"index-1\.json is not the revision that revision 2 of the data set grew"):
            read()
    (root / "index-1.json").unlink()
    with pytest.raises(ValueError, match=r"no index-1\.json in .*shards"):
        open_local_index(root, 1)
    write_dataset(root / "parts" / "00000", videos=2, prefix="more-")
    with pytest.raises(ValueError, match="would hold 6 samples twice, first more-video-000"):
        join_parts(root, add=True)


def test_a_revision_gives_the_batches_of_the_set_that_it_was(grown):
    root, before = grown
    options = {"batch_size": 3, "val_fraction": 0.2, "caption_dropout": 0.3}
    expected = attach(module(before, **options), steps=12)
    actual = attach(module(root, revision=1, **options), steps=12)
    assert_equal(batches(actual), batches(expected))
    assert actual.plan_hash == expected.plan_hash
    assert actual.held_out == expected.held_out
    assert actual.latent_mean.equal(expected.latent_mean)
    assert actual.state_dict() == expected.state_dict()
    # control: the newest revision is another set
    newest = attach(module(root, **options), steps=12)
    assert newest.plan_hash != expected.plan_hash
    assert newest.state_dict()["revision"] == {"main": [[0, 2]]}
    assert not newest.latent_mean.equal(expected.latent_mean)


def test_phases_go_on_with_more_samples(grown):
    root, before = grown
    options = {"batch_size": 3, "val_fraction": 0.2}
    old = attach(module(before, **options), steps=30)
    both = attach(module(root, revision=[[0, 1], [7, 2]], **options), steps=30)
    assert_equal(batches(both)[:7], batches(old)[:7])
    held = {ref.id for refs in old.held_out.values() for ref in refs}
    assert held
    assert both.held_out == old.held_out
    assert both.latent_std.equal(old.latent_std)
    late = {name for batch in batches(both)[7:] for name in batch.sample_ids}
    newest = DatasetIndex.load(root / INDEX_NAME).samples
    trained = {i for buckets in both.plan.later[0][1].values() for ids in buckets.buckets.values() for i in ids}
    old_trained = {i for source in old.plan.sources.values() for ids in source.buckets.values() for i in ids}
    assert {i for i in trained if not i.startswith("more-")} == old_trained
    assert late <= trained
    # an epoch of the phase begins at its first step, and draws what was added
    assert any(name.startswith("more-") for name in late)
    assert len(late) > 0.8 * len(trained)
    assert both.buckets.keys() == {sample.latent_shape for sample in newest.values()}
    assert both.state_dict()["revision"] == {"main": [[0, 1], [7, 2]]}
    assert both.plan_hash.startswith(f"{old.plan_hash},7:")


def test_a_drop_list_of_the_newest_revision_fits_the_earlier_ones(grown, tmp_path):
    root, before = grown
    drop = tmp_path / "drop.txt"
    drop.write_text("video-003\nmore-video-001\n")
    both = module(root, drop=str(drop), revision=[[0, 1], [7, 2]])
    both.setup()
    names = {i for source in both.plan.later[0][1].values() for ids in source.buckets.values() for i in ids}
    assert "more-video-002" in names
    assert not names & {"video-003", "more-video-001"}
    drop.write_text("video-003\n")
    alone = module(before, drop=str(drop))
    alone.setup()
    assert both.plan_hash.partition(",")[0] == alone.plan_hash


def test_sources_have_revisions_of_their_own(grown):
    root, before = grown
    sources = {"a": {"root": str(root)}, "b": {"root": str(before), "weight": 2}}
    same = {"a": {"root": str(before)}, "b": {"root": str(before), "weight": 2}}
    kept, expected = module(sources=sources, revision={"a": 1}), module(sources=same)
    for data in (kept, expected):
        data.setup()
    assert kept.plan_hash == expected.plan_hash
    phases = module(sources=sources, revision={"a": [[0, 1], [4, 2]]})
    phases.setup()
    assert phases.state_dict()["revision"] == {"a": [[0, 1], [4, 2]], "b": [[0, 1]]}


@pytest.mark.parametrize(
    ("revision", "message"),
    [
        ([[1, 1], [5, 2]], r"revision=\[\[1,1\],\[5,2\]\]: expected pairs of first step and revision, both ascending"),
        ([[0, 2], [5, 1]], "both ascending"),
        ([], "both ascending"),
        ([[0, 1], [0, 2]], "both ascending"),
        (0, "revision=0: expected an integer of at least 1"),
        ({"films": 1}, r"revision: \['films'\] are none of the sources \['main'\]"),
    ],
)
def test_wrong_phases_are_refused(revision, message, dataset):
    with pytest.raises(ValueError, match=message):
        module(dataset, revision=revision)


def test_a_new_phase_begins_at_the_step_of_the_checkpoint_or_later():
    recorded = [[0, 1], [5, 2]]
    assert continued([(0, None)], recorded, 9, "SHARDS") == [(0, 1), (5, 2)]
    # what is not begun yet may change
    for phases in ([(0, 1), (5, 2), (9, 3)], [(0, 1), (5, 2)]):
        assert continued(phases, recorded, 9, "SHARDS") == phases
    assert continued([(0, 1), (6, 2)], recorded, 5, "SHARDS") == [(0, 1), (6, 2)]
    for phases in ([(0, 2)], [(0, 1)], [(0, 1), (6, 2)], [(0, 1), (5, 2), (8, 3)]):
        with pytest.raises(ValueError) as refusal:
            continued(phases, recorded, 9, "SHARDS")
        asked = json.dumps(phases, separators=(",", ":"))
        assert str(refusal.value) == (
            f"data.revision={asked}: up to step 9 the run has used [[0,1],[5,2]] of SHARDS; a new phase begins at "
            "step 9 or later, data.revision=[[0,1],[5,2],[9,3]]"
        )


def test_a_stream_keeps_its_revision(grown):
    root, before = grown

    def resumed(folder: Path, revision: int = 1) -> PlanDataModule:
        urls = f"{folder}/latents-C16x2x2x4-{{00000..00001}}.tar"
        encoders = {"codec": HaarCodec(), "text_encoder": HashedNgramEncoder(dim=8, max_tokens=5)}
        data = StreamDataModule(urls=urls, batch_size=3, shuffle_buffer=4, **encoders)
        data.keep({"revision": revision})
        data.setup()
        data.load_state_dict({**data.state_dict(), "step": 4, "stream": {"epoch": 1, "shards": 1}})
        return attach(data, steps=9)

    old, kept, newest = resumed(before), resumed(root), resumed(root, revision=2)
    assert len(batches(old)) == 5
    assert_equal(batches(kept), batches(old))
    assert kept.latent_mean.equal(old.latent_mean)
    assert kept.state_dict() == old.state_dict()
    # control: the grown set normalises otherwise
    assert not newest.latent_mean.equal(old.latent_mean)
    assert newest.state_dict()["revision"] == 2
    newest.revision = 1
    with pytest.raises(ValueError, match=r"data\.revision=1: the run began with revision 2 of .*shards"):
        newest.keep({"revision": 2})


def test_encoding_adds_the_files_that_a_set_lacks(tmp_path):
    root, told = write_dataset(tmp_path / "shards", videos=2, images=0), list[str]()
    made = tmp_path / "made"
    write_toy_videos(ToyClips(count=1, size=(8, 32, 32)), made)
    for name in ("0.mp4", "deep/0.mp4"):
        path = tmp_path / "videos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(next(made.glob("*.mp4")), path)
        path.with_suffix(".txt").write_text("a caption")
    encoders = {"text_encoder": HashedNgramEncoder(dim=8, max_tokens=5)}
    with pytest.raises(ValueError, match=r"already holds a data set: .* --overwrite, or add to it with --add"):
        encode_folder(tmp_path / "videos", root, **encoders)
    with pytest.raises(ValueError, match=r"^.*/none holds no data set to add to: encode it without --add$"):
        encode_folder(tmp_path / "videos", tmp_path / "none", add=True, **encoders)
    assert not (tmp_path / "none").exists()
    encode_folder(tmp_path / "videos", root, add=True, tell=told.append, **encoders)
    index = DatasetIndex.load(root / INDEX_NAME)
    # a file of the same name in a folder is another one
    assert [sample.about.source for sample in index.samples.values()] == ["0.mp4", "1.mp4", "deep/0.mp4"]
    assert list(index.samples)[2].startswith("deep_0-")
    assert index.revision == 2
    assert "in the data set already, by their names: 1 files" in told
    with pytest.raises(ValueError, match=r"nothing to add: all 2 files in .*videos are in the data set already"):
        encode_folder(tmp_path / "videos", root, add=True, **encoders)


@pytest.mark.parametrize("moves", [1, 3])
def test_an_interrupted_addition_goes_on(moves, tmp_path, monkeypatch):
    """Interrupted after so many shards have moved, the last time after the index was written."""

    def add(root: Path, *, name: str = "new") -> DatasetIndex:
        def write(part: Path, span: range, advance: object) -> PartContent:
            write_dataset(part, videos=2, images=1, prefix=f"{name}-{span.start}-")
            return PartContent()

        revision = DatasetIndex.load(root / INDEX_NAME).revision + 1
        output, settings = OutputOptions(samples_per_shard=3, add=True), {"videos": name, "revision": revision}
        write_parts(root, write, count=6, settings=settings, output=output, title="encoding")
        return join_parts(root, add=True)

    start = write_dataset(tmp_path / "start", videos=4, images=2)
    straight, root = (Path(shutil.copytree(start, tmp_path / name)) for name in ("straight", "root"))
    add(straight)
    left, replace, remove = [moves], os.replace, shutil.rmtree

    def replace_some(source: Path, target: Path) -> None:
        if Path(source).match("parts/*/[lt]*.tar") and moves < 3:
            if left[0] == 0:
                raise KeyboardInterrupt
            left[0] -= 1
        replace(source, target)

    def keep_parts(path: Path, **options: bool) -> None:
        if str(path).endswith("parts"):
            raise KeyboardInterrupt
        remove(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", replace_some)
        patch.setattr("shutil.rmtree", keep_parts)
        with pytest.raises(KeyboardInterrupt):
            add(root)
    assert (root / "parts").is_dir()
    if moves < 3:
        # until the index is replaced, the set is what it was
        assert (root / INDEX_NAME).read_bytes() == (start / INDEX_NAME).read_bytes()
        check_dataset(root)
        add(root)
        assert not (root / "parts").exists()
    for path in straight.iterdir():
        assert path.read_bytes() == (root / path.name).read_bytes(), path.name
    # what the interruption left is no part of what comes next
    third = add(root, name="third")
    assert (third.revision, len(third.samples)) == (3, 6 + 6 + 6)
    assert not (root / "parts").exists()
    check_dataset(root)
    # all of it is replaced together
    write_dataset(root / "parts" / "00000", videos=1, images=0)
    join_parts(root)
    assert not list(root.glob("index-*.json"))
    assert len(list(root.glob("*.tar"))) == 2


def test_other_settings_are_refused_with_both_values(tmp_path):
    root = write_dataset(tmp_path / "shards", videos=1, images=0)
    files = {path: path.read_bytes() for path in root.iterdir()}
    own = {"text_encoder": HashedNgramEncoder(dim=8, max_tokens=5)}
    for options, message in (
        ({"codec": HaarCodec(24)}, "shards has codec haar-4x8x8-c16 .*, got haar-4x8x8-c24"),
        ({"text_encoder": HashedNgramEncoder(32)}, "has text encoder hashed-ngrams-8x5 .*, got hashed-ngrams-32"),
        ({"fps": 12.0}, "shards has clips of 8 frames/s, got --fps 12"),
        ({"overwrite": True}, "--overwrite replaces a data set and --add keeps it"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_folder(tmp_path / "videos", root, add=True, **{**own, **options})
    assert {path: path.read_bytes() for path in root.iterdir()} == files
    edit_index(root, lambda index: [about.pop("source", None) for about in abouts(index)])
    with pytest.raises(ValueError, match="does not say which files it was encoded from"):
        encode_folder(tmp_path / "videos", root, add=True, **own)
