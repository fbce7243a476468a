"""Facts of GGUF files that the readers of headers and the readers of weights share."""

from typing import NamedTuple

INDEX = "gguf.json"
"""Name of the file that tells, in a Hugging Face folder, where tensors are in GGUF files that lie elsewhere."""

GENERAL_SUFFIX = " in GGUF"
"""End of the `model_type` in such a folder's config.json of a model that transformers' code runs; the beginning is the
architecture as the GGUF file names it."""


class BlockType(NamedTuple):
    """A type of tensors. Weights are stored in blocks of consecutive ones."""

    number: int
    """Number in the files."""
    weights: int
    """Number of weights in a block."""
    size: int
    """Bytes of a block."""


FLOATS = {"F32": BlockType(0, 1, 4), "F16": BlockType(1, 1, 2), "BF16": BlockType(30, 1, 2)}
QUANTIZED = {
    "Q4_0": BlockType(2, 32, 18),
    "Q4_1": BlockType(3, 32, 20),
    "Q5_0": BlockType(6, 32, 22),
    "Q5_1": BlockType(7, 32, 24),
    "Q8_0": BlockType(8, 32, 34),
    "Q2_K": BlockType(10, 256, 84),
    "Q3_K": BlockType(11, 256, 110),
    "Q4_K": BlockType(12, 256, 144),
    "Q5_K": BlockType(13, 256, 176),
    "Q6_K": BlockType(14, 256, 210),
    "IQ2_XXS": BlockType(16, 256, 66),
    "IQ2_XS": BlockType(17, 256, 74),
    "IQ3_XXS": BlockType(18, 256, 98),
    "IQ1_S": BlockType(19, 256, 50),
    "IQ4_NL": BlockType(20, 32, 18),
    "IQ3_S": BlockType(21, 256, 110),
    "IQ2_S": BlockType(22, 256, 82),
    "IQ4_XS": BlockType(23, 256, 136),
    "IQ1_M": BlockType(29, 256, 56),
    "TQ1_0": BlockType(34, 256, 54),
    "TQ2_0": BlockType(35, 256, 66),
    "MXFP4": BlockType(39, 32, 17),
}
TYPES = {**FLOATS, **QUANTIZED}
"""The types that can be read, by name."""
