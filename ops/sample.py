"""`isles sample`: lets trained parameters continue a text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.options import Number
from isles.proto.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from isles.workers.settings import DeviceName

DEFAULT_RUN_DIR: Final = Path("runs/demo")
MODEL_FILE: Final = "model.safetensors"


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name)
    @click.option(
        "--run-dir",
        default=None,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help=f"Use the model.safetensors in this folder of `isles up`.  [default: {DEFAULT_RUN_DIR}]",
    )
    @click.option(
        "--model",
        default=None,
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="Use this file of `isles export`.",
    )
    @click.option("--prompt", default="def ", show_default=True, metavar="TEXT", help="The beginning of the text.")
    @click.option(
        "--num-tokens",
        type=Number(1),
        default=400,
        show_default=True,
        metavar="N",
        help="How many tokens to add.",
    )
    @click.option("--temperature", default=0.7, show_default=True, metavar="X", help="0 always takes the likeliest.")
    @click.option(
        "--seed",
        type=Number(0),
        default=1,
        show_default=True,
        metavar="N",
        help="Of the choice between likely tokens.",
    )
    @click.option(
        "--device", default="auto", show_default=True, type=click.Choice(["auto", "cpu", "cuda", "mps"]), help="Where."
    )
    @click.option(
        "--task",
        default="gpt",
        show_default=True,
        metavar="gpt|MODULE:FUNCTION",
        help="The task that the file was trained on; code of one's own must be named, a file cannot bring it.",
    )
    def sample(**options: Any) -> int:
        """Print a prompt and how trained parameters continue it."""
        if options["run_dir"] is not None and options["model"] is not None:
            raise click.UsageError("give either --run-dir or --model")
        if not options["temperature"] >= 0:
            raise click.UsageError("--temperature must be at least 0")
        path = options["model"] or (options["run_dir"] or DEFAULT_RUN_DIR) / MODEL_FILE
        click.echo(continuation(path, **{key: options[key] for key in SAMPLING}))
        return 0

    return sample


SAMPLING: Final = ("prompt", "num_tokens", "temperature", "seed", "device", "task")


def continuation(
    path: Path, *, prompt: str, num_tokens: int, temperature: float, seed: int, device: DeviceName, task: str
) -> str:
    """The prompt and its continuation by the parameters in `path`. Raises UsageError for a wrong file or task."""
    description, tensors = read_parameters(path)
    trained_on = description.get("task")
    if trained_on != task:
        raise UsageError(
            f"{path} was trained on the task {trained_on!r}: say --task {trained_on} if you trust that code"
        )

    from isles.workers.device import choose_device
    from isles.workers.task import load_task

    made = load_task(task, description["task_settings"])
    model = made.build_model(int(description["seed"]))
    load_parameters(model, tensors, path)
    model = model.to(choose_device(device)).eval()
    return prompt + made.sample(model, prompt, num_tokens, temperature=temperature, seed=seed)


def read_parameters(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file of `isles export` says of itself, and its tensors. Raises UsageError."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from isles.ops.export import read_description

    description = read_description(path)
    try:
        return description, load_file(path)
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is no safetensors file that can be read: {error}") from error


def load_parameters(model: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Copies the tensors into those of the same names; the model has its frozen parameters from its seed.

    Raises UsageError if they are another model's.
    """
    try:
        missing, unexpected = model.load_state_dict(dict(tensors), strict=False)
    except RuntimeError as error:
        raise UsageError(f"{path} is of another model: {' '.join(str(error).split())[:300]}") from error
    names = {name for name, one in model.named_parameters() if one.requires_grad and one.numel()}
    lacking = sorted(names & set(missing))
    if lacking or unexpected:
        which = f"lacks {lacking[0]!r}" if lacking else f"has {unexpected[0]!r} besides"
        raise UsageError(f"{path} is of another model: it {which}")
