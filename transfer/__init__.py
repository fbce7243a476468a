"""Shipping KV between workers: ownership protocol, links, transports."""
