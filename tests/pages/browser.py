"""A page as a browser without a network shows it."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.limits import HANGS

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def needs_browser(test: Any) -> Any:
    """Mark a test that starts a browser."""
    return pytest.mark.slow(pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")(test))


def seen(page: Path, script: str, *, width: int = 900) -> Any:
    """What `script` returns some seconds after the page, whose document is `inside`, was opened.

    The page is in a frame, which can be narrower than a window, and whose script stands outside of the page's policy.
    """
    frame = page.parent / "frame.html"
    frame.write_text(
        f'<iframe src="{page.name}" style="width:{width}px;height:3000px;border:0"></iframe><pre></pre><script>'
        "onload = () => setTimeout(() => { const inside = document.querySelector('iframe').contentDocument;"
        f"document.querySelector('pre').textContent = JSON.stringify((() => {{{script}}})())}}, 4000)</script>"
    )
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-quic"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    # every address is a proxy that does not exist
    command += ["--proxy-server=127.0.0.1:9", "--allow-file-access-from-files"]
    command += [f"--user-data-dir={page.parent / 'browser'}", "--window-size=1500,3000"]
    command += ["--virtual-time-budget=12000", "--dump-dom", frame.as_uri()]
    process = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=True)
    match = re.search(r"<pre>(.*?)</pre>", process.stdout, re.DOTALL)
    assert match, process.stderr[-2000:]
    return json.loads(html.unescape(match[1]))
