"""The kernel for prompts is the wanted one where it can be, else the general one, and a warning says why."""

import logging
import sys

import pytest
import torch

from kvrelay.engine.attention.prefill import choose_prefill
from kvrelay.engine.config import EngineConfig
from kvrelay.engine.kv.layout import KVLayout


def layout(head_dim: int = 128, block_size: int = 64, dtype: str = "bfloat16") -> KVLayout:
    return KVLayout(2, 2, head_dim, block_size, dtype, "HND")


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("block_size", [64, 128])
def test_gluon_is_taken_on_hopper(head_dim: int, block_size: int) -> None:
    assert choose_prefill("gluon", layout(head_dim, block_size), torch.bfloat16, 8, 90).name == "gluon"


@pytest.mark.parametrize(
    ("kv", "dtype", "architecture", "reason"),
    [
        (layout(), torch.bfloat16, 100, "architecture 100"),
        (layout(), torch.bfloat16, 80, "architecture 80"),
        (layout(96), torch.bfloat16, 90, "heads of 96"),
        (layout(block_size=16), torch.bfloat16, 90, "blocks of 16"),
        (layout(dtype="int8"), torch.bfloat16, 90, "KV of int8"),
        (layout(dtype="float32"), torch.float32, 90, "float32"),
    ],
)
def test_elsewhere_triton_is_taken(
    caplog: pytest.LogCaptureFixture, kv: KVLayout, dtype: torch.dtype, architecture: int, reason: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert choose_prefill("gluon", kv, dtype, 8, architecture).name == "triton"
    (message,) = caplog.messages
    assert reason in message


def test_a_triton_without_gluon_is_no_error(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    import kvrelay.kernels

    monkeypatch.delattr(kvrelay.kernels, "flash_prefill_hopper", raising=False)
    monkeypatch.delitem(sys.modules, "kvrelay.kernels.flash_prefill_hopper", raising=False)
    monkeypatch.setitem(sys.modules, "triton.experimental.gluon", None)
    with caplog.at_level(logging.WARNING):
        assert choose_prefill("gluon", layout(), torch.bfloat16, 8, 90).name == "triton"
    assert "Triton hasn't what it needs" in caplog.text


def test_triton_is_the_default(caplog: pytest.LogCaptureFixture) -> None:
    assert choose_prefill(EngineConfig().prefill_attention, layout(), torch.bfloat16, 8, 90).name == "triton"
    assert not caplog.messages


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match="prefill_attention is 'cudnn'; allowed: triton, gluon"):
        EngineConfig(prefill_attention="cudnn")
