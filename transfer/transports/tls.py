"""TLS 1.3 on a link's connection, with the certificates of the two workers."""

import os
import socket
import ssl

from cryptography import x509

from kvrelay.rpc.certificates import KeyPair, dns_name, parts_of
from kvrelay.transfer.protocol.ports import SENDER
from kvrelay.transfer.transports.base import LinkError, seconds_left


def secure(connection: socket.socket, pair: KeyPair, rank: int, deadline: float) -> ssl.SSLSocket:
    """`connection` under TLS; each end has shown the certificate of a worker.

    Args:
        pair: this worker's.
        rank: the sender is the client.

    Raises:
        LinkError: the other end is no worker of the cluster.
        OSError: the connection failed, or the deadline (monotonic) has passed.
    """
    client = rank == SENDER
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT if client else ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=(pair.ca or b"").decode())
    if not client:
        context.num_tickets = 0  # a link is never resumed
    _load(context, pair)
    connection.settimeout(seconds_left(deadline))
    secured = context.wrap_socket(
        connection, server_side=not client, server_hostname=dns_name("worker") if client else None
    )
    shown = secured.getpeercert(binary_form=True)
    if shown is None or "worker" not in parts_of(x509.load_der_x509_certificate(shown)):
        secured.close()
        raise LinkError(f"the other end shows no certificate of {dns_name('worker')}")
    return secured


def _load(context: ssl.SSLContext, pair: KeyPair) -> None:
    """Gives the key pair to the context, which reads files only: the ones on disk may change in between."""
    descriptor = os.memfd_create("kvrelay", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, pair.key + b"\n" + pair.certificate)
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
