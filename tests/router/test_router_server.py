"""The router as a real server, over scripted workers."""

from pathlib import Path

from kvrelay.client import AsyncClient
from support.router_fakes import fake_cluster, pair, run


def token_at(index: int) -> int:
    return 40 + index


def test_a_stream_has_every_token_once_and_its_figures(tmp_path: Path) -> None:
    async def test() -> None:
        async with fake_cluster(tmp_path, *pair(token_at)) as cluster, AsyncClient(cluster.router.address) as client:
            completion = await client.complete("hello", max_tokens=8, timeout=10)
            assert completion.token_ids == tuple(map(token_at, range(8)))
            assert completion.text == await client.detokenize(completion.token_ids)
            assert completion.finish_reason == "length"
            assert completion.usage.completion_tokens == 8
            assert completion.usage.cached_tokens == 1
            assert completion.timeline.transfer_bytes == 640
            print(completion, cluster.records)

    run(test)
