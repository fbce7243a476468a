"""Ray: configuration, launch, supervision, metrics, and the command line."""
