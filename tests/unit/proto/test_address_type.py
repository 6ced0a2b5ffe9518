"""The setting that names a broker is checked where it is given."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from isles.proto.transport.address import BrokerAddress

ADDRESS: TypeAdapter[str] = TypeAdapter(BrokerAddress)


@pytest.mark.parametrize("text", ["tcp://127.0.0.1:7700", "tcp://host:1,2,3", "tcp://[::1]:7700"])
def test_an_address_stays_as_it_was_written(text: str) -> None:
    assert ADDRESS.validate_python(text) == text


@pytest.mark.parametrize(
    "text", ["localhost", "http://host:1", "tcp://host:0", "tcp://host:1,2", "tcp://h:" + "1" * 600]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        ADDRESS.validate_python(text)
