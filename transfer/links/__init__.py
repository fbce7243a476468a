"""The links between two workers, each over one transport."""
