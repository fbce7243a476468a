"""The interfaces for clients: gRPC, HTTP and the page."""
