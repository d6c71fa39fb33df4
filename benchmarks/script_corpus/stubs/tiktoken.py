"""GPT-2's tokenizer where its merges would be downloaded: a token is a byte."""

from __future__ import annotations


class Encoding:
    """Tokens of bytes, numbered as GPT-2 numbers none."""

    n_vocab = 50257
    max_token_value = 50256
    eot_token = 50256

    def encode(self, text: str, allowed_special: object = ()) -> list[int]:
        """Returns the bytes of a text."""
        return list(text.encode())

    encode_ordinary = encode

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of some bytes."""
        return bytes(token % 256 for token in tokens).decode(errors="replace")


def get_encoding(name: str) -> Encoding:
    """Returns the tokenizer, whatever its name."""
    return Encoding()
