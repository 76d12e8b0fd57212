"""Checkpoint folders: exact round trips, damage found, nothing half-written."""

import json
import os

import pytest
import torch
from torch import nn

from tests.disks import small_files
from tests.states import files_of
from vsa.checkpoints import run_checkpoint as ck
from vsa.checkpoints.tensor_state import load_model_tensors, load_optimizer_tensors, optimizer_state, without_state
from vsa.checkpoints.weight_source import open_weights
from vsa.files import DiskFullError
from vsa.training.optimizer import AdamW, Constant


def _write(folder, step=1, value=1.0):
    tensors = {"model": {"w": torch.full((64, 3), value)}, "optimizer": {"w/exp_avg": torch.ones(5)}}
    return ck.write_checkpoint(folder, tensors, {"step": step})


def test_round_trip_is_bit_exact(tmp_path):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    path = ck.write_checkpoint(tmp_path, {"model": {"a.b": values, "c": torch.tensor(3)}}, {"step": 7, "x": [1]})
    checkpoint = ck.read_checkpoint(path)
    assert path.name == "step-00000007"
    assert checkpoint.step == 7
    assert checkpoint.state["x"] == [1]
    assert torch.equal(checkpoint.tensors("model")["a.b"], values)
    assert checkpoint.tensors("model")["c"].shape == ()
    assert checkpoint.has("model")
    assert not checkpoint.has("ema")


def test_every_bit_flip_and_cut_is_found(tmp_path):
    path = _write(tmp_path)
    generator = torch.Generator().manual_seed(0)
    for name in ("model.safetensors", "optimizer.safetensors"):
        good = (path / name).read_bytes()
        for _ in range(30):
            data = bytearray(good)
            data[int(torch.randint(len(good), (), generator=generator))] ^= 1 << int(
                torch.randint(8, (), generator=generator)
            )
            (path / name).write_bytes(data)
            with pytest.raises(ValueError, match=name):
                ck.read_checkpoint(path)
        (path / name).write_bytes(good[:-1])
        with pytest.raises(ValueError, match=name):
            ck.read_checkpoint(path)
        (path / name).write_bytes(good)
    ck.read_checkpoint(path)


def test_a_sparse_file_of_terabytes_is_not_read(tmp_path):
    path = _write(tmp_path)
    os.truncate(path / "model.safetensors", 1 << 42)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read"):
        ck.read_checkpoint(path)


def test_a_look_without_digests_finds_missing_and_short_files(tmp_path, monkeypatch):
    first, second = _write(tmp_path, 1), _write(tmp_path, 2)
    whole = (second / "model.safetensors").read_bytes()
    # only digests find a flipped bit
    (second / "model.safetensors").write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert ck.resolve_checkpoint(second, verify=False).step == 2
    with pytest.raises(ValueError, match=r"step-00000002 is damaged: model\.safetensors does not match its digest"):
        ck.resolve_checkpoint(second)
    monkeypatch.setattr(ck, "file_digest", lambda path: pytest.fail(f"{path} was read"))
    for cut in (whole[:-1], b"x", b""):
        (second / "model.safetensors").write_bytes(cut)
        with pytest.raises(ValueError, match=r"step-00000002 is damaged: model\.safetensors cannot be read"):
            ck.read_checkpoint(second, verify=False)
    (second / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"step-00000002 is damaged: model\.safetensors is missing"):
        ck.read_checkpoint(second, verify=False)
    assert ck.latest_checkpoint(tmp_path, lambda line: None, verify=False).path == first


def test_latest_skips_damaged_ones_and_names_both(tmp_path):
    _write(tmp_path, 1)
    second = _write(tmp_path, 2)
    (second / "model.safetensors").write_bytes(b"x")
    messages = []
    assert ck.latest_checkpoint(tmp_path, messages.append).step == 1
    assert len(messages) == 1
    assert "step-00000002" in messages[0]
    (tmp_path / "step-00000001" / "state.json").unlink()
    with pytest.raises(ValueError, match="no valid checkpoint"):
        ck.latest_checkpoint(tmp_path, messages.append)


def test_failed_save_leaves_the_previous_one_and_no_final_name(tmp_path, monkeypatch):
    _write(tmp_path, 1)

    def disk_full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(ck, "save_file", disk_full)
        with pytest.raises(OSError, match="No space"):
            _write(tmp_path, 2)
    assert [p.name for p in ck.list_checkpoints(tmp_path)] == ["step-00000001"]
    assert ck.latest_checkpoint(tmp_path).step == 1
    # the next save sweeps the litter
    _write(tmp_path, 3)
    assert sorted(os.listdir(tmp_path)) == ["step-00000001", "step-00000003"]


def test_a_full_disk_is_told_with_sizes_and_leaves_no_litter(tmp_path):
    _write(tmp_path, 1)
    # two files of which the second does not fit: 4 kB of weights, 40 kB of moments
    tensors = {"model": {"w": torch.zeros(1000)}, "optimizer": {"w/exp_avg": torch.zeros(10_000)}}
    with pytest.raises(DiskFullError) as failure, small_files(20_000):
        ck.write_checkpoint(tmp_path, tensors, {"step": 2})
    message = str(failure.value)
    assert message.startswith(f"cannot write {tmp_path}/step-00000002: File too large (44 kB needed, ")
    kilobytes = float(message.partition(" kB needed, ")[2].partition(" kB written")[0])
    assert 20 <= kilobytes < 44
    assert os.listdir(tmp_path) == ["step-00000001"]
    assert ck.latest_checkpoint(tmp_path).step == 1


def test_saving_a_step_again_replaces_it(tmp_path):
    _write(tmp_path, 1, 1.0)
    path = _write(tmp_path, 1, 2.0)
    assert ck.read_checkpoint(path).tensors("model")["w"][0, 0] == 2.0


def test_resolve_takes_last_run_folder_or_checkpoint(tmp_path):
    path = _write(tmp_path / "checkpoints", 5)
    assert ck.resolve_checkpoint("last", tmp_path).step == 5
    assert ck.resolve_checkpoint(tmp_path).step == 5
    assert ck.resolve_checkpoint(path).step == 5
    with pytest.raises(ValueError, match="no such checkpoint"):
        ck.resolve_checkpoint(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"no state\.json"):
        ck.resolve_checkpoint(tmp_path / "checkpoints")


def test_a_file_where_checkpoints_are_expected_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    message = rf"^{tmp_path}/checkpoints is a file, expected a folder of checkpoints$"
    for read in (ck.resolve_checkpoint, open_weights, lambda run: ck.resolve_checkpoint("last", run)):
        with pytest.raises(ValueError, match=message):
            read(tmp_path)


def test_other_schema_is_refused(tmp_path):
    path = _write(tmp_path)
    state = json.loads((path / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "schema": 99}))
    with pytest.raises(ValueError, match="schema 99"):
        ck.read_checkpoint(path)


def test_weights_must_fit_name_by_name(tmp_path):
    model = nn.Linear(3, 2)
    good = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}

    def load(tensors):
        load_model_tensors(model, files_of(tmp_path, tensors), "here")

    load(good)
    assert torch.equal(model.weight, torch.ones(2, 3))
    with pytest.raises(ValueError, match="here lacks 1 tensors of the model: bias"):
        load({"weight": good["weight"]})
    with pytest.raises(ValueError, match="here has 1 tensors the model has no place for: to_gate"):
        load({**good, "to_gate": torch.ones(1)})
    with pytest.raises(ValueError, match=r"weight has shape \(3, 2\), the model needs \(2, 3\)"):
        load({**good, "weight": torch.ones(3, 2)})


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_optimizer_state_round_trip_continues_bit_for_bit(tmp_path, device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def fresh():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)).to(device)
        roles = {n: "matrix" for n, _ in model.named_parameters()}
        optimizer = AdamW(lr=0.01, schedule=Constant()).build(model, roles)
        # one kernel on a GPU, which counts the updates on it
        assert bool(optimizer.defaults["fused"]) == (device == "cuda")
        return model, optimizer

    def step(model, optimizer, i):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(i), device=device)).square().mean().backward()
        optimizer.step()

    straight, optimizer = fresh()
    for i in range(6):
        if i == 3:
            weights = {name: p.detach().cpu().clone() for name, p in straight.named_parameters()}
            moments = {name: value.cpu().clone() for name, value in optimizer_state(optimizer).items()}
        step(straight, optimizer, i)

    def resume(moments):
        model, optimizer = fresh()
        load_model_tensors(model, files_of(tmp_path, weights), "x")
        load_optimizer_tensors(optimizer, files_of(tmp_path, moments), "x")
        for i in range(3, 6):
            step(model, optimizer, i)
        return model

    for a, b in zip(straight.parameters(), resume(moments).parameters(), strict=True):
        assert torch.equal(a, b)
    # control: every kind of saved tensor matters
    for key in ("exp_avg", "exp_avg_sq", "step"):
        wrong_moments = {k: v + 1e-3 if k.endswith("/" + key) else v for k, v in moments.items()}
        assert not all(
            torch.equal(a, b) for a, b in zip(straight.parameters(), resume(wrong_moments).parameters(), strict=True)
        ), key
    with pytest.raises(ValueError, match="x has 1 tensors the model has no place for: other"):
        load_optimizer_tensors(optimizer, files_of(tmp_path, {**moments, "other/exp_avg": torch.ones(1)}), "x")


def test_optimizer_state_that_should_be_there_is_missed(tmp_path):
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in "abc"})
    optimizer = AdamW(lr=0.01, schedule=Constant()).build(
        model, dict.fromkeys(dict(model.named_parameters()), "matrix")
    )
    (model["a"](torch.ones(2)) + model["b"](torch.ones(2))).sum().backward()
    optimizer.step()
    # nothing was computed with the third
    assert without_state(optimizer) == ["c.weight"]
    moments = {name: value.clone() for name, value in optimizer_state(optimizer).items()}

    def load(tensors, without=("c.weight",), most=1):
        files = files_of(tmp_path, tensors)
        load_optimizer_tensors(optimizer, files, "x", without=without, most_updates=most)

    load(moments)
    for key in moments:
        with pytest.raises(ValueError, match=f"x lacks 1 tensors of the model: {key}"):
            load({name: value for name, value in moments.items() if name != key})
    whole = {name: value for name, value in moments.items() if not name.startswith("b")}
    with pytest.raises(ValueError, match=r"x lacks 3 tensors of the model: b\.weight/exp_avg, "):
        load(whole)
    # control: where it is said to have none, that is all there is
    load(whole, without=("b.weight", "c.weight"))
    with pytest.raises(ValueError, match="x lacks 3 tensors of the model: c"):
        load(moments, without=())
    with pytest.raises(ValueError, match="x has 3 tensors the model has no place for: a"):
        load(moments, without=("a.weight", "c.weight"))
    with pytest.raises(ValueError, match=r"x: a\.weight/exp_avg has shape \(4,\), the optimizer needs \(2, 2\)"):
        load({**moments, "a.weight/exp_avg": torch.ones(4)})
    for count in (0, 2):
        with pytest.raises(ValueError, match=f"x: a.weight/step counts {count} updates in 1 steps"):
            load({**moments, "a.weight/step": torch.tensor(float(count))})
