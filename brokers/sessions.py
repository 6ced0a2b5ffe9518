"""Who is connected: sessions by token, with where to answer them. Pure; nothing here is durable."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from isles.proto.messages import Channel, Hello, Role


@dataclass
class Session:
    """One incarnation of one process that said HELLO."""

    token: str
    role: Role
    id: str
    incarnation: str
    region: str
    heard_at: float
    connections: dict[Channel, bytes] = field(default_factory=dict)
    """Where it was last heard on each channel."""
    has_left: bool = False

    @property
    def owner(self) -> tuple[str, str]:
        """Role and id: the same for all incarnations of a process."""
        return self.role, self.id


@dataclass
class Sessions:
    """All open sessions; at most one per incarnation, so that a repeated HELLO gets the answer it got before."""

    draw_token: Callable[[], str]
    num_max: int
    _by_token: dict[str, Session] = field(default_factory=dict)
    _by_identity: dict[tuple[str, str, str], Session] = field(default_factory=dict)

    def open(self, hello: Hello, connection: bytes, now: float) -> tuple[Session, bool] | None:
        """The session of who says HELLO, and whether it is new or had ended; None if there are too many."""
        identity = (hello.role, hello.id, hello.incarnation)
        session = self._by_identity.get(identity)
        is_new = session is None or session.has_left
        if session is None:
            if len(self._by_token) >= self.num_max:
                return None
            token = self.draw_token()
            session = Session(token, hello.role, hello.id, hello.incarnation, hello.region, now)
            self._by_token[token] = self._by_identity[identity] = session
        session.heard_at, session.has_left = now, False
        session.connections = {Channel.CONTROL: connection}
        return session, is_new

    def hear(self, token: str, channel: Channel, connection: bytes, now: float) -> Session | None:
        """The session that a message belongs to, whichever connection it came on; None if there is none."""
        session = self._by_token.get(token)
        if session is not None:
            session.heard_at = now
            session.connections[channel] = connection
        return session

    def get(self, token: str) -> Session | None:
        return self._by_token.get(token)

    def forget_idle(self, heard_before: float) -> list[Session]:
        """Ends and returns the sessions that were last heard before a time."""
        idle = [session for session in self._by_token.values() if session.heard_at < heard_before]
        for session in idle:
            del self._by_token[session.token]
            del self._by_identity[session.role, session.id, session.incarnation]
        return idle
