"""The relays of a run on one machine: one for each region, each with a store, a key and a settings file of its own."""

from __future__ import annotations

from isles.brokers.settings import BrokerSettings
from isles.ops.run_folder import RunFolder, State, choose_address, ports_of, write_whole
from isles.ops.settings import LogSettings, UpSettings
from isles.proto.config import Config
from isles.proto.errors import ConfigError
from isles.proto.key_files import client_file
from isles.proto.proofs import is_available
from isles.proto.transport.address import Address


def check_relays(settings: UpSettings, *, has_faults: bool) -> None:
    """Raises ConfigError if relays are wanted and this machine, or a run with faults on purpose, cannot have them."""
    if settings.relays and has_faults:
        raise ConfigError(
            "up.relays and --chaos do not go together: faults on purpose know no relays, and those of the network "
            "would hit links that nobody uses; start the run without one of the two"
        )
    if settings.relays and not is_available():
        raise ConfigError(
            "up.relays needs PyNaCl, which is not installed here: pip install 'isles[relay]', or start the run without "
            "relays"
        )


def choose_relay_addresses(state: State, settings: UpSettings, host: str) -> None:
    """Gives each relay of a run an address beside the broker's, in `state`: the one of the last start if it is free.

    Raises UsageError if there are not enough free ports.
    """
    taken = set(ports_of(Address.parse(state.address)))
    chosen = {}
    for name in settings.relay_names.values():
        address = choose_address(state.relays.get(name, ""), host, frozenset(taken))
        taken |= set(ports_of(address))
        chosen[name] = str(address)
    state.relays = chosen


def write_relay_settings(folder: RunFolder, state: State, config: Config) -> None:
    """Writes the settings file of each relay: the broker's settings, but for what is particular to a relay.

    Raises UsageError if the disk refuses it.
    """
    settings, broker = config.section("up", UpSettings), config.section("broker", BrokerSettings)
    log = config.section("log", LogSettings).model_copy(update={"file": None})
    if settings.relays:
        folder.make_relays()
    for region, name in settings.relay_names.items():
        own = {
            "id": name,
            "region": region,
            "port": Address.parse(state.relays[name]).control_port,
            "store": folder.relay_store(name).resolve(),
            "keys": None,
            "upstream": state.address,
            "upstream_key": client_file(folder.keys.resolve(), name),
        }
        sections = {"broker": broker.model_copy(update=own), "log": log}
        write_whole(folder.relay_config(name), Config(sections, {}).to_toml())
