"""Sentences as numbers: hashed words for learned embeddings, or the vectors of a pretrained encoder."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from hal.errors import install_hint
from user_sys.errors import ConfigError

VOCABULARY = 512  # of hashed words; 0 is no word
HASHED_WORDS = 12  # of a sentence; further ones are left out
_WORD = re.compile(r"\w+")
_CACHED = 4096  # sentences
_KEY = "policy.options.text_encoder"


def hash_words(sentences: Sequence[str]) -> Tensor:
    """Returns the words of each sentence as numbers below `VOCABULARY`, int64 (m, HASHED_WORDS), 0 after the last."""
    return torch.tensor([_hashed(sentence) for sentence in sentences]).view(len(sentences), HASHED_WORDS)


@lru_cache(_CACHED)
def _hashed(sentence: str) -> tuple[int, ...]:
    words = _WORD.findall(sentence.lower())[:HASHED_WORDS]
    numbers = [1 + zlib.crc32(word.encode()) % (VOCABULARY - 1) for word in words]
    return (*numbers, *(0 for _ in range(HASHED_WORDS - len(numbers))))


class PretrainedTextEncoder:
    """A transformer of sentences that stays as it is: the mean of its last hidden states, of unit length.

    It is no part of a policy's weights. All policies of a process share one, and each sentence is encoded once.

    Attributes:
        size: k, elements of a vector.
    """

    def __init__(self, folder: str) -> None:
        """Reads the configuration; the weights are read at the first sentence. Raises ConfigError."""
        try:
            from transformers import AutoConfig
        except ImportError as error:
            raise ConfigError(f"{_KEY} needs transformers: {install_hint('vla')}") from error
        self._folder = folder
        self._model: Any = None
        try:
            self.size = int(AutoConfig.from_pretrained(folder).hidden_size)
        except (OSError, ValueError, AttributeError) as error:
            raise ConfigError(f"{_KEY}: {folder!r} has no encoder of sentences: {_first_line(error)}") from error
        self._encode = lru_cache(_CACHED)(self._encode_one)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def encode(self, sentences: Sequence[str]) -> Tensor:
        """Returns a vector of each sentence, float32 (m, size). Raises ConfigError: it cannot be loaded."""
        return torch.stack([self._encode(sentence) for sentence in sentences])

    @torch.no_grad()
    def _encode_one(self, sentence: str) -> Tensor:
        if self._model is None:
            self._load()
        tokens = self._tokenizer(sentence, truncation=True, max_length=128, return_tensors="pt")
        hidden = self._model(**tokens).last_hidden_state[0]
        vector: Tensor = torch.nn.functional.normalize(hidden.mean(0), dim=0)
        scaled: Tensor = vector * self.size**0.5  # elements of about 1, as of other inputs
        return scaled

    def _load(self) -> None:
        from transformers import AutoModel, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it untyped
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(self._folder)
            self._model = AutoModel.from_pretrained(self._folder).eval().requires_grad_(False)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{_KEY}: {self._folder!r} cannot be loaded: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


@cache
def load_text_encoder(name: str) -> PretrainedTextEncoder:
    """The encoder in the folder `name`, in the folder ``model`` of the installed package `name`, or on the hub.

    Raises:
        ConfigError: there is none, or transformers is not installed.
    """
    if Path(name).is_dir():
        return PretrainedTextEncoder(name)
    package = find_spec(name) if name.isidentifier() else None
    for place in (package.submodule_search_locations or ()) if package else ():
        if (Path(place) / "model").is_dir():
            return PretrainedTextEncoder(str(Path(place) / "model"))
    return PretrainedTextEncoder(name)
