"""Identifies clients by their network address, also behind proxies that the operator trusts.

Limits by address count an IPv6 network of 64 bits as one client: whoever has one of its addresses has all of them.
"""

import ipaddress
from collections.abc import Sequence
from functools import lru_cache

FORWARDED_FOR = "x-forwarded-for"
"""Header, or metadata of gRPC, in which each proxy adds the address that it was called from."""
_HOLDER_BITS = 64
_KEPT = 4096

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def network(text: str) -> Network:
    """
    Raises:
        ValueError: it is no address and no network.
    """
    return ipaddress.ip_network(text, strict=False)


class Addresses:
    """Tells clients from the proxies that the operator trusts."""

    def __init__(self, trusted_proxies: Sequence[str] = ()) -> None:
        """
        Args:
            trusted_proxies: addresses and networks.
        """
        self._networks = [network(text) for text in trusted_proxies]

    def trusted(self, host: str) -> bool:
        """Whether an address is that of a trusted proxy."""
        address = parse(host)
        return address is not None and any(address in each for each in self._networks)

    def client(self, host: str, forwarded: Sequence[str] = ()) -> str:
        """The client of a connection or a request, as limits by address count it.

        Args:
            host: the address of the connection's other end.
            forwarded: the values of the request's header `X-Forwarded-For`, which count as far as trusted proxies have
                written them.
        """
        hops = [hop for value in forwarded for hop in value.split(",")] if self._networks else []
        while hops and self.trusted(host):
            hop = hops.pop().strip()
            if parse(hop) is None:
                break
            host = hop
        return holder(host)


@lru_cache(_KEPT)
def parse(text: str) -> Address | None:
    """An address, which may have a port behind it; None for other texts. An IPv4 address within IPv6 is itself."""
    host = text.partition("]")[0].removeprefix("[") if text.startswith("[") else text
    if host.count(":") == 1:
        host = host.partition(":")[0]
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


def holder(host: str) -> str:
    """The name under which limits count an address."""
    address = parse(host)
    if address is None:
        return host
    if address.version == 4:
        return str(address)
    return str(ipaddress.ip_network((address, _HOLDER_BITS), strict=False))
