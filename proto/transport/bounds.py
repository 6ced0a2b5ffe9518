"""How much is taken from a socket at once, and how much those of a broker take in and keep, each and all together."""

from __future__ import annotations

from typing import Final

from isles.proto.messages import HEADER_BYTES_MAX

FRAME_BYTES_MAX: Final = 17 << 20
"""Longest frame that libzmq takes in: the largest permitted chunk and its header; above the longest header, too."""
ARRIVALS_MAX: Final = 256
"""Messages taken from one socket before the next one has its turn: control never waits behind bulk for long."""
ARRIVAL_BYTES_MAX: Final = 32 << 20
"""Bytes taken from one socket likewise: what has been read and not yet judged is bounded, too."""
FRAME_BYTES_SPARE: Final = 65_536
"""Room in a broker's limits of frames for what encryption adds, and for what is answered rather than cut off."""
BULK_RECEIVE_HIGH_WATER: Final = 32
"""Chunks of one connection that wait to be read by the broker; those behind them wait in the network, none is lost."""
BULK_SEND_BYTES_MAX: Final = 256 << 20
"""Chunks that wait for one connection at the broker, in bytes: twice what credit lets an honest client have."""
BULK_SEND_HIGH_WATER_MIN: Final = 64
"""Chunks that may wait for a connection however long they are: one for each fetch that a client may have open."""
WAITING_BYTES_MAX: Final = 512 << 20
"""That may wait in the sockets of a broker for all connections together, in bytes, see `backlog.py`."""
CONNECTIONS_PER_KEY_MAX: Final = 4_096
"""Three for each process, and a thousand processes that share a key."""
SUBSCRIPTION_BYTES_MAX: Final = 4_096
"""Longest frame that the broker takes in on the events channel, where nothing but subscriptions arrives."""
SUBSCRIBED_BYTES_MAX: Final = 64 << 10
"""What subscribers may ask for until the events socket is opened anew; libzmq keeps some 70 bytes for each byte."""
SUBSCRIPTIONS_MAX: Final = 65_536
"""Messages taken from the events socket in one turn: they are small, and counted late they are counted in vain."""
CONTROL_RECEIVE_HIGH_WATER: Final = 16
"""Messages of one connection that wait unread at the broker, also on events; libzmq's 1000 could be 8 GiB."""
CONTROL_SEND_HIGH_WATER: Final = 256
"""Answers that wait for one connection; a client has a few asks open, and repeats what was not answered."""

assert FRAME_BYTES_MAX > HEADER_BYTES_MAX
