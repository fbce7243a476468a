"""What every kvrelay process needs to speak to the others: gRPC options, attendance at the supervisor, logs, main."""
