"""curl against a router with TLS, client certificates and API keys."""

import asyncio
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster import certificates
from support.http_calls import serving
from support.router_fakes import run

pytestmark = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
HOST = "router.kvrelay.internal"
"""The name in the certificates that `kvrelay certificates` makes."""
UNTRUSTED, REFUSED = 60, (35, 52, 55, 56)
"""Exit codes of curl: it doesn't trust the server; the server doesn't take the client (in TLS 1.3, curl notices it with
its first read or write)."""


async def curl(http: Any, *options: str) -> tuple[int, str]:
    """Exit code and output of a call of /v1/completions; the answer's status is the output's last line."""
    address = http.base.removeprefix("http://")
    port = address.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--max-time", "30", "--noproxy", "*", "--resolve", f"{HOST}:{port}:127.0.0.1"),
        *("--json", '{"prompt": "hello", "max_tokens": 4}', "--write-out", "\n%{http_code}", *options),
        f"https://{HOST}:{port}/v1/completions",
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    return int(process.returncode or 0), output.decode()


def test_tls_certificates_and_keys(tmp_path: Path) -> None:
    folder, other = tmp_path / "certificates", tmp_path / "others"
    for each in (folder, other):
        certificates.make(each, 30, keep_authority=False)
    files = {"tls_certificate": str(folder / "router.crt"), "tls_key": str(folder / "router.key")}
    keys = tmp_path / "keys"
    keys.write_text(f"acme {sha256(b'right').hexdigest()}\n")
    trust = ("--cacert", str(folder / "ca.crt"))

    def shown(where: Path) -> tuple[str, ...]:
        return "--cert", str(where / "worker.crt"), "--key", str(where / "worker.key")

    async def test() -> None:
        async with serving(tmp_path / "a", **files, api_keys=str(keys)) as (cluster, http):
            code, output = await curl(http, *trust, "-H", "Authorization: Bearer right")
            assert (code, output.splitlines()[-1]) == (0, "200"), output
            assert '"text":"GHIJ"' in output
            code, output = await curl(http, *trust)
            assert (code, output.splitlines()[-1]) == (0, "401")
            assert "invalid_api_key" in output
            assert (await curl(http))[0] == UNTRUSTED
            assert (await curl(http, "--cacert", str(other / "ca.crt")))[0] == UNTRUSTED
            assert [job.submit.tenant for job in cluster.workers["prefill-0"].jobs] == ["acme"]
        async with serving(tmp_path / "b", **files, tls_client_ca=str(folder / "ca.crt")) as (cluster, http):
            code, output = await curl(http, *trust, *shown(folder))
            assert (code, output.splitlines()[-1]) == (0, "200"), output
            for options in ((), shown(other)):
                assert (await curl(http, *trust, *options))[0] in REFUSED
            async with serving(tmp_path / "c") as (_, plain):
                assert (await curl(plain, *trust))[0] != 0
            assert len(cluster.workers["prefill-0"].jobs) == 1

    run(test, 120)
