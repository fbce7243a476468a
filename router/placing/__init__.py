"""Which workers compute a request, who waits for them, and the streams to them."""
