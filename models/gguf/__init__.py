"""GGUF files as Hugging Face folders: configuration and tokenizer are written out of the metadata, and the weights stay
where they are, with an index that tells their places. No torch."""

from kvrelay.models.gguf.folder import SUFFIX, files_in, folder_of, name_of
from kvrelay.models.gguf.header import GGUFError

__all__ = ["SUFFIX", "GGUFError", "files_in", "folder_of", "name_of"]
