"""The operator's tools: `kvrelay` and its commands."""
