"""Settings, files and tensors that would run code; each creates a file `proof` if it does."""

from __future__ import annotations

import io
import pickle
import re
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

PACKAGE = "evil_package"
"""A package on the path that creates the proof on import."""


class Bomb:
    """An object whose unpickling creates the proof."""

    def __init__(self, proof: Path):
        self._proof = proof

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._proof,)


def arm(folder: Path) -> Path:
    """Write the hostile package and a pickle below a folder; returns the path of the proof."""
    proof, package = folder / "proof", folder / "path" / PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(f"from pathlib import Path\n\nPath({str(proof)!r}).touch()\n")
    (folder / "bomb.pt").write_bytes(pickle.dumps(Bomb(proof)))
    return proof


TARGETS: tuple[Any, ...] = (
    *("os.system", "os.popen", "os.execv", "os.spawnl", "os.remove", "os.rmdir", "os.putenv", "posix.system"),
    *("subprocess.run", "subprocess.Popen", "subprocess.call", "subprocess.check_output", "subprocess.getoutput"),
    *("builtins.eval", "builtins.exec", "builtins.compile", "builtins.__import__", "builtins.open", "builtins.getattr"),
    *("importlib.import_module", "runpy.run_path", "runpy.run_module", "pty.spawn", "code.interact"),
    *("shutil.rmtree", "shutil.move", "shutil.copyfile", "shutil.unpack_archive", "tarfile.open"),
    *("pathlib.Path.touch", "pathlib.Path.write_text", "pathlib.Path.unlink", "pathlib.Path", "tempfile.mkdtemp"),
    *("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open", "copyreg.__newobj__"),
    *("torch.load", "torch.hub.load", "torch.jit.load", "torch.utils.cpp_extension.load_inline"),
    *("torch.ops.load_library", "torch.package.PackageImporter", "torch.serialization.load", "torch.export.load"),
    *("numpy.load", "numpy.fromfile", "numpy.ctypeslib.load_library", "ctypes.CDLL", "joblib.load"),
    *("urllib.request.urlopen", "urllib.request.urlretrieve", "socket.socket", "webbrowser.open", "http.server.test"),
    *("multiprocessing.Process", "threading.Thread", "asyncio.run", "concurrent.futures.ProcessPoolExecutor"),
    *("timeit.timeit", "cProfile.run", "pdb.run", "doctest.testfile", "unittest.main", "ensurepip.bootstrap"),
    *("logging.config.dictConfig", "logging.config.listen", "logging.os.system", "yaml.unsafe_load", "yaml.load"),
    *("hydra.utils.instantiate", "hydra.utils.call", "hydra.utils.get_method", "omegaconf.OmegaConf.load"),
    # names with the prefix of allowed ones
    *("vsa.training.train.os.system", "vsa.checkpoints.manifest.subprocess.run", "vsa.config.instantiate"),
    *("vsa.config.importlib.import_module", "vsa.files.remove_folder", "vsa.training.train.train", "vsa.files.shutil"),
    *("lightning.pytorch.trainer.trainer.os.system", "lightning.pytorch.loggers.wandb.os.getenv", "vsa", "vsa."),
    *("lightning.pytorch.cli.LightningCLI", "lightning.pytorch.Trainers", "lightning.pytorch.LightningModule"),
    # values that are not names
    *(None, 5, True, "", ["os.system"], {"x": "os.system"}, ".os.system", "os. system", "vsa/../os.system"),
    *(f"{PACKAGE}.run", PACKAGE, f"{PACKAGE}.inner.Class"),
)
"""Hostile values of `_target_`."""

KEYS = (
    *("callbacks.x", "callbacks.checkpoint", "logger.x", "logger.csv", "task", "task.objective", "task.parallel"),
    *("task.objective.shift", "model", "model.norm", "attention", "sparsity", "data", "data.codec"),
    *("data.text_encoder", "optim", "optim.schedule", "trainer"),
)
"""Keys of the config with a `_target_`."""

_EVIL: dict[str, Any] = {"_target_": f"{PACKAGE}.run"}
_HANDLER = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout"}
_SUBMITIT = "hydra_plugins.hydra_submitit_launcher.submitit_launcher."
_OPTUNA = "hydra_plugins.hydra_optuna_sweeper.optuna_sweeper.OptunaSweeper"
_BASIC = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
_JOBLIB = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"


def _logging(handler: Any, **more: Any) -> dict[str, Any]:
    return {"version": 1, "root": {"handlers": ["x"]}, "handlers": {"x": handler}, **more}


def hydra_nodes(proof: Path) -> dict[str, dict[str, Any]]:
    """Hostile nodes for the `hydra` part of a config, by a description: they run code, or write into other folders."""
    bomb = str(proof.with_name("bomb.pt"))
    callbacks = {
        "a package": _EVIL,
        "touch": {"_target_": "pathlib.Path.touch", "self": str(proof)},
        "torch.load": {"_target_": "torch.load", "f": bomb, "weights_only": False},
        "numpy.load": {"_target_": "numpy.load", "file": bomb, "allow_pickle": True},
        "run_path": {"_target_": "runpy.run_path", "path_name": str(proof.parent / "path" / PACKAGE / "__init__.py")},
        "exec": {"_target_": "builtins.exec", "_args_": [f"open({str(proof)!r}, 'w')"]},
        "nested": {"_target_": "vsa.training.callbacks.ema.EMA", "decay": _EVIL},
        "partial": {**_EVIL, "_partial_": True},
        "of hydra": {"_target_": "hydra.experimental.callbacks.PickleJobInfoCallback"},
        "of vsa": {"_target_": "vsa.training.callbacks.ema.EMA"},
    }
    launchers = {
        "a package": _EVIL,
        "os.system": {"_target_": "os.system", "command": f"touch {proof}"},
        "a plugin": {"_target_": f"hydra_plugins.{PACKAGE}.Launcher"},
        "a sweeper": {"_target_": _BASIC},
        "joblib with a function": {"_target_": _JOBLIB, "backend": _EVIL},
        "slurm setup": {"_target_": f"{_SUBMITIT}SlurmLauncher", "setup": [f"touch {proof}"]},
        "slurm line break": {"_target_": f"{_SUBMITIT}SlurmLauncher", "partition": f"a\ntouch {proof} #"},
        "slurm wrap": {"_target_": f"{_SUBMITIT}SlurmLauncher", "additional_parameters": {"wrap": f"touch {proof}"}},
        "slurm prolog": {"_target_": f"{_SUBMITIT}SlurmLauncher", "additional_parameters": {"task_prolog": "./x"}},
        "slurm python": {"_target_": f"{_SUBMITIT}SlurmLauncher", "python": str(proof)},
        "local python": {"_target_": f"{_SUBMITIT}LocalLauncher", "python": str(proof)},
    }
    sweepers = {
        "a package": _EVIL,
        "torch.load": {"_target_": "torch.load", "f": bomb, "weights_only": False},
        "a launcher": {"_target_": "hydra._internal.core_plugins.basic_launcher.BasicLauncher"},
        "nested": {"_target_": _BASIC, "max_batch_size": _EVIL},
        "optuna sampler": {"_target_": _OPTUNA, "sampler": _EVIL},
        "optuna gamma": {
            "_target_": _OPTUNA,
            "sampler": {"_target_": "optuna.samplers.TPESampler", "gamma": _EVIL},
        },
        "optuna search space": {"_target_": _OPTUNA, "custom_search_space": f"{PACKAGE}.run"},
        "optuna storage": {"_target_": _OPTUNA, "storage": _EVIL},
    }
    loggings = {
        "a class": _logging({"class": f"{PACKAGE}.Handler"}),
        "a socket": _logging({"class": "logging.handlers.SocketHandler", "host": "127.0.0.1", "port": 9}),
        "a factory": _logging({"()": f"{PACKAGE}.run"}),
        "a stream": _logging({**_HANDLER, "stream": f"ext://{PACKAGE}.stream"}),
        "its own config": _logging({**_HANDLER, "stream": "cfg://handlers"}),
        "attributes": _logging({**_HANDLER, ".": {"x": 1}}),
        "a file": _logging({"class": "logging.FileHandler", "filename": str(proof)}),
        "a formatter": _logging({**_HANDLER, "formatter": "f"}, formatters={"f": {"class": f"{PACKAGE}.F"}}),
        "a file of another run": _logging(
            {"class": "logging.FileHandler", "filename": str(proof.with_name("precious")), "mode": "w"}
        ),
        "a filter": _logging({**_HANDLER, "filters": ["f"]}, filters={"f": {"()": f"{PACKAGE}.F"}}),
    }
    return {
        **{f"callback, {name}": {"callbacks": {"x": node}} for name, node in callbacks.items()},
        **{f"launcher, {name}": {"launcher": node} for name, node in launchers.items()},
        **{f"sweeper, {name}": {"sweeper": node} for name, node in sweepers.items()},
        **{f"logging, {name}": {"job_logging": node} for name, node in loggings.items()},
        "hydra's logging": {"hydra_logging": loggings["a class"]},
        "folder of a run": {"run": {"dir": str(proof)}},
        "folder of a sweep": {"sweep": {"dir": str(proof), "subdir": "."}},
        "folder of an output": {"output_subdir": str(proof)},
        "folder of a launcher": {
            "launcher": {"_target_": f"{_SUBMITIT}SlurmLauncher", "submitit_folder": str(proof.with_name("precious"))}
        },
        "another working folder": {"job": {"chdir": True}},
        "environment": {"job": {"env_set": {"PYTHONPATH": str(proof.parent), "LD_PRELOAD": bomb}}},
    }


def grammar(value: Any) -> str:
    """A value in the grammar of Hydra's overrides."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_key(name)}:{grammar(inner)}" for name, inner in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(grammar, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("'", "\\'") + "'"
    return {None: "null", True: "true", False: "false"}.get(value, str(value))


def _key(name: str) -> str:
    return re.sub(r"([()\[\]{}:=, ])", r"\\\1", name)


FILES: Mapping[str, bytes] = {
    "python tag": b"name: !!python/object/apply:os.system ['touch proof']\n",
    "python name": b"callbacks: {x: !!python/name:os.system ''}\n",
    "python module": b"a: !!python/module:evil_package\n",
    "aliases": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(ord("b"), ord("j"))),
    "nesting": b"a: " + b"[" * 300000 + b"]" * 300000 + b"\n",
    "nul bytes": b"name: \x00\x00\n",
    "no utf-8": b"name: \xff\xfe\xfa\n",
    "noise": bytes(range(256)) * 64,
    "a list": b"- a\n- b\n",
    "a word": b"evil\n",
    "defaults outside": b"defaults: [/../../../etc/passwd]\n",
    "endless interpolation": b"name: ${run}\nrun: ${name}\n",
    "unknown resolver": b"name: ${evil_package.run:1}\n",
}
"""13 hostile experiment files, by a description."""


def payloads(proof: Path) -> dict[str, bytes]:
    """Files that would run code if they were unpickled, extracted or imported, by name."""
    bomb, code = pickle.dumps(Bomb(proof)), f"open({str(proof)!r}, 'w')\n".encode()
    saved, legacy, array, archive = io.BytesIO(), io.BytesIO(), io.BytesIO(), io.BytesIO()
    torch.save({"state_dict": Bomb(proof)}, saved)
    torch.save(Bomb(proof), legacy, _use_new_zipfile_serialization=False)
    np.save(array, np.array([Bomb(proof)], dtype=object), allow_pickle=True)
    np.savez(archive, allow_pickle=True, a=np.array([Bomb(proof)], dtype=object))
    lightning = io.BytesIO()
    torch.save({"hyper_parameters": {"_instantiator": f"{PACKAGE}.run", "_class_path": f"{PACKAGE}.A"}}, lightning)
    slip, tar = io.BytesIO(), io.BytesIO()
    with zipfile.ZipFile(slip, "w") as file:
        file.writestr("../proof", b"x")
    with tarfile.open(fileobj=tar, mode="w") as file:
        member = tarfile.TarInfo("../proof")
        member.size = 1
        file.addfile(member, io.BytesIO(b"x"))
    return {
        "model.pt": saved.getvalue(),
        "model.pth": legacy.getvalue(),
        "model.bin": saved.getvalue(),
        "model.pkl": bomb,
        "model.pickle": bomb,
        "model.pyd": bomb,
        "model.ckpt": lightning.getvalue(),
        "model.npy": array.getvalue(),
        "model.npz": archive.getvalue(),
        "model.zip": slip.getvalue(),
        "model.tar": tar.getvalue(),
        "model.py": code,
        "model.safetensors": bomb,
    }
