"""The reference pages are those that the code generates, and the links between pages lead somewhere."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from kvrelay.router.trace import Outcome

ROOT = Path(__file__).parents[2]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
GENERATE = """
import sys
sys.path.insert(0, sys.argv[1])
import generate
print(getattr(generate, sys.argv[2])(), end="")
"""


@pytest.mark.parametrize("page", ["configuration", "metrics"])
def test_a_reference_page_is_the_generated_one(page: str) -> None:
    command = [sys.executable, "-c", GENERATE, str(ROOT / "docs"), page]
    generated = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert (ROOT / "docs" / f"{page}.md").read_text() == generated, "run `make docs`"


def test_the_outcomes_are_those_of_the_router() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{outcome}`" in text for outcome in get_args(Outcome))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target
