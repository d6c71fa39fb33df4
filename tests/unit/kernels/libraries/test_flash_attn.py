"""flash-attn: buffers by hand from ``csrc/flash_attn/flash_api.cpp``, 2.8.3."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fxmem
from fxmem.scripts.recording import Recording

BLOCK = 512


def round_block(*sizes: int) -> int:
    """The blocks of tensors in the allocator."""
    return sum(-(-size // BLOCK) * BLOCK for size in sizes)


def measure(call: str, *shapes: tuple[int, ...]) -> tuple[int, int, Recording]:
    """What a call keeps for backward, and the most that its backward takes besides."""
    with fxmem.record(gpu="a100-80gb", steps=1) as recording:
        import flash_attn

        make = lambda shape: torch.empty(  # noqa: E731
            shape, device="cuda", dtype=torch.bfloat16, requires_grad=True
        )
        tensors = [make(shape) for shape in shapes]
        lengths = torch.tensor([0, 100, 256], dtype=torch.int32, device="cuda")
        space = {
            "flash_attn": flash_attn,
            "x": tensors,
            "lengths": lengths,
            "checkpoint": checkpoint,
        }
        before = torch.cuda.memory_allocated()
        result = eval(call, space)
        kept = torch.cuda.memory_allocated() - before
        gradient = torch.empty_like(result)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result.backward(gradient)
        taken = torch.cuda.max_memory_allocated() - before
    return kept, taken, recording


DENSE = "flash_attn.flash_attn_func(*x, causal=True{})"
VARLEN = "flash_attn.flash_attn_varlen_func(*x, lengths, lengths, 156, 156)"
# A result, a sum in float for each row, a random state.
QUERY, ROWS, STATE = 2 * 2048 * 8 * 64 * 2, 2 * 2048 * 8 * 4, 16


@pytest.mark.parametrize(
    ("call", "shapes", "kept", "taken"),
    [
        # Backward: three gradients; a sum for each row, and the query's gradient in float.
        (
            DENSE.format(""),
            [(2, 2048, 8, 64)] * 3,
            (QUERY, ROWS, STATE),
            (*[QUERY] * 3, ROWS, 2 * QUERY),
        ),
        # 2 heads of keys: their gradients for all 8 heads besides.
        (
            DENSE.format(""),
            [(2, 2048, 8, 64), *[(2, 2048, 2, 64)] * 2],
            (QUERY, ROWS, STATE),
            (QUERY, *[QUERY // 4] * 2, ROWS, 2 * QUERY, *[QUERY] * 2),
        ),
        # A part for each writer: 108 multiprocessors for 16 pairs of batch and head: 7.
        (
            DENSE.format(", deterministic=True"),
            [(2, 2048, 8, 64)] * 3,
            (QUERY, ROWS, STATE),
            (*[QUERY] * 3, ROWS, 7 * 2 * QUERY),
        ),
        # One gradient for all three.
        (
            "flash_attn.flash_attn_qkvpacked_func(x[0])",
            [(2, 2048, 3, 8, 64)],
            (QUERY, ROWS, STATE),
            (3 * QUERY, ROWS, 2 * QUERY),
        ),
        # 2 sequences in 256 rows, 128 more for each in backward; head dimension 80 to 96.
        (
            VARLEN,
            [(256, 4, 80)] * 3,
            (256 * 4 * 80 * 2, 256 * 4 * 4, STATE),
            (*[256 * 4 * 80 * 2] * 3, 512 * 4 * 4, 512 * 4 * 96 * 4),
        ),
    ],
    ids=["dense", "grouped", "deterministic", "packed", "varlen"],
)
def test_buffers(call: str, shapes: Any, kept: Any, taken: Any) -> None:
    found_kept, found_taken, recording = measure(call, *shapes)
    assert (found_kept, found_taken) == (round_block(*kept), round_block(*taken))
    notes = recording.notes
    assert "flash_attn is not installed: fxmem's stand-in for flash_attn 2.8.3 ran." in notes


def test_in_a_checkpoint_saved_tensors_are_taken_once() -> None:
    shape = (1, 1024, 4, 32)
    kept, _, _ = measure(
        "checkpoint(flash_attn.flash_attn_func, *x, use_reentrant=False)", *[shape] * 3
    )
    assert kept == round_block(1024 * 4 * 32 * 2)


def test_diffusers_imports_the_package_s_operators() -> None:
    with fxmem.record(gpu="a100-80gb"):
        from flash_attn.flash_attn_interface import (
            _wrapped_flash_attn_backward,
            _wrapped_flash_attn_forward,
        )

        q, k, v, dq, dk, dv = (
            torch.empty(2, 200, 4, 64, device="cuda", dtype=torch.float16) for _ in range(6)
        )
        options = (0.0, 0.125, False, -1, -1, 0.0, None)
        out, sums, probabilities, state = _wrapped_flash_attn_forward(q, k, v, *options, False)
        made = _wrapped_flash_attn_backward(
            out, q, k, v, out, sums, dq, dk, dv, *options, False, state
        )
        (torch.ones(1, device="cuda", requires_grad=True) * 1).backward()
    assert (out.shape, sums.shape, probabilities.numel()) == (q.shape, (2, 4, 200), 0)
    assert made.shape == (2, 4, 256)  # rows to a multiple of 128


def test_names_that_models_import_and_that_want_the_package() -> None:
    with (
        pytest.raises(AttributeError, match=r"has no flash_attn\.layers\.rotary\.RotaryEmbedding"),
        fxmem.record(gpu="a100-80gb"),
    ):
        from flash_attn.layers.rotary import RotaryEmbedding

        RotaryEmbedding(8)


def test_padding_of_head_dimensions_is_kept() -> None:
    shape = (1, 1024, 4, 30)
    kept, _, _ = measure("flash_attn.flash_attn_func(*x)", *[shape] * 3)
    padded = 1024 * 4 * 32 * 2
    assert kept == round_block(*[padded] * 4, 1024 * 4 * 4, STATE)


def test_transformers_takes_it_for_flash_attention_2() -> None:
    pytest.importorskip("transformers")
    from benchmarks.cases import import_torchvision

    import_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 256, "intermediate_size": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}

    def train(attention: str, padding: int = 0) -> Recording:
        mask = torch.ones(2, 512, dtype=torch.long)
        mask[:, : 512 - padding] = 1
        mask[:, 512 - padding :] = 0
        with fxmem.record(gpu="a100-80gb", steps=1) as recording:
            config = LlamaConfig(**sizes, **heads)
            model = LlamaForCausalLM._from_config(
                config, attn_implementation=attention, dtype=torch.bfloat16
            ).cuda()
            tokens = torch.zeros(2, 512, dtype=torch.long, device="cuda")
            model(input_ids=tokens, attention_mask=mask.cuda(), labels=tokens).loss.backward()
        return recording

    # As much as PyTorch's copy of these kernels, which was measured on GPUs, and which has an
    # offset that is not used besides, in each layer.
    flash, sdpa = (train(kind) for kind in ("flash_attention_2", "sdpa"))
    assert flash.steps[0].peak_bytes == sdpa.steps[0].peak_bytes - 2 * BLOCK
    assert any("flash_attn" in note for note in flash.notes)
    unpadded = train("flash_attention_2", padding=8).steps[0]
    shapes = {storage.shape for storage in unpadded.graph.storages}
    assert (4, 2 * 504) in shapes  # sums of the rows that are no padding, by head


def test_keys_of_a_cache_are_split_for_few_queries() -> None:
    with fxmem.record(gpu="a100-80gb") as recording:
        from flash_attn import flash_attn_with_kvcache

        cache = torch.empty(1, 1024, 8, 128, device="cuda", dtype=torch.float16)
        query = torch.empty(1, 1, 32, 128, device="cuda", dtype=torch.float16)
        before = torch.cuda.memory_allocated()
        result = flash_attn_with_kvcache(query, cache, cache)
        taken = torch.cuda.max_memory_allocated() - before
        (torch.ones(1, device="cuda", requires_grad=True) * 1).backward()
    assert result.shape == query.shape and recording.steps
    # 8 heads of 4 queries, in 8 parts: sums, and results of 128 numbers, in float.
    sizes = 32 * 128 * 2, 32 * 4, 8 * 32 * 4, 8 * 32 * 128 * 4
    assert taken == round_block(*sizes)
