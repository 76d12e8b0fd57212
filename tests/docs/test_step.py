"""docs/design.md shows the training step as it is, and one function is the step."""

from __future__ import annotations

import inspect
import textwrap

from tests.docs.pages import FENCE, ROOT
from vsa.training.modules.finetune import FinetuneModule
from vsa.training.modules.pretrain import PretrainModule


def test_the_page_shows_the_function():
    page = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    source = textwrap.dedent(inspect.getsource(PretrainModule.training_step))
    assert [body for language, body in FENCE.findall(page) if language == "python"] == [source]
    assert len(source.splitlines()) <= 60


def test_finetuning_makes_the_same_step():
    assert FinetuneModule.training_step is PretrainModule.training_step
