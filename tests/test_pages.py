"""The reference pages are those that the code generates, and the links between pages lead somewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted(ROOT.glob("*.md"))]
GENERATE = """
import json, sys
sys.path.insert(0, sys.argv[1])
import generate
print(json.dumps({"configuration": generate.configuration(), "metrics": generate.metrics()}))
"""


def test_the_reference_pages_are_the_generated_ones() -> None:
    command = [sys.executable, "-c", GENERATE, str(ROOT / "docs")]
    generated = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    for page, text in json.loads(generated.splitlines()[-1]).items():
        assert (ROOT / "docs" / f"{page}.md").read_text() == text, "run `make docs`"


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
            assert target.startswith("https://") or (page.parent / target).exists(), (page.name, target)
