"""Seconds that prefill, decode and hand-offs take, by what they compute and move; fitted online. No I/O, no torch."""
