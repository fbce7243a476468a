"""Code that every room may import: the version, the limits of this machine, and the base of the classes of options."""

from importlib.metadata import PackageNotFoundError, version


def _version() -> str:
    try:
        return version("kvrelay")
    except PackageNotFoundError:
        return "0+source"


VERSION = _version()
"""Version of the installed package; `0+source` where the sources run without one."""
