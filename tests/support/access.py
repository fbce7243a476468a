"""Credentials of the test process, with the join token that `conftest.py` gives to every process of the tests."""

from kvrelay.rpc.credentials import Credentials
from kvrelay.rpc.security import Part, SecurityConfig


def credentials(part: Part = "operator") -> Credentials:
    return Credentials.of(part, SecurityConfig())


METADATA = credentials().metadata
"""Metadata for calls of internal services."""
