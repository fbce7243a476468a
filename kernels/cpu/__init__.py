"""Fast CPU forms."""
