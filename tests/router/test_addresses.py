"""Addresses of clients: behind proxies that are trusted, and never by what others claim."""

import pytest

from kvrelay.router.addresses import Addresses
from kvrelay.router.doors.connections import peer_of

PROXIES = ("10.0.0.0/8", "192.0.2.7", "2001:db8:1::/48")


@pytest.mark.parametrize(
    ("host", "forwarded", "client"),
    [
        ("203.0.113.5", (), "203.0.113.5"),
        ("203.0.113.5", ("198.51.100.1",), "203.0.113.5"),  # nobody trusts it
        ("10.1.2.3", (), "10.1.2.3"),
        ("10.1.2.3", ("198.51.100.1",), "198.51.100.1"),
        ("10.1.2.3", ("198.51.100.9, 198.51.100.1",), "198.51.100.1"),  # its client has made up the first
        ("10.1.2.3", ("198.51.100.9", "198.51.100.1, 192.0.2.7"), "198.51.100.1"),
        ("10.1.2.3", ("10.4.4.4",), "10.4.4.4"),
        ("10.1.2.3", ("198.51.100.1:4711",), "198.51.100.1"),
        ("10.1.2.3", ("unknown",), "10.1.2.3"),
        ("10.1.2.3", ("198.51.100.1, , ",), "10.1.2.3"),
        ("::ffff:10.1.2.3", ("198.51.100.1",), "198.51.100.1"),
        ("2001:db8:1::1", ("[2001:db8:2:3:4::5]:4711",), "2001:db8:2:3::/64"),
        ("2001:db8:2:3:ffff::5", (), "2001:db8:2:3::/64"),
        ("fe80::1%eth0", (), "fe80::/64"),
        ("unix:/run/router", ("198.51.100.1",), "unix:/run/router"),
    ],
)
def test_a_client_is_whom_the_last_trusted_proxy_names(host: str, forwarded: tuple[str, ...], client: str) -> None:
    assert Addresses(PROXIES).client(host, forwarded) == client
    if client != host:
        assert Addresses().client(host, forwarded) == Addresses().client(host)


def test_a_connections_end_is_the_same_however_it_is_written() -> None:
    assert peer_of("::ffff:127.0.0.1", 5) == peer_of("127.0.0.1", 5)
    assert peer_of("[::1]", 5) == peer_of("0:0:0:0:0:0:0:1", 5)
    assert peer_of("::1", 5) != peer_of("::1", 6)
