"""Caption files of other trainers, each in the layout that its own pages describe."""

from __future__ import annotations

import base64
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from tests.data.encoding import encode_folder
from vsa.data.captions import Captions, read_captions
from vsa.data.captions_page import write_captions_page
from vsa.data.check import check_dataset
from vsa.data.codecs import HaarCodec
from vsa.data.media_folder import media_files
from vsa.data.shards import LatentReader
from vsa.data.text import HashedNgramEncoder
from vsa.data.toy_videos import render_clip
from vsa.data.video_files import write_video

DOG, CAT = 'a dog, "Rex", runs', "a cat sits\nand looks"


def folder_of(root: Path, files: dict[str, str | bytes]) -> Path:
    """A folder of clips, which are never opened, and texts; a name alone is that of a clip."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def read(root: Path, caption_file: Path | None = None, **options) -> tuple[Captions, dict[str, list[str]]]:
    media = media_files(root, caption_file)
    captions = read_captions(root, caption_file, media.files, **options)
    assert not media.unread
    return captions, {path.relative_to(root).as_posix(): found for path, found in captions.of.items()}


def lines(*entries: dict) -> str:
    return "\n".join(json.dumps(entry) for entry in entries) + "\n"


LAYOUTS = {
    # examples/cogvideo/README.md: two lists, paths below --instance_data_root
    "diffusers, two files": {
        "videos/00000.mp4": "",
        "videos/00001.mp4": "",
        "videos.txt": "videos/00000.mp4\r\nvideos/00001.mp4\r\n",
        "prompts.txt": 'a dog, "Rex", runs\r\na cat sits and looks\r\n\r\n',
    },
    # the same page: --dataset_file with the columns of --video_column and --caption_column
    "diffusers, table": {
        "00000.mp4": "",
        "00001.mp4": "",
        "metadata.csv": b"\xef\xbb\xbf"
        + b'video,text\r\n00000.mp4,"a dog, ""Rex"", runs"\r\n00001.mp4,"a cat sits\nand looks"\r\n',
    },
    # docs/dataset/README.md: prompt.txt is another name of the list
    "finetrainers, two files": {
        "videos/a.mp4": "",
        "videos/b.mp4": "",
        "videos.txt": "videos/a.mp4\nvideos/b.mp4\n",
        "captions.txt": 'a dog, "Rex", runs\na cat sits and looks\n',
    },
    # the same page: a folder of the datasets library
    "finetrainers, folder": {
        "a.mp4": "",
        "b.mp4": "",
        "metadata.jsonl": lines({"file_name": "a.mp4", "caption": DOG}, {"file_name": "b.mp4", "caption": CAT}),
    },
    "finetrainers, pairs": {"a.mp4": "", "b.mp4": "", "a.txt": DOG, "b.txt": CAT},
    # docs/dataset_config.md: paths of the machine on which it was written
    "musubi-tuner, metadata": {
        "clips/a.mp4": "",
        "clips/b.mp4": "",
        "metadata.jsonl": lines(
            {"video_path": "D:\\films\\clips\\a.mp4", "caption": DOG},
            {"video_path": "/home/me/films/clips/b.mp4", "caption": CAT, "control_path": "/home/me/c.mp4"},
        ),
    },
    "musubi-tuner, other extension": {"a.mp4": "", "b.mp4": "", "a.caption": DOG, "b.caption": CAT},
    # utils/dataset.py: captions.json of lists by file name
    "diffusion-pipe": {"a.mp4": "", "b.mp4": "", "captions.json": json.dumps({"a.mp4": [DOG], "b.mp4": [CAT]})},
    # examples/wanvideo: --dataset_base_path and --dataset_metadata_path
    "DiffSynth-Studio, table": {
        "video1.mp4": "",
        "video2.mp4": "",
        "metadata.csv": 'video,prompt,input_image\nvideo1.mp4,"a dog, ""Rex"", runs",\n'
        'video2.mp4,"a cat sits\nand looks",\n',
    },
    "DiffSynth-Studio, list": {
        "train/a.jpg": "",
        "train/b.mp4": "",
        "metadata.json": json.dumps([{"image": "train/a.jpg", "prompt": DOG}, {"video": "train/b.mp4", "prompt": CAT}]),
    },
    # scripts/dataset_preparation: videos in a folder of their own
    "FastVideo": {
        "videos/a.mp4": "",
        "videos/b.mp4": "",
        "videos2caption.json": json.dumps([{"path": "a.mp4", "cap": [DOG]}, {"path": "b.mp4", "cap": [CAT]}]),
    },
    # docs/datasets/video_dataset: a folder for each split
    "datasets, video folder": {
        "test/a.mp4": "",
        "train/a.mp4": "",
        "test/metadata.jsonl": lines({"file_name": "a.mp4", "text": DOG}),
        "train/metadata.jsonl": lines({"file_name": "a.mp4", "text": CAT}),
    },
    "SimpleTuner, table": {
        "a.mp4": "",
        "b.mp4": "",
        "captions.csv": f'filename,caption\na.mp4,"a dog, ""Rex"", runs"\nb.mp4,"{CAT}"\n',
    },
    "long_prompt": {
        "a.mp4": "",
        "b.mp4": "",
        "metadata.json": json.dumps({"a.mp4": {"long_prompt": DOG}, "b.mp4": {"long_prompt": CAT}}),
    },
    "json beside": {"a.mp4": "", "b.mp4": "", "a.json": json.dumps({"caption": DOG}), "b.json": json.dumps([CAT])},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_other_trainers(layout: str, tmp_path: Path) -> None:
    captions, found = read(folder_of(tmp_path / "v", LAYOUTS[layout]))
    assert list(found.values()) == [['a dog, "Rex", runs'], ["a cat sits and looks"]]
    assert (captions.missing, captions.unusable) == ({}, [])
    assert bool(captions.moved) == (layout == "musubi-tuner, metadata")


def test_several_captions_and_fields(tmp_path: Path) -> None:
    rows = "file_name,caption,film\r\na.mp4,one,x\r\na.mp4,two,x\r\n"
    files = {"v/a.mp4": "", "v/b.mp4": "", "v/b.json": '{"captions": ["three", " "], "film": "y", "score": 0.5}'}
    root = folder_of(tmp_path, {**files, "v/metadata.csv": rows})
    captions, found = read(root / "v")
    assert found == {"a.mp4": ["one", "two"], "b.mp4": ["three"]}
    assert captions.fields == {root / "v" / "a.mp4": {"film": "x"}, root / "v" / "b.mp4": {"film": "y"}}
    # a file that --captions names is told apart from the usual one, and lies elsewhere
    (root / "words").mkdir()
    (root / "words" / "own.csv").write_text("media_path;prompt\nv\\a.mp4;four\n", encoding="utf-16")
    found = read_captions(root / "v", root / "words" / "own.csv", [root / "v" / "a.mp4"])
    assert found.of == {root / "v" / "a.mp4": ["four"]}
    assert media_files(root / "v", root / "words" / "own.csv").unread == {".csv": ["metadata.csv"]}


@pytest.mark.parametrize("form", ["utf-8-sig", "utf-16"])
def test_metadata_of_something_else_is_not_read(form: str, tmp_path: Path) -> None:
    root = folder_of(tmp_path / "v", {"a.mp4": "", "a.txt": "one", "metadata.csv": "file_name,label\na.mp4,3\n"})
    assert read_captions(root, None, [root / "a.mp4"]).of == {root / "a.mp4": ["one"]}
    assert media_files(root).unread == {".csv": ["metadata.csv"]}
    (root / "metadata.csv").write_text("file_name,Caption\na.mp4,two\n", encoding=form)
    assert read_captions(root, None, [root / "a.mp4"]).of == {root / "a.mp4": ["two"]}
    assert not media_files(root).unread


def test_a_trigger_leads_every_caption_once(tmp_path: Path) -> None:
    root = folder_of(tmp_path, {"a.mp4": "", "a.txt": "a dog\n\nsks, a cat\n\nsksa\n\nsks"})
    captions, found = read(root, trigger="sks")
    assert found == {"a.mp4": ["sks a dog", "sks, a cat", "sks sksa", "sks"]}
    assert captions.fields == {root / "a.mp4": {"trigger": "sks"}}


VOID = ["nan", "NaN", "None", "null", "NULL", "N/A", "<NA>", "#N/A", "", "  ", "\u200b"]


@pytest.mark.parametrize("void", [*VOID, None, float("nan")])
def test_cells_without_a_caption_are_missing_and_counted(void: object, tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {"a.mp4": "", "b.mp4": "", "c.mp4": "", "b.txt": "beside", "captions.jsonl": ""}
    root = folder_of(tmp_path, files)
    entries = [{"video": "a.mp4", "caption": void}, {"video": "b.mp4", "captions": [void, void]}]
    entries.append({"video": "c.mp4", "captions": [void, "none of them moves"], "film": "x"})
    (root / "captions.jsonl").write_text(lines(*entries))
    captions, found = read(root)
    assert found == {"b.mp4": ["beside"], "c.mp4": ["none of them moves"]}
    assert captions.unusable == []
    assert captions.uncaptioned == [root / "a.mp4"]
    said = re.search(
        r"^video .*a\.mp4 has no caption( but '.*')?: expected one in .*captions\.jsonl and ",
        captions.missing[root / "a.mp4"],
    )
    word = void.strip() if isinstance(void, str) and void != "\u200b" else ""
    assert said
    assert said[1] == (f" but {word!r}" if word else None)
    assert f"cells and texts that are no caption: 4 {word or 'empty'}" in list(captions.lines())
    # in a table, a short row too; another column may have it
    (root / "captions.jsonl").unlink()
    (root / "captions.csv").write_text(
        f"video,caption,prompt\na.mp4,{'' if void is None else void},a dog\nb.mp4\nc.mp4,x,y\n"
    )
    captions, found = read(root)
    assert found == {"a.mp4": ["a dog"], "b.mp4": ["beside"], "c.mp4": ["x"]}


def test_texts_beside_without_a_caption_are_missing(tmp_path: Path) -> None:
    captions, found = read(folder_of(tmp_path, {"a.mp4": "", "a.txt": "nan\n", "b.mp4": "", "b.txt": "nan bread"}))
    assert found == {"b.mp4": ["nan bread"]}
    assert "has no caption but 'nan'" in captions.missing[tmp_path / "a.mp4"]


def test_what_is_worth_telling_of_captions(tmp_path: Path) -> None:
    rows = "video,caption\na.mp4,a dog\nb.mp4,a dog\na.mp4,a cat\n"
    captions, _ = read(folder_of(tmp_path, {"a.mp4": "", "b.mp4": "", "c.mp4": "", "captions.csv": rows}))
    assert list(captions.lines()) == [
        "without a caption: 1 files, first c.mp4",
        "with several entries, each of which gives captions: 1 files, first a.mp4",
        "the same text for several files: 1, first 'a dog'",
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("captions.parquet", b"PAR1", r"captions\.parquet \(tables end in \.jsonl, \.json, \.csv or \.txt\)"),
        (
            "metadata.jsonl",
            '{"file_name": "a.mp4", "label": 3}',
            r"metadata\.jsonl \(it begins with none of captions, caption, ",
        ),
        ("prompts.txt", "one", r"prompts\.txt \(prompts\.txt and videos\.txt belong together\)"),
        ("videos.txt", "a.mp4", r"videos\.txt \(prompts\.txt and videos\.txt belong together\)"),
        ("words.csv", "video,caption\na.mp4,x\n", r"words\.csv \(--captions names it\)"),
        ("dataset.toml", "[general]", r"dataset\.toml \(tables end in \.jsonl, \.json, \.csv or \.txt\)"),
    ],
)
def test_a_file_that_is_not_understood_is_named(name: str, content: str | bytes, reason: str, tmp_path: Path) -> None:
    root = folder_of(tmp_path, {"a.mp4": "", "b.mp4": "", "b.json": "3", "README.txt": "", name: content})
    captions = read_captions(root, None, [root / "a.mp4", root / "b.mp4"])
    assert re.search(
        rf"has no caption: expected one in .*a\.txt; not read: \S*{reason}",
        captions.missing[root / "a.mp4"],
    )
    assert "b.json" not in captions.missing[root / "a.mp4"]
    if name == "captions.parquet":
        with pytest.raises(ValueError, match=r"captions\.parquet must end in \.jsonl, \.json, \.csv or \.txt$"):
            read_captions(root, root / name, [])


def test_costs_are_linear_and_limits_are_stated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = folder_of(tmp_path, {"a.mp4": "", "a.txt": "word " * 20_000, "b.mp4": "", "b.txt": "word " * 20_001})
    captions, found = read(root)
    assert len(found["a.mp4"][0]) == 99_999
    assert captions.missing == {
        root / "b.mp4": f"a caption of video {root / 'b.mp4'} has 100,004 characters, expected at most 100,000"
    }
    assert not captions.uncaptioned
    # a name that cannot be one of a file is looked for a bounded number of times
    asked: list[str] = []
    monkeypatch.setattr("os.path.isfile", lambda path: asked.append(str(path)) or False)
    (root / "captions.jsonl").write_text(lines({"video": "/x" * 50_000, "caption": "x"}))
    assert len(read_captions(root, None, []).unusable) == 1
    assert len(asked) < 2000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"videos.txt": "a.mp4\nb.mp4", "prompts.txt": "one"}, r"videos\.txt has 2 names, prompts\.txt 1 captions"),
        ({"metadata.csv": "file_name,caption\ngone/c.mp4,x\n"}, r"metadata\.csv names a missing video: .*gone/c\.mp4"),
        ({"metadata.csv": "file_name,caption\nx/a.mp4,x\ny/a.mp4,y\n"}, r"has x/a\.mp4 and y/a\.mp4, either of"),
        ({"metadata.csv": "file_name,caption\nx/a.mp4,x\na.mp4,y\n"}, r"has x/a\.mp4 and a\.mp4, either of"),
        ({"metadata.jsonl": '{"file_name": "a.mp4", "caption": 3}'}, r"line 1: captions of a\.mp4 must be one string"),
        ({"metadata.jsonl": '{"file_name": "", "caption": "x"}'}, "line 1: expected"),
        ({"a.json": '{"title": "x"}'}, r"captions in .*a\.json must be one string or a list of strings"),
        ({"prompts.txt": "one"}, r"video .*a\.mp4 has no caption: expected one in .*a\.txt"),
    ],
)
def test_what_cannot_be_used_is_one_line(files: dict[str, str], message: str, tmp_path: Path) -> None:
    root = folder_of(tmp_path / "v", {"a.mp4": "", **files})
    try:
        captions = read_captions(root, None, [root / "a.mp4"])
        problems = [*captions.missing.values(), *(reason for _, reason in captions.unusable)]
    except ValueError as error:
        problems = [str(error)]
    assert re.search(message, problems[-1]), problems
    assert "\n" not in problems[-1]


def test_all_captions_of_a_clip_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_video(tmp_path / "v" / "a.mp4", render_clip(0, 0, size=(8, 32, 32))[0])
    (tmp_path / "v" / "a.txt").write_text("\n\n".join(f"caption {i}" for i in range(40)))
    encode_folder(tmp_path / "v", tmp_path / "s")
    reads: list[str] = []
    real = LatentReader._payload
    monkeypatch.setattr(LatentReader, "_payload", lambda self, key, span: reads.append(key) or real(self, key, span))
    write_captions_page(tmp_path / "s", HaarCodec())
    check_dataset(tmp_path / "s")
    # the null text twice, the texts twice, the latents twice and once for image inputs
    assert len(reads) < 10
    reader = LatentReader(tmp_path / "s")
    assert [text for text, _ in reader.texts("a")] == [f"caption {i}" for i in range(40)]
    for number, (text, states) in enumerate(reader.texts("a")):
        assert reader.text("a", number)[0] == text
        assert reader.text("a", number)[1].equal(states)


def test_the_page_has_every_caption_beside_its_clip(tmp_path: Path) -> None:
    for i, name in enumerate(("a", "b")):
        write_video(tmp_path / "v" / f"{name}.mp4", render_clip(0, i, size=(8, 32, 160))[0])
    (tmp_path / "v" / "a.txt").write_text("one <b>\n\ntwo two two")
    (tmp_path / "v" / "b.txt").write_text("three")
    encode_folder(tmp_path / "v", tmp_path / "s", trigger="sks", text_encoder=HashedNgramEncoder(max_tokens=3))
    page = write_captions_page(tmp_path / "s", HaarCodec()).read_text(encoding="utf-8")
    assert page.count("data:image/gif") == 2
    assert "a: sks one &lt;b&gt; / sks two two two" in page
    cells = re.findall(r"<td[^>]*>([^<]*)</td>", page.partition("<h2>Captions</h2>")[2])
    expected = [("sks one &lt;b&gt;", "3"), ("sks two two two", "3"), ("sks three", "2")]
    expected = [(name, f"{name}.mp4", *rest) for name, rest in zip("aab", expected, strict=True)]
    assert [tuple(cells[i : i + 4]) for i in range(0, len(cells), 4)] == expected
    assert "sks (2 clips)" in page
    gif = base64.b64decode(re.findall(r"data:image/gif;base64,([^\"]+)", page)[0])
    with Image.open(io.BytesIO(gif)) as picture:
        assert picture.size == (128, 25)
        # equal ones are one
        assert getattr(picture, "n_frames", 1) in range(2, 9)
