"""What a model of transformers is trained for: its class, its batch and its loss.

A config.json says it by its ``architectures``, or the caller by ``--task``. Without
both it is the first task of the table that transformers has a class of the model for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fsfunc.cli.build_scripts import Refused
from fsfunc.tree.types import PyTree

LONGEST_SEQUENCE = 4096  # tokens, by default


class Task(NamedTuple):
    """What a model is trained for.

    Args:
        word: its name on the command line.
        auto: transformers' class that makes the models for it.
        loss: the loss, in words.
        batch: makes the batch of (config, sequences, length), without data.
        counts_tokens: whether a step's tokens are sequences times length.
    """

    word: str
    auto: str
    loss: str
    batch: Callable[[Any, int, int], PyTree]
    counts_tokens: bool = True


def _integers(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.int64)


def _tokens(_: Any, sequences: int, length: int) -> Tensor:
    return _integers(sequences, length)


def _pairs(_: Any, sequences: int, length: int) -> dict[str, Tensor]:
    source, target = (_integers(sequences, length) for _ in range(2))
    return {"input_ids": source, "labels": target}


def _classified_tokens(config: Any, sequences: int, length: int) -> dict[str, Tensor]:
    batch = {"input_ids": _integers(sequences, length)}
    return batch | {"labels": _labels(config, sequences)}


def _spans(_: Any, sequences: int, length: int) -> dict[str, Tensor]:
    ends = {f"{end}_positions": _integers(sequences) for end in ("start", "end")}
    return {"input_ids": _integers(sequences, length), **ends}


def _speech(config: Any, sequences: int, length: int) -> dict[str, Tensor]:
    mels, positions = (
        _field(config, name, "speech")
        for name in ("num_mel_bins", "max_source_positions")
    )
    # Two frames are one position: the second convolution has a stride of 2.
    features = torch.empty(sequences, mels, 2 * positions)
    return {"input_features": features, "labels": _integers(sequences, length)}


def _images(config: Any, sequences: int, _: int) -> dict[str, Tensor]:
    size = _field(config, "image_size", "images")
    height, width = (size, size) if isinstance(size, int) else size
    channels = _field(config, "num_channels", "images")
    pixels = torch.empty(sequences, channels, height, width)
    return {"pixel_values": pixels, "labels": _labels(config, sequences)}


def _labels(config: Any, sequences: int) -> Tensor:
    """Makes the labels of a classifier, of the kind that its loss is said to have."""
    if config.problem_type == "single_label_classification":
        return _integers(sequences)
    labels = config.num_labels
    shape = (sequences,) if labels == 1 else (sequences, labels)
    return torch.empty(shape)


def _field(config: Any, name: str, inputs: str) -> Any:
    value = getattr(config, name, None)
    if value is None:
        raise Refused(
            f"a {config.model_type} is given {inputs}, and its config does not say "
            f"their {name}: write it there"
        )
    return value


# In the order in which a model without ``architectures`` is taken for one: a model with
# an encoder of its own first, what sees both sides of a word next.
TASKS = (
    Task(
        "seq2seq-lm", "AutoModelForSeq2SeqLM",
        "cross entropy of the target's tokens, of a source as long as the target",
        _pairs,
    ),
    Task(
        "speech-seq2seq", "AutoModelForSpeechSeq2Seq",
        "cross entropy of the target's tokens, of the longest speech",
        _speech, counts_tokens=False,
    ),
    Task(
        "masked-lm", "AutoModelForMaskedLM",
        "cross entropy of masked tokens, with logits of all positions", _tokens,
    ),
    Task(
        "causal-lm", "AutoModelForCausalLM",
        "cross entropy of the next token, at each position", _tokens,
    ),
    Task(
        "image-classification", "AutoModelForImageClassification",
        "that of an image's label", _images, counts_tokens=False,
    ),
    Task(
        "sequence-classification", "AutoModelForSequenceClassification",
        "that of a sequence's label", _classified_tokens,
    ),
    Task(
        "token-classification", "AutoModelForTokenClassification",
        "cross entropy of each token's label", _pairs,
    ),
    Task(
        "question-answering", "AutoModelForQuestionAnswering",
        "cross entropy of an answer's two ends", _spans,
    ),
)  # fmt: skip
_BY_WORD = {task.word: task for task in TASKS}
_LABELLED = ("image-classification", "sequence-classification")


def find_task(config: Any, word: str | None, path: object) -> Task:
    """Returns what a model is trained for.

    Args:
        word: that of ``--task``; None: as the config says.
        path: of the config, for what is refused.

    Raises:
        Refused: transformers has no class of the model for that; the class that the
            config names has no loss of the table.
    """
    classes = {task.word: _classes(config, task) for task in TASKS}
    known = [x for x, names in classes.items() if names]
    script = "a SCRIPT with build(mesh) plans any step (plan --help)"
    if not known:
        raise Refused(
            f"{path}: transformers has no class of a {config.model_type} for any of "
            f"{', '.join(classes)}: {script}"
        )
    if word is not None:
        if word not in known:
            raise Refused(
                f"--task {word}: transformers has no such {config.model_type}; it has "
                f"{', '.join(known)}"
            )
        return _BY_WORD[word]
    if not config.architectures:
        # A decoder of a type that has encoders too: its config says what it is.
        is_decoder = getattr(config, "is_decoder", False) and not getattr(
            config, "is_encoder_decoder", False
        )
        is_causal = is_decoder and "causal-lm" in known
        return _BY_WORD["causal-lm" if is_causal else known[0]]
    name = config.architectures[0]
    for task in TASKS:
        if name in classes[task.word]:
            return task
    raise Refused(
        f"{path} is of a {name}, which has no loss that is known here: say -- --task "
        f"{' or '.join(known)}; or {script}"
    )


def _classes(config: Any, task: Task) -> Sequence[str]:
    """Returns the names of transformers' classes of a model for a task."""
    import transformers

    by_config: Any = getattr(transformers, task.auto)._model_mapping
    names = by_config._model_mapping.get(config.model_type)  # no class is imported
    if names is None:
        return ()
    return (names,) if isinstance(names, str) else tuple(names)


def complete_config(config: Any, task: Task) -> None:
    """Sets in a config what a run needs, and no plan depends on.

    A classifier's forward would set its kind of labels while it runs; targets begin
    with a token, whichever it is.
    """
    if task.word in _LABELLED and config.problem_type is None:
        is_one = config.num_labels == 1
        config.problem_type = "regression" if is_one else "single_label_classification"
    if config.is_encoder_decoder:
        for name in ("pad_token_id", "decoder_start_token_id"):
            if getattr(config, name, None) is None:
                setattr(config, name, 0)


def arguments(batch: PyTree) -> dict[str, Tensor]:
    """Returns what a model is called with; a language model's labels are its tokens."""
    if isinstance(batch, dict):
        return batch
    return {"input_ids": batch, "labels": batch}


def describe_loss(task: Task, config: Any) -> str:
    """Describes a task and its loss."""
    kind = str(config.problem_type or "").replace("_", " ")
    loss = f"{kind}, {task.loss}" if task.word in _LABELLED else task.loss
    is_text_alone = "vision_config" in config.sub_configs and task.counts_tokens
    return f"{task.word}: {loss}" + (", of text alone" if is_text_alone else "")
