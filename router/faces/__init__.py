"""What clients speak to: gRPC, HTTP and the page."""
