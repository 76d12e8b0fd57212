"""`state.json`: no changed byte, lost digest or impossible value passes, and every refusal is one line."""

import json
import math
import random

import pytest
import torch

from tests.states import rewrite_state
from vsa.checkpoints import state_file
from vsa.checkpoints.run_checkpoint import latest_checkpoint, read_checkpoint, write_checkpoint

STATE = {
    "seed": 3,
    "skipped_steps": 2,
    "skipped_in_row": 1,
    "flops_total": 1e9,
    "latent_mean": [0.5],
    "latent_std": [2],
}


@pytest.fixture
def pair(tmp_path):
    """An older checkpoint and a newer one."""
    config = {"optim": {"lr": 0.01}, "task": {"_target_": "vsa.training.optim.AdamW"}}
    tensors = {"model": {"w": torch.ones(3)}}
    return [write_checkpoint(tmp_path, tensors, {**STATE, "step": step, "config": config}) for step in (6, 12)]


def refusal(path):
    with pytest.raises(ValueError) as error:
        read_checkpoint(path)
    assert "\n" not in str(error.value)
    assert str(path) in str(error.value)
    return str(error.value)


def test_no_changed_or_missing_byte_passes(pair):
    older, newer = pair
    file = newer / "state.json"
    good = file.read_bytes()
    draw = random.Random(0)
    for place in range(len(good)):
        file.write_bytes(good[:place] + bytes([good[place] ^ 1 << draw.randrange(8)]) + good[place + 1 :])
        refusal(newer)
        file.write_bytes(good[:place])
        refusal(newer)
    messages = []
    assert latest_checkpoint(newer.parent, messages.append).path == older
    assert "step-00000012" in messages[0]
    # control
    file.write_bytes(good)
    assert latest_checkpoint(newer.parent).path == newer


def test_the_renamed_score_of_an_earlier_schema_has_its_new_name(tmp_path, monkeypatch):
    node = {"score": "subblock_lse", "score_thw": [2, 2, 2]}
    config = {"attention": node, "task": {"fake_score_attention": {**node, "score": "mean"}, "attentions": [node]}}
    found = []
    for schema in (state_file.SCHEMA, 2):
        monkeypatch.setattr(state_file, "SCHEMA", schema)
        path = write_checkpoint(tmp_path / str(schema), {"model": {"w": torch.ones(3)}}, {"step": 6, "config": config})
        found.append(read_checkpoint(path).state["config"])
    renamed = {**node, "score": "subblock_softmax"}
    assert found[0] == config
    assert found[1] == {"attention": renamed, "task": {**config["task"], "attentions": [renamed]}}


def test_a_digest_that_is_lost_or_of_something_else_is_damage(pair):
    newer = pair[1]
    state = json.loads((newer / "state.json").read_text())
    del state["digest"]
    (newer / "state.json").write_text(json.dumps(state, indent=1))
    assert refusal(newer) == f"checkpoint {newer} is damaged: state.json has lost its digest"
    rewrite_state(newer)
    text = (newer / "state.json").read_text()
    (newer / "state.json").write_text(text.replace('"schema": 4', '"schema": 2'))
    assert refusal(newer).endswith("state.json does not match its digest")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"step": 14}, "has step=14, expected 12 as in the folder's name"),
        ({"step": "12"}, "has step='12', expected an integer of at least 0"),
        ({"step": None}, "has step=None"),
        ({"files": {"../model.safetensors": "0" * 64}}, r"has files=\{"),
        ({"files": ["model.safetensors"]}, r"has files=\[.*, expected an object"),
        ({"files": {"model.safetensors": 1}}, r"has files\.model\.safetensors=1, expected"),
        ({"config": [1]}, r"has config=\[1\], expected an object"),
        ({"config": {"task": [1]}}, r"has config\.task=\[1\], expected an object"),
        ({"skipped_steps": 13}, "expected at most the 12 steps"),
        ({"skipped_in_row": 3}, "expected at most the 2 skipped steps"),
        ({"flops_total": float("nan")}, "has flops_total=nan"),
        *(
            ({"latent_std": [value]}, rf"has latent_std\[0\]={value}: expected a number from 1e-09 to 65504")
            for value in (0.0, -1.0, math.nan, math.inf)
        ),
        ({"latent_mean": "x"}, "has latent_mean='x': expected a list of numbers"),
        ({"latent_mean": [math.nan]}, r"has latent_mean\[0\]=nan"),
        ({"latent_std": [1, 1]}, "latent_mean and latent_std of other latents: 1 and 2 values for 1 channels"),
        ({"latent_std": None}, "has latent_std=None"),
        ({"latent_shapes": [[16, 2, 8, 8]]}, "of other latents: 1 and 1 values for 16 channels"),
        ({"latent_shapes": "x"}, "of other latents: 1 and 1 values for None channels"),
        ({"seed": True}, "has seed=True"),
        ({"without_gradient": {"optimizer": None}}, r"has without_gradient\.optimizer=None, expected a list"),
        ({"allowed_changes": {}}, "expected a list"),
    ],
)
def test_impossible_values_are_refused_under_a_digest_that_fits(pair, change, message):
    newer = pair[1]
    rewrite_state(newer, **change)
    with pytest.raises(ValueError, match=message):
        read_checkpoint(newer)
    assert latest_checkpoint(newer.parent, lambda line: None).step == 6


@pytest.mark.parametrize("missing", ["step", "files"])
def test_missing_values_are_named(pair, missing):
    rewrite_state(pair[1], missing)
    assert refusal(pair[1]).endswith(f"is damaged: state.json lacks {missing}")


@pytest.mark.parametrize(
    "content", ["[]", "null", '{"schema": [2]}', '{"schema": true}', "[" * 200_000, "1" * 5000, "\xff", "\0", ""]
)
def test_other_content_is_one_line(pair, content):
    (pair[1] / "state.json").write_bytes(content.encode("latin-1"))
    assert len(refusal(pair[1])) < 400
    assert latest_checkpoint(pair[1].parent, lambda line: None).step == 6


def test_a_folder_in_place_of_a_file_is_damage(pair):
    for name in ("model.safetensors", "state.json"):
        (pair[1] / name).unlink()
        (pair[1] / name).mkdir()
        assert f"{pair[1]} is damaged: " in refusal(pair[1])
        assert f"/{name} is a folder" in refusal(pair[1]) or f"{name} cannot be read" in refusal(pair[1])


def test_a_copy_may_have_any_name(pair):
    copy = pair[1].rename(pair[1].with_name("best"))
    assert read_checkpoint(copy).step == 12
