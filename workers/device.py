"""Where tensors are computed, from the name that a person gave."""

from __future__ import annotations

import torch

from isles.proto.errors import ConfigError
from isles.workers.settings import DeviceName


def choose_device(name: DeviceName) -> torch.device:
    """The device of that name; `auto` is the first of cuda, mps and cpu that this machine has.

    Raises ConfigError if the machine has no such device, or this build of torch cannot use it.
    """
    if name == "auto":
        name = next((one for one in ("cuda", "mps") if _has(one)), "cpu")
    if not _has(name):
        others = ", ".join(one for one in ("cpu", "cuda", "mps") if _has(one))
        raise ConfigError(
            f"device = {name}: torch {torch.__version__} finds none on this machine, only {others}: "
            "choose one of these or auto, or install a build of torch for the device"
        )
    return torch.device(name)


def _has(name: str) -> bool:
    if name == "cuda":
        return torch.cuda.is_available()
    return name == "cpu" or torch.backends.mps.is_available()
