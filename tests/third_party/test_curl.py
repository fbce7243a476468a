"""curl against a router with TLS, client certificates and API keys."""

import asyncio
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvrelay.cluster import certificates
from support.router_fakes import key_file, pair
from support.scenes import Serve

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


async def test_tls_certificates_and_keys(serve: Serve, tmp_path: Path) -> None:
    folder, other = tmp_path / "certificates", tmp_path / "others"
    for each in (folder, other):
        certificates.make(each, 30, keep_authority=False)
    files = {"tls_certificate": str(folder / "router.crt"), "tls_key": str(folder / "router.key")}
    trust = ("--cacert", str(folder / "ca.crt"))

    def shown(where: Path) -> tuple[str, ...]:
        return "--cert", str(where / "worker.crt"), "--key", str(where / "worker.key")

    cluster = await serve(*pair(), **files, api_keys=key_file(tmp_path, acme=""))
    code, output = await curl(cluster.http, *trust, "-H", "Authorization: Bearer acme")
    assert (code, output.splitlines()[-1]) == (0, "200"), output
    assert '"text":"GHIJ"' in output
    code, output = await curl(cluster.http, *trust)
    assert (code, output.splitlines()[-1]) == (0, "401")
    assert "invalid_api_key" in output
    assert (await curl(cluster.http))[0] == UNTRUSTED
    assert (await curl(cluster.http, "--cacert", str(other / "ca.crt")))[0] == UNTRUSTED
    assert [job.submit.tenant for job in cluster.workers["prefill-0"].jobs] == ["acme"]
    mutual = await serve(*pair(), **files, tls_client_ca=str(folder / "ca.crt"))
    code, output = await curl(mutual.http, *trust, *shown(folder))
    assert (code, output.splitlines()[-1]) == (0, "200"), output
    for options in ((), shown(other)):
        assert (await curl(mutual.http, *trust, *options))[0] in REFUSED
    assert (await curl((await serve(*pair())).http, *trust))[0] != 0
    assert len(mutual.workers["prefill-0"].jobs) == 1
