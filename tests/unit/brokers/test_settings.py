"""The settings of a broker: what contradicts itself is refused with the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from isles.brokers.limits import RoutingSettings
from isles.brokers.settings import BrokerSettings


def test_the_defaults_agree_with_each_other() -> None:
    settings = BrokerSettings()
    assert (settings.host, settings.ports) == ("127.0.0.1", (7700, 7701, 7702))
    assert BrokerSettings(port=0).ports == (0, 0, 0)


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0", "tcp://192.168.1.5", "tcp://broker", "tcp://[::]", "tcp://*"])
def test_an_address_that_others_reach_needs_keys(bind: str) -> None:
    with pytest.raises(ValidationError, match=r"there are no keys|pattern"):
        BrokerSettings(bind=bind)


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1", "tcp://localhost", "tcp://[::1]", "tcp://127.9.9.9"])
def test_loopback_needs_no_keys(bind: str) -> None:
    assert BrokerSettings(bind=bind).bind == bind


def test_with_keys_any_address_is_taken() -> None:
    assert BrokerSettings(bind="tcp://0.0.0.0", keys=Path("keys")).host == "0.0.0.0"


def test_a_relay_needs_its_key_where_others_reach_it() -> None:
    with pytest.raises(ValidationError, match="role relay"):
        BrokerSettings(bind="tcp://0.0.0.0", upstream="tcp://home:7700")
    settings = BrokerSettings(bind="tcp://0.0.0.0", upstream="tcp://home:7700", upstream_key=Path("relay-us.key"))
    assert (settings.ack, settings.upstream_connections) == ("home", 1)


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"upstream_key": Path("relay-us.key")}, "upstream is not set"),
        ({"upstream": "tcp://home:7700", "keys": Path("keys")}, "upstream_key"),
        ({"upstream": "home"}, "tcp://HOST:PORT"),
    ],
)
def test_a_broker_is_either_a_home_broker_or_a_relay(fields: dict[str, object], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        BrokerSettings(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "remedy"),
    [
        ({"heartbeat_seconds": 5.0}, "raise the first or lower the second"),
        ({"session_idle_seconds": 5.0}, "raise the first"),
        ({"blob_bytes_max": 2**40}, "raise the first or lower the second"),
        ({"flight_bytes_max": 1 << 20}, "raise the first"),
    ],
)
def test_settings_that_contradict_each_other_are_refused_with_the_remedy(fields: dict[str, float], remedy: str) -> None:
    with pytest.raises(ValidationError, match=remedy):
        RoutingSettings(**fields)  # type: ignore[arg-type]


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(ValidationError, match="Extra inputs"):
        BrokerSettings(colour="red")  # type: ignore[call-arg]


def test_every_setting_is_explained() -> None:
    assert [name for name, field in BrokerSettings.model_fields.items() if not field.description] == []
