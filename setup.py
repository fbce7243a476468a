"""Gives the long description: README.md, with links that hold where a package index shows it, too."""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def long_description() -> str:
    """README.md with absolute links in place of those to other files of the repository."""
    source = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Source"]
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{source}/raw/main/", (ROOT / "README.md").read_text())
    return re.sub(r"((?<!!)\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{source}/blob/main/", text)


setup(long_description=long_description(), long_description_content_type="text/markdown")
