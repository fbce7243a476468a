"""A model of transformers' code over several ranks, by its own tensor-parallel plan."""
