"""Clusters on the hash model that many files here share: each is started once, and healed after every test."""

from collections.abc import Iterator

import pytest

from support.faults import TRANSFER, Scene, over, scene

KV_BYTES = 16 * 2**20
DRAIN_SECONDS = 20.0


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs a test of `pairs` over what the marker `also_over` says, too: `more=[kinds]`, `slow=[kinds]`."""
    if "pairs" not in metafunc.fixturenames:
        return
    marker = metafunc.definition.get_closest_marker("also_over")
    tiers = {} if marker is None else marker.kwargs
    kinds = [pytest.param(kind, marks=getattr(pytest.mark, tier)) for tier, found in tiers.items() for kind in found]
    metafunc.parametrize("pairs", ["auto", *kinds], indirect=True)


@pytest.fixture(scope="session")
def pairs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Two prefill workers, two decode workers and two routers; their transport is `auto`, or what the parameter says
    (`support.faults.over`)."""
    options = over(request.param)
    options["engine"] = {"kv_memory_bytes": KV_BYTES, **options.get("engine", {})}
    worker = {"drain_seconds": DRAIN_SECONDS}
    with scene(tmp_path_factory.mktemp("pairs"), routers=2, worker=worker, **options) as it:
        yield it


@pytest.fixture
def it(pairs: Scene) -> Iterator[Scene]:
    """The shared cluster, for one test."""
    yield pairs
    pairs.heal()


@pytest.fixture(scope="session", params=["tcp", pytest.param("gloo", marks=pytest.mark.slow)])
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One prefill and two decode workers with the default limits of hand-offs, whose links run through proxies."""
    transfer = {"transport": request.param, "frame_bytes": TRANSFER["frame_bytes"]}
    # Retries that a broken link causes are outside the router's budget, so the judge must not count them against it.
    engine = {"max_batch_tokens": "auto"}
    folder = tmp_path_factory.mktemp("network")
    with scene(folder, prefill=1, chaos=True, losses=True, engine=engine, transfer=transfer) as it:
        yield it
