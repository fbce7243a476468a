"""A cluster with all of its protection on: mutual TLS, encrypted links, TLS and API keys for clients."""

import socket
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from kvrelay.client import Client, Completion, Exhausted, InvalidRequest, Tls, Unauthenticated, Unavailable
from support.faults import ENGINE, oracle, prompt_of
from support.hash_worker import MODULE
from support.processes import ProcessCluster, process_cluster, wait_until
from support.router_fakes import key_file
from support.secrets import Secrets, secrets_in

NAME = "router.kvrelay.internal"
SECONDS = 30.0


@dataclass
class Secured:
    cluster: ProcessCluster
    secrets: Secrets

    @property
    def certificates(self) -> Path:
        return self.secrets.folder / "certificates"

    def client(self, key: str | None) -> Client:
        tls = Tls(self.certificates / "ca.crt", server_name=NAME)
        return Client(self.cluster.router, timeout=SECONDS, api_key=key, tls=tls)


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("secured")
    secrets = secrets_in(folder, "mutual")
    certificates = folder / "certificates"
    router: dict[str, Any] = {
        "tls_certificate": str(certificates / "router.crt"),
        "tls_key": str(certificates / "router.key"),
        "api_keys": key_file(folder, a="", b=""),
    }
    worker: dict[str, Any] = {
        "engine": ENGINE,
        "transfer": {"transport": "tcp", "encrypt": "full"},
    }
    with process_cluster(
        folder,
        "pico",
        prefill=1,
        decode=1,
        worker=worker,
        router=router,
        modules={"prefill": MODULE, "decode": MODULE},
        secrets=secrets,
    ) as cluster:
        yield Secured(cluster, secrets)


def ask(client: Client, prompt: list[int], count: int = 12, **options: Any) -> Completion:
    """A completion, which must be right."""
    done = client.complete(prompt, max_tokens=count, temperature=0, ignore_eos=True, **options)
    assert list(done.token_ids) == oracle(prompt, count)
    return done


def test_a_tenant_gets_no_hit_in_anothers_prefix_cache(secured: Secured) -> None:
    prompt = prompt_of("shared")
    with secured.client("a") as a, secured.client("b") as b:
        first = ask(a, prompt)
        assert first.usage.cached_tokens == 0
        assert first.timeline.transfer_bytes > 0, "it was handed over"
        assert ask(a, prompt).usage.cached_tokens > 0
        assert ask(b, prompt).usage.cached_tokens == 0
        with pytest.raises(InvalidRequest, match="tenant is 'a'"):
            ask(b, prompt, tenant="a")
        assert ask(b, prompt, tenant="b").usage.cached_tokens > 0


def test_who_has_no_key_or_no_trust_gets_nothing(secured: Secured, tmp_path: Path) -> None:
    with secured.client(None) as client, pytest.raises(Unauthenticated):
        client.model_info()
    others = secrets_in(tmp_path, "mutual").folder / "certificates" / "ca.crt"
    for tls in (None, Tls(others, server_name=NAME), Tls(secured.certificates / "ca.crt", server_name="example.org")):
        client = Client(secured.cluster.router, timeout=SECONDS, api_key="a", tls=tls)
        with client, pytest.raises(Unavailable):
            client.model_info()


def test_certificates_are_replaced_under_load_without_an_error(secured: Secured) -> None:
    cluster = secured.cluster

    def load(number: int) -> None:
        for turn in range(6):
            with secured.client("a") as client:
                done = ask(client, prompt_of(f"{number} {turn}"), 24)
                assert done.timeline.retries == 0

    before = served(cluster.supervisor, secured)
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(load, number) for number in range(4)]
        for _ in range(3):
            secured.secrets.rotate()
        wait_until(lambda: served(cluster.supervisor, secured) != before, "new certificates", SECONDS)
        for each in running:
            each.result()
    expected = x509.load_pem_x509_certificate((secured.certificates / "supervisor.crt").read_bytes()).serial_number
    assert served(cluster.supervisor, secured) == expected
    # A new process has the new certificates only, and gets on with the older ones.
    cluster.processes["decode-0"].popen.kill()
    cluster.start_again("decode-0")
    with secured.client("a") as client:
        wait_until(lambda: serves(client), "the new worker serves", SECONDS)


def serves(client: Client) -> bool:
    """Whether a request can be placed."""
    try:
        return ask(client, prompt_of("again"), 4).timeline.decode_worker == "decode-0"
    except (Unavailable, Exhausted):
        return False


def served(address: str, secured: Secured) -> int:
    """Serial number of the certificate that a server shows now."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(secured.certificates / "ca.crt")
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), SECONDS) as connection,
        context.wrap_socket(connection, server_hostname="supervisor.kvrelay.internal") as secure,
    ):
        shown = secure.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number
