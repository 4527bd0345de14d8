"""Instructions as tokens: prompts that are read, completions that are learned.

A line of a file is {"prompt": "...", "completion": "..."}, as in TRL. The labels of a
prompt's tokens, and of padding, are -100: a loss leaves them out.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

IGNORED = -100  # the label of what is not learned, in torch and transformers


class Bytes:
    """A tokenizer without files: a token is a byte of UTF-8."""

    eos_token_id, pad_token_id = 256, 257
    chat_template = None

    def __len__(self) -> int:
        return 258

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


def read_pairs(file: Path | None = None) -> list[tuple[str, str]]:
    """The (prompt, completion) of each line; without a file a few sums.

    Raises: ValueError names the line that has other fields.
    """
    if file is None:
        return [(f"{a} + {b} =", str(a + b)) for a in range(10) for b in range(10)]
    pairs = []
    for i, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            row = json.loads(line)
            if not isinstance(row, dict) or not {"prompt", "completion"} <= row.keys():
                raise ValueError(f'{file}:{i} is no {{"prompt": .., "completion": ..}}')
            pairs.append((row["prompt"], row["completion"]))
    return pairs


def prompt_tokens(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens up to where an answer begins.

    A tokenizer with a chat template has its own words around a prompt; of another one
    the prompt is a line by itself.
    """
    if not tokenizer.chat_template:
        return tokenizer.encode(f"{prompt}\n")  # with the token that begins a text
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)  # it has them already


class Row(NamedTuple):
    tokens: list[int]
    prompt: int  # how many of them, the first ones, are the prompt's


def tokenized(
    pairs: Sequence[tuple[str, str]], tokenizer: Any, longest: int
) -> list[Row]:
    """A row for each pair; its end is cut off where it has more than `longest` tokens.

    Raises: ValueError where nothing is left of a completion.
    """
    rows = []
    for prompt, completion in pairs:
        before = prompt_tokens(tokenizer, prompt)
        after = tokenizer.encode(completion, add_special_tokens=False)
        if len(before) >= longest:
            raise ValueError(
                f"the prompt {prompt[:40]!r}... has {len(before)} tokens, and a row "
                f"--length {longest}: nothing of its completion is left"
            )
        # The end is learned too, or the model would not know where to stop.
        tokens = [*before, *after, tokenizer.eos_token_id][:longest]
        rows.append(Row(tokens, len(before)))
    return rows


class Instructions(Dataset):
    """Rows as tensors: "input_ids" and "labels" [length], "tokens" [], their number.

    There is no mask: padding is at the end, where no token before it looks.

    Args:
        length: of every row, padded at its end. One shape for all batches: the first
            call with another one takes longer, above all that of a compiled step.
        multiple: rows without a label are added until their number is a multiple of it,
            so that each row of an evaluation is counted and its batches are full.
    """

    def __init__(self, rows: Sequence[Row], length: int, pad: int, multiple: int = 1):
        self.rows = [*rows, *[Row([], 0)] * (-len(rows) % multiple)]
        self.length, self.pad = length, pad

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens, prompt = self.rows[i]
        padding = [self.pad] * (self.length - len(tokens))
        ids = torch.tensor([*tokens, *padding])
        labels = ids.clone()
        labels[:prompt] = labels[len(tokens) :] = IGNORED
        count = torch.tensor(len(tokens))
        return {"input_ids": ids, "labels": labels, "tokens": count}
