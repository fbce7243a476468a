"""The marker `in_turn`: a test whose cases are spread over the transports."""

import pytest

from support.faults import TRANSPORTS


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leaves each case of an `in_turn` test on one of TRANSPORTS, in turn; on the others it is slow."""
    for item in items:
        marker = item.get_closest_marker("in_turn")
        if marker is not None:
            callspec = item.callspec  # type: ignore[attr-defined]  # parametrized by `it` at least
            case = sum(callspec.indices[name] for name in marker.args)
            if callspec.params["it"] != TRANSPORTS[case % len(TRANSPORTS)]:
                item.add_marker(pytest.mark.slow)
