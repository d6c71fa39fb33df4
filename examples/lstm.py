"""A text classifier: tokens through a bidirectional LSTM to the scores of the classes.

fxmem analyze examples/lstm.py:Classifier --input 32x128:int64 --loss cross_entropy
fxmem analyze 'examples/lstm.py:Classifier(layers=4)' --input 32x512:int64 --optimizer adam --top 5
"""

from __future__ import annotations

from torch import Tensor, nn


class Classifier(nn.Module):
    """Sentences of one length to class scores.

    Args:
        layers: How many LSTM layers.
        width: Numbers per token, in each direction.
        vocabulary: How many tokens there are.
        classes: How many scores.
    """

    def __init__(
        self, layers: int = 2, width: int = 256, vocabulary: int = 20_000, classes: int = 4
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.dropout = nn.Dropout(0.2)
        self.lstm = nn.LSTM(width, width, num_layers=layers, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.tokens(ids)))
        return self.head(states.amax(dim=1))
