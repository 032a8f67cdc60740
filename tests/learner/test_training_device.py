"""What a learner trains on: the processor, unless the run has a GPU."""

from __future__ import annotations

import logging

import pytest
import torch

from user_sys.errors import ConfigError
from user_sys.learner.config import training_device, training_stream
from user_sys.weights.gpu_copy import HostCopier

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")


def test_the_processor_is_taken_where_no_gpu_was_asked_for() -> None:
    assert training_device("auto", reserved=False) == "cpu"
    assert training_device("cpu", reserved=True) == "cpu"


@pytest.mark.gpu
def test_a_gpu_is_taken_where_one_was_asked_for() -> None:
    assert training_device("auto", reserved=True) == training_device("cuda", reserved=False) == "cuda"


@pytest.mark.gpu
def test_training_goes_ahead_of_pushes() -> None:
    copies, usual = HostCopier(torch.device("cuda")), torch.cuda.current_stream()
    with training_stream("cuda"):
        training = torch.cuda.current_stream()
        assert training != usual and copies._stream is not None
        assert training.priority < copies._stream.priority == 0  # CUDA has the more urgent below the less
    assert torch.cuda.current_stream() == usual


@WITHOUT_GPU
def test_a_gpu_that_torch_cannot_use_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match=r"learner\.device is cuda, and torch .* finds no GPU on \S+$"):
        training_device("cuda", reserved=True)
    with caplog.at_level(logging.WARNING):
        assert training_device("auto", reserved=True) == "cpu"
    assert "finds no GPU" in caplog.text
