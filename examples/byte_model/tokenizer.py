# SPDX-License-Identifier: Apache-2.0
"""The tokenizer: token id = byte value, then three specials. No merges, nothing to learn."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

END, START, PAD = 256, 257, 258
SPECIALS = {"<|end|>": END, "<|start|>": START, "<|pad|>": PAD}
VOCABULARY = 256 + len(SPECIALS)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ message['role'] + ': ' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in tokenizer.json.

    The mapping is GPT-2's, which the ByteLevel pre-tokenizer applies: printable Latin-1
    characters stand for themselves, the rest are moved up from U+0100.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    moved = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(moved)) for byte in range(256)]


def save_tokenizer(folder: Path, max_length: int) -> None:
    """Write the tokenizer's files into `folder`."""
    vocabulary = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|start|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        # A user's text that spells a special stays text: one token per byte, always.
        split_special_tokens=True,
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
