"""`isles export`: the global parameters as a safetensors file, by the model's own tensor names."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from isles.ops.options import Patience
from isles.ops.reach import Reach, key_in, key_option
from isles.proto.errors import UsageError

if TYPE_CHECKING:
    from isles.ops.run_folder import RunFolder
    from isles.proto.agreement import RunRecord
    from isles.workers.parameters import GlobalParameters

METADATA_KEY: Final = "isles"
"""Key of the file's metadata under which a JSON object says what the parameters are of."""

HEADER_BYTES_MAX: Final = 100 << 20
"""The limit of the format's own library."""


def build(name: str) -> click.Command:
    """The command."""

    @click.command(name)
    @click.option("--broker", default=None, metavar="ADDRESS", help="Take them from the broker at this address.")
    @click.option(
        "--run-dir",
        default=None,
        type=click.Path(path_type=Path),
        metavar="DIR",
        help="Take them from this folder of `isles up`, whether it is running or not.",
    )
    @click.option(
        "--output",
        required=True,
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="The file to write; one that exists is replaced.",
    )
    @click.option(
        "--timeout", default=120.0, type=Patience(), show_default=True, metavar="SECONDS", help="How long it may take."
    )
    def export(broker: str | None, key: Path | None, run_dir: Path | None, output: Path, timeout: float) -> int:
        """Write the newest global parameters as a safetensors file.

        The tensors have the model's own names, so `load_state_dict` takes them; the file's metadata says which run,
        task and versions they are.
        """
        if (broker is None) == (run_dir is None):
            raise click.UsageError("give either --broker or --run-dir")
        if broker is not None:
            text = write_parameters(Reach(broker, key), output, timeout)
        else:
            assert run_dir is not None
            with broker_of(run_dir, timeout) as reach:
                text = write_parameters(reach, output, timeout)
        click.echo(text)
        return 0

    export.params.insert(1, key_option())
    return export


def read_description(path: Path) -> dict[str, Any]:
    """What a file that isles wrote says of itself; needs no tensor library. Raises UsageError for any other file."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > HEADER_BYTES_MAX:
                raise ValueError(f"its header claims {length} bytes")
            description = json.loads(json.loads(file.read(length))["__metadata__"][METADATA_KEY])
    except FileNotFoundError:
        raise UsageError(
            f"there is no file {path}: a run writes it when it ends, `isles export` writes one while it runs"
        ) from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is no safetensors file that isles wrote ({type(error).__name__}: {error})") from error
    if not isinstance(description, dict) or not {"task", "task_settings", "seed"} <= description.keys():
        raise UsageError(f"{path} does not say what it was trained on: use a file that isles wrote")
    return description


@contextmanager
def broker_of(run_dir: Path, timeout: float) -> Iterator[Reach]:
    """The broker of a run folder; if the run is stopped, one is started for the while."""
    from isles.ops.run_folder import RunFolder

    if not (run_dir / "store").is_dir():
        raise UsageError(f"{run_dir} is no run folder: it has no store; name the --run-dir that `isles up` was given")
    folder = RunFolder(run_dir)
    if folder.is_locked():
        yield Reach(folder.read_state().address, key_in(run_dir))
        return
    with folder, broker_for_a_while(folder, timeout) as reach:
        yield reach


@contextmanager
def broker_for_a_while(folder: RunFolder, timeout: float) -> Iterator[Reach]:
    """A broker that is started on the store of a locked run folder, and stopped in the end."""
    from isles.ops.children import ChildProcess, child_environment
    from isles.ops.run_folder import choose_address
    from isles.ops.run_keys import make_run_keys

    address, key = choose_address(""), make_run_keys(folder.keys)
    arguments = ["broker", "--store", str(folder.store), "--port", str(address.control_port), "--exit-with-parent"]
    arguments += ["--log-file", str(folder.log("broker")), "--keys", str(folder.keys)]
    child = ChildProcess(arguments, output=folder.errors("broker"), environment=child_environment(1))
    try:
        yield Reach(str(address), key)
    finally:
        child.terminate()
        child.wait(timeout)
        child.close()
        folder.tidy()


def write_parameters(reach: Reach, output: Path, timeout: float) -> str:
    """Fetches the newest version of every fragment and writes the file; returns one sentence about it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    from isles.ops.wording import amount
    from isles.workers.parameters import ParameterFetcher

    address, connection = reach.address, reach.connect()
    try:
        record = connection.wait_for_welcome(timeout, address=address).welcome.run_record
        if record is None:
            raise UsageError(f"the broker at {address} has no parameters yet: the first worker brings them")
        parameters = ParameterFetcher(connection, record, address=address, timeout_seconds=timeout).newest()
    finally:
        connection.close()
    tensors = {name: values.contiguous().clone() for name, values in parameters.tensors().items()}
    temporary = output.with_name(f"{output.name}.tmp")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(describe(record, parameters), sort_keys=True)})
        temporary.chmod(0o666 & ~_umask())  # the library makes files that nobody else may read
        temporary.replace(output)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            temporary.unlink()
        raise UsageError(f"{output} cannot be written: {getattr(error, 'strerror', None) or error}") from error
    return f"wrote {amount(sum(values.numel() for values in tensors.values()))} parameters to {output}"


def _umask() -> int:
    """What this process leaves out when it makes a file; can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def describe(record: RunRecord, parameters: GlobalParameters) -> dict[str, object]:
    """What a reader of the file wants to know; task and settings are enough to build the model again."""
    return {
        "run": record.run,
        "seed": record.seed,
        "task": record.task,
        "task_settings": dict(record.task_settings),
        "corpus_sha256": record.corpus_sha256,
        "manifest_digest": record.manifest_digest,
        "tokens": parameters.tokens,
        "versions": [version for _, version in sorted(parameters.versions.items())],
    }
