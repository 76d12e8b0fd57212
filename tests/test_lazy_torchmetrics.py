"""The late import of torchmetrics, in processes of its own."""

import subprocess
import sys

import pytest

HEAVY = "[n for n in ('scipy', 'transformers', 'torchmetrics.functional') if n in sys.modules]"
INSTALL = "from vsa.lazy_torchmetrics import install; install()"
ALONE = f"import sys; {INSTALL}; import lightning; print({HEAVY})"


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_lightning_by_itself_loads_what_is_heavy() -> None:
    assert "torchmetrics.functional" in _run(f"import sys, lightning; print({HEAVY})")


@pytest.mark.parametrize(
    "before",
    [
        ALONE,
        # each takes ten seconds of a core
        pytest.param(INSTALL, marks=pytest.mark.slow),
        pytest.param(f"import torchmetrics; {INSTALL}; import lightning", marks=pytest.mark.slow),
        pytest.param(f"import lightning; {INSTALL}", marks=pytest.mark.slow),
    ],
)
def test_the_whole_package_is_there_when_it_is_asked_for(before: str) -> None:
    code = f"""{before}
import torchmetrics.functional.regression
import torchmetrics, torch
from torchmetrics import Accuracy, MeanMetric, Metric, MetricCollection, functional
from lightning.pytorch.core import module
mean = MeanMetric()
mean.update(torch.tensor([1.0, 3.0]))
assert mean.compute() == 2.0 and isinstance(mean, Metric) and isinstance(mean, module.Metric)
assert isinstance(MetricCollection([MeanMetric()]), module.MetricCollection)
assert functional.mean_squared_error(torch.ones(2), torch.zeros(2)) == 1.0
assert Accuracy(task="binary") is not None and torchmetrics.__version__[0].isdigit()
try:
    torchmetrics.no_such_metric
except AttributeError as error:
    print(error)
import sys
print({HEAVY})
"""
    lines = _run(code).splitlines()
    assert "no_such_metric" in lines[-2]
    if before == ALONE:
        assert lines[0] == "[]"
    # the control: what is loaded is seen
    assert "torchmetrics.functional" in lines[-1]


@pytest.mark.parametrize("before", ["import vsa", INSTALL], ids=["a user's process", "the command's"])
def test_a_star_names_everything(tmp_path, before) -> None:
    # a stand-in: the import of the real package takes ten seconds of a core
    package = tmp_path / "torchmetrics"
    package.mkdir()
    (package / "__init__.py").write_text("__all__ = ['Loss', 'WORD']\nclass Loss: pass\nWORD = 'whole'\n")
    star = "from torchmetrics import *; print(WORD, Loss.__name__)"
    listed = "import torchmetrics; print('Loss' in dir(torchmetrics))"
    for code, told in ((star, "whole Loss"), (listed, "True")):
        assert _run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {before}; {code}") == told


@pytest.mark.slow
def test_metrics_are_logged_and_pickled() -> None:
    code = (
        f"{INSTALL}\n"
        + """import pickle
import lightning as L
import torch
from torchmetrics.aggregation import MeanMetric
again = pickle.loads(pickle.dumps(MeanMetric()))
again.update(torch.tensor(2.0))
class Model(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.mean, self.layer = MeanMetric(), torch.nn.Linear(1, 1)
    def training_step(self, batch, index):
        self.mean(batch.mean())
        self.log("mean", self.mean, on_epoch=True)
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                    enable_model_summary=False, accelerator="cpu")
trainer.fit(Model(), torch.utils.data.DataLoader(torch.full((4, 1), 3.0)))
print(trainer.callback_metrics["mean"].item())
"""
    )
    assert _run(code).endswith("3.0")
