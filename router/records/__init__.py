"""The records that a router keeps and reports of requests: times, spans, metrics."""
