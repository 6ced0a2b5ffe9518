"""What a run trains: model, inner optimizer, data, loss. The built-in task is `gpt`; `module:function` names another.

This file needs no tensor library, so the command line can explain every setting at once; a task imports its own.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from isles.proto.agreement import NotNegative, Positive, Scalar, Share
from isles.proto.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from isles.workers.schedule import LearningRateSchedule

BUILT_IN: Final = "gpt"
TASK_PATTERN: Final = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"


class Batches(Protocol):
    """A stream of training batches out of leased data shards; `isles.workers.data.shards.ShardReader` is one."""

    @property
    def cursors(self) -> dict[int, int]:
        """Shard -> items taken from it since the run began, of all shards held now."""

    def next_batch(self) -> Any:
        """The next batch, in whatever form the task's own `loss` takes."""

    def replace(self, leased: Mapping[int, int]) -> None:
        """Hold exactly these shards from now on, each from the larger of this cursor and its own."""

    def finished_shards(self) -> dict[int, int]:
        """Those read to their end since they were leased, with their cursors."""


class Task(Protocol):
    """Everything that a worker, an evaluator or `isles sample` asks about the model and its data.

    Two processes of a run that make the task from the same settings must get the same models, data and losses.
    """

    @property
    def settings(self) -> Mapping[str, Scalar]:
        """The resolved settings, which the run record carries to every worker."""

    @property
    def corpus_sha256(self) -> str:
        """Hexadecimal digest of the data, or an empty text when equal data cannot be checked."""

    @property
    def tokens_per_batch(self) -> int:
        """Training tokens of one batch, the unit of budgets and of weights in a merge."""

    @property
    def gradient_norm_max(self) -> float:
        """L2 norm to which gradients are clipped before each inner step; 0 = not at all."""

    @property
    def schedule(self) -> LearningRateSchedule:
        """The inner learning rate as a function of the run's progress."""

    def build_model(self, seed: int) -> nn.Module:
        """A fresh model on the CPU; equal seeds give equal parameters."""

    def make_optimizer(self, model: nn.Module) -> Optimizer:
        """The inner optimizer; the trainer sets its learning rate from `schedule` before each step."""

    def batches(self, shards: Mapping[int, int], seed: int) -> Batches:
        """A stream out of these shards (shard -> cursor); `seed` is the run's."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The scalar to minimise, on the model's device."""

    def validation_loss(self, model: nn.Module) -> float:
        """The loss on held-out data, always the same; nats per byte for a model of text."""

    def sample(self, model: nn.Module, prompt: str, num_tokens: int, *, temperature: float, seed: int) -> str:
        """A continuation of `prompt`, without it."""


REQUIRED: Final = tuple(sorted(name for name in vars(Task) if not name.startswith("_")))


class TaskSettings(BaseModel):
    """The built-in task: a byte-level GPT on the standard library's source, or on a folder of text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    corpus: Annotated[str, Field(max_length=4096)] = Field(
        default="", description="folder of text files to train on; empty = this Python's standard library"
    )
    layers: Annotated[int, Field(ge=1, le=256)] = Field(default=4, description="layers of the model")
    width: Annotated[int, Field(ge=2, le=65_536)] = Field(
        default=128, description="values per token inside the model; a multiple of twice the heads"
    )
    heads: Annotated[int, Field(ge=1, le=1024)] = Field(default=2, description="attention heads per layer")
    context: Annotated[int, Field(ge=1, le=65_536)] = Field(
        default=64, description="bytes that the model sees at once, and the length of a training row"
    )
    batch_size: Annotated[int, Field(ge=1, le=65_536)] = Field(default=4, description="rows per inner step and learner")
    learning_rate: Positive = Field(default=2e-3, description="peak of the inner learning rate")
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.05, description="share of the run in which the learning rate rises to its peak"
    )
    floor_fraction: Share = Field(default=0.1, description="last learning rate as a share of the peak")
    weight_decay: NotNegative = Field(default=0.1, description="decoupled weight decay of AdamW")
    beta1: Annotated[float, Field(ge=0, lt=1)] = Field(default=0.9, description="AdamW's decay of the mean gradient")
    beta2: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.99, description="AdamW's decay of the squared gradient"
    )
    gradient_norm_max: NotNegative = Field(default=1.0, description="clip gradients to this L2 norm; 0 = never")
    validation_windows: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        default=256, description="held-out rows, of context bytes each, that a validation loss is the mean of"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % (2 * self.heads):
            raise ValueError(
                f"task.width = {self.width} does not split into task.heads = {self.heads} heads of an even width: "
                f"make the width a multiple of {2 * self.heads}"
            )
        return self


def is_task_name(name: str) -> bool:
    """Whether `name` can name a task: `gpt`, or `module:function`."""
    return name == BUILT_IN or re.match(TASK_PATTERN, name) is not None


def load_task(name: str, settings: Mapping[str, Scalar] | None = None) -> Task:
    """Make the task that a person named on the command line; never call it with a name from the wire.

    `gpt` takes the fields of `TaskSettings`. `module:function` imports the person's own module, also from the current
    folder, and calls `function(settings)`, which returns a `Task`.

    Raises:
        ConfigError: the name or a setting is wrong.
        UsageError: the person's module cannot be imported, or its function does not return a task.
    """
    if name == BUILT_IN:
        from isles.workers.gpt_task import GPTTask

        return GPTTask(parse_settings(settings or {}))
    if not is_task_name(name):
        raise ConfigError(f"task = {name!r} names no task: write `{BUILT_IN}` or `module:function`")
    task = _call(name, settings or {})
    missing = [
        attribute for attribute in REQUIRED if not hasattr(type(task), attribute) and not hasattr(task, attribute)
    ]
    if missing:
        raise UsageError(
            f"task {name} returned an object of type {type(task).__name__} that is no task: it has no "
            f"{', '.join(missing)}; isles.workers.task.Task says what each one is"
        )
    return task


def parse_settings(settings: Mapping[str, Scalar]) -> TaskSettings:
    """Check the built-in task's settings.

    Raises:
        ConfigError: a setting is unknown or out of range; the text names each one.
    """
    try:
        return TaskSettings.model_validate(dict(settings))
    except ValidationError as error:
        faults = "; ".join(_sentence(fault["loc"], fault["msg"]) for fault in error.errors(include_url=False))
        raise ConfigError(f"the task's settings are wrong: {faults}") from error


def _sentence(location: tuple[int | str, ...], message: str) -> str:
    if not location:
        return message.removeprefix("Value error, ")
    if message.startswith("Extra inputs"):
        known = ", ".join(TaskSettings.model_fields)
        return f"there is no setting task.{location[0]}; there are {known}"
    return f"task.{location[0]}: {message}"


def _call(name: str, settings: Mapping[str, Scalar]) -> Task:
    """Import the person's module and call the function."""
    module_name, _, function_name = name.partition(":")
    folder = str(Path.cwd())
    if folder not in sys.path:
        # Appended, not put first: a person's folder must not replace an installed package of the same name.
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UsageError(
            f"task {name}: importing {module_name} failed with {type(error).__name__}: {error}; "
            f"looked in {folder} and on Python's path"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        what = "is no function" if hasattr(module, function_name) else "does not exist"
        where = getattr(module, "__file__", None) or module_name
        raise UsageError(f"task {name}: {function_name} {what} in {where}; correct the name or the file")
    try:
        task: Task = function(dict(settings))
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"task {name}: the function failed with {type(error).__name__}: {error}") from error
    return task
