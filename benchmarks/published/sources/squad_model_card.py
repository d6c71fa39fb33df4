"""XLM-RoBERTa fine-tuned on SQuAD by Hugging Face's Trainer of 2021.

The Trainer zeroed gradients in place and dropped a step's output before backward. Its AdamW went
over parameters one by one, as torch's does with ``foreach=False``. Attention was written out, and
cuBLAS's workspaces were not yet PyTorch's.
"""

from __future__ import annotations

from torch import Tensor, nn

import fxmem
from benchmarks.published.cases import Case
from benchmarks.published.predicting import find_allocated_after, list_peaks

BATCH, LENGTH = 16, 384


class Answering(nn.Module):
    """The base model of XLM-RoBERTa with a head for questions, and its loss."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import XLMRobertaConfig, XLMRobertaForQuestionAnswering

        config = XLMRobertaConfig(
            vocab_size=250002,
            max_position_embeddings=514,
            type_vocab_size=1,
            attn_implementation="eager",
        )
        self.model = XLMRobertaForQuestionAnswering(config)

    def forward(self, ids: Tensor, mask: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
        """The loss, of tokens of shape (batch, length) and their answers' ends."""
        options = {"start_positions": starts, "end_positions": ends}
        loss: Tensor = self.model(ids, attention_mask=mask, **options).loss
        return loss


def take_loss(output: Tensor) -> Tensor:
    """The output, which is the loss."""
    return output


def predict(case: Case) -> dict[str, int]:
    """The peak of training, and what is allocated when it is over, gradients among it."""
    tokens = fxmem.TensorSpec((BATCH, LENGTH), "int64")
    answers = fxmem.TensorSpec((BATCH,), "int64")
    analysis = fxmem.analyze(
        f"{__name__}:Answering",
        (tokens, tokens, answers, answers),
        gpu=case.gpu,
        optimizer="adamw(foreach=False)",
        loss=take_loss,
        set_to_none=False,
        alloc_conf="",
    )
    return {
        "allocated": list_peaks(analysis)["allocated"],
        "allocated after training": find_allocated_after(analysis, ()),
    }
