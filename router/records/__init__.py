"""What a router remembers and tells of requests: times, spans, metrics."""
