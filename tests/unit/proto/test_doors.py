"""Who gets through the doors of a broker with keys, over real sockets."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq

from isles.proto.clock import SystemClock
from isles.proto.connection import Connection
from isles.proto.errors import ConfigError, RefusedError
from isles.proto.key_files import (
    client_file,
    generate_pair,
    read_client_key,
    write_client_key,
)
from isles.proto.keys import (
    AllowedKey,
    AllowList,
    BrokerKey,
    ClientKey,
    KeyPair,
)
from isles.proto.messages import HEADER_BYTES_MAX, Channel, Hello
from isles.proto.transport import curve, dialling, zmq_transport
from isles.proto.transport.address import Address
from isles.proto.transport.curve import prove_closed
from isles.proto.transport.dialling import Outcome
from isles.proto.transport.interface import Arrival
from isles.proto.transport.zmq_transport import ZmqBroker, ZmqClient, allow_descriptors

TURNS = 1500
"""Turns of a few milliseconds until a test gives up; nothing passes because of it."""
TURN_SECONDS = 0.005
BOTH_WAYS = (Channel.CONTROL, Channel.BULK)


class House:
    """A broker with keys, its allow-list, and clients; one thread turns them all."""

    def __init__(self) -> None:
        self.key = BrokerKey(**generate_pair().model_dump())
        self.allowed: AllowList = AllowList()
        self.clients: list[ZmqClient] = []
        self.arrivals: list[Arrival] = []
        self.broker = self.start(self.key)

    def start(self, key: BrokerKey | None, ports: tuple[int, int, int] = (0, 0, 0)) -> ZmqBroker:
        self.is_open = key is None
        return ZmqBroker("127.0.0.1", ports, key, lambda public: self.allowed.find(public) is not None)

    def restart(self, key: BrokerKey) -> None:
        address = self.broker.address
        self.broker.close()
        self.broker = self.start(key, (address.control_port, address.bulk_port, address.events_port))

    def make_key(
        self, *, is_allowed: bool = True, broker: tuple[str, ...] | None = None, name: str = "us"
    ) -> ClientKey:
        pair = generate_pair()
        if is_allowed:
            self.allowed = self.allowed.with_key(AllowedKey(name=name, role="worker", public=pair.public))
        return ClientKey(name=name, role="worker", **pair.model_dump(), broker=broker or (self.key.public,))

    def revoke(self, key: ClientKey) -> None:
        entry = self.allowed.find(key.public)
        assert entry is not None
        self.allowed = self.allowed.without(entry)
        self.broker.recheck()

    def dial(self, key: ClientKey | None, address: Address | None = None) -> ZmqClient:
        self.clients.append(ZmqClient(address or self.broker.address, key))
        return self.clients[-1]

    def turn(self) -> None:
        self.arrivals += self.broker.poll(TURN_SECONDS)

    def until(self, is_done: Callable[[], bool]) -> None:
        for _ in range(TURNS):
            if is_done():
                return
            self.turn()
        pytest.fail("it never happened")

    def send(self, client: ZmqClient, channel: Channel = Channel.CONTROL) -> Arrival:
        """Lets a message of a client arrive, with the key that it has by then."""
        self.arrivals.clear()

        def expected() -> str:
            return "" if client._key is None or self.is_open else client._key.public

        def has_arrived() -> bool:
            client.send(channel, b"message")
            client.poll(0.0)
            self.arrivals = [arrival for arrival in self.arrivals if arrival.key == expected()]
            return bool(self.arrivals)

        self.until(has_arrived)
        return self.arrivals[0]

    def hint(self, client: ZmqClient) -> None:
        """Lets a hint reach a client."""
        heard: list[Arrival] = []

        def has_heard() -> bool:
            self.broker.publish(b"hint")
            heard.extend(arrival for arrival in client.poll(0.0) if arrival.channel is Channel.EVENTS)
            return bool(heard)

        self.until(has_heard)

    def denial(self, client: ZmqClient) -> str:
        """Waits for a denial, while the client tries to say something all the time."""

        def is_denied() -> bool:
            for channel in BOTH_WAYS:
                client.send(channel, b"let me in")
            client.poll(0.0)
            return client.denial is not None

        self.until(is_denied)
        assert client.denial is not None
        return client.denial


@pytest.fixture(autouse=True)
def _haste(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything that is tried again is tried again soon."""
    monkeypatch.setattr(zmq_transport, "RECONNECT_MILLISECONDS", 20)
    monkeypatch.setattr(dialling, "SWITCH_SECONDS", 0.02)
    monkeypatch.setattr(dialling, "GIVEN_UP_SECONDS", 0.02)


@pytest.fixture
def house() -> Iterator[House]:
    made = House()
    yield made
    for client in made.clients:
        client.close()
    made.broker.close()


# ------------------------------------------------------------------------------------------------------- who is let in


def test_a_message_names_the_key_that_its_sender_proved(house: House) -> None:
    keys = [house.make_key(name=name) for name in ("us", "eu")]
    clients = [house.dial(key) for key in keys]
    for channel in BOTH_WAYS:
        for client, key in zip(clients, keys, strict=True):
            assert house.send(client, channel).key == key.public
    for client in clients:
        house.hint(client)


def test_a_broker_without_keys_knows_no_key() -> None:
    house = House()
    house.broker.close()
    house.broker = house.start(None)
    client = house.dial(None)
    assert house.send(client).key == ""
    client.close()
    house.broker.close()


def test_an_unknown_key_is_refused_at_every_socket_and_says_so(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    client = house.dial(house.make_key(is_allowed=False))
    seen: set[tuple[Channel, Outcome]] = set()
    handle = client._dialling.handle

    def listen(channel: Channel, outcome: Outcome, now: float) -> None:
        seen.add((channel, outcome))
        if {place for place, what in seen if what is Outcome.REFUSED} == set(Channel):
            handle(channel, outcome, now)

    monkeypatch.setattr(client._dialling, "handle", listen)
    assert house.denial(client).startswith("the key of worker us does not stand in the allow-list of this broker")
    assert Outcome.OPENED not in {outcome for _, outcome in seen}
    assert house.arrivals == []
    assert client.send(Channel.CONTROL, b"anyway") is False


def test_without_a_key_nobody_is_let_in_and_it_says_so(house: House) -> None:
    assert house.denial(house.dial(None)).startswith("nobody is let in here without a key")
    assert house.arrivals == []


def test_a_key_is_not_shown_to_a_broker_without_keys() -> None:
    house = House()
    house.broker.close()
    house.broker = house.start(None)
    client = house.dial(house.make_key())
    assert house.denial(client).startswith("this broker has no keys, but this process was given the key of worker us")
    assert house.arrivals == []
    client.close()
    house.broker.close()


@pytest.mark.parametrize("num_keys", [1, 2])
def test_a_broker_that_has_another_key_is_not_talked_to_and_it_says_so(house: House, num_keys: int) -> None:
    others = tuple(generate_pair().public for _ in range(num_keys))
    client = house.dial(house.make_key(broker=others))
    assert house.denial(client).startswith("this broker is not the one that the key of worker us was made for")
    assert house.arrivals == []


def test_a_port_where_everybody_is_hung_up_on_is_no_denial(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "PROBE_SECONDS", 0.05)
    probes: list[bool] = []
    with forwarder_without_a_broker() as address:
        client = house.dial(house.make_key(name="eu"), address)
        monkeypatch.setattr(client._dialling, "probed", lambda *, has_keys: probes.append(has_keys))
        house.until(lambda: client.poll(0.0) == [] and len(probes) >= 3)
    assert not any(probes)
    assert client.denial is None


@pytest.mark.parametrize("has_key", [True, False])
def test_a_denial_ends_whoever_waits_for_the_broker_with_its_sentence(house: House, has_key: bool) -> None:
    stop = threading.Event()

    def turn() -> None:
        while not stop.is_set():
            house.turn()

    thread = threading.Thread(target=turn)
    thread.start()
    hello = Hello(role="operator", id="me", incarnation="ab" * 8)
    key = house.make_key(is_allowed=False) if has_key else None
    connection = Connection(hello, house.dial(key), SystemClock())
    try:
        with pytest.raises(RefusedError, match=r"\(denied\): (the key of worker us does not|nobody is let in here)"):
            connection.wait_for_welcome(60.0, address="here")
        assert connection.client.is_refused
    finally:
        stop.set()
        thread.join()


# ----------------------------------------------------------------------------------------------- revocation, rotation


def test_a_revoked_key_hears_no_hints_and_ends_while_others_go_on(house: House) -> None:
    keys = {name: house.make_key(name=name) for name in ("us", "eu")}
    clients = {name: house.dial(key) for name, key in keys.items()}
    for client in clients.values():
        house.hint(client)
        house.send(client)
    house.revoke(keys["us"])
    assert "us does not stand in the allow-list" in house.denial(clients["us"])
    house.hint(clients["eu"])
    assert clients["us"].poll(0.0) == []
    # Whatever a revoked process had sent arrives with its key: the router sees that nobody has it any more.
    assert {arrival.key for arrival in house.arrivals} <= {key.public for key in keys.values()}
    assert house.allowed.find(keys["us"].public) is None
    assert house.send(clients["eu"]).key == keys["eu"].public


def test_the_events_port_is_given_back_and_taken_again_any_number_of_times(house: House) -> None:
    client = house.dial(house.make_key())
    for _ in range(5):
        house.broker.recheck()
        house.hint(client)
    assert client.denial is None


def test_an_events_port_that_somebody_else_took_ends_the_broker(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_transport, "REOPEN_SECONDS", 0.0)
    monkeypatch.setattr(house.broker, "_listen", refuse_to_listen(house.broker))
    with pytest.raises(ConfigError, match="taken"):
        house.until(lambda: house.broker.recheck() is not None)


def refuse_to_listen(broker: ZmqBroker) -> Callable[[Channel, int], int]:
    def listen(channel: Channel, port: int) -> int:
        broker._open(channel, zmq.XPUB)
        raise ConfigError("taken")

    return listen


def test_a_running_client_changes_over_to_the_key_in_its_file(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "KEY_CHECK_SECONDS", 0.0)
    path = client_file(tmp_path, "us")
    old = house.make_key()
    write_client_key(path, old)
    client = house.dial(read_client_key(path))
    assert house.send(client).key == old.public
    new = house.make_key()
    write_client_key(path, new)
    house.until(lambda: house.send(client).key == new.public)
    house.revoke(old)
    house.hint(client)
    assert (house.send(client).key, client.denial) == (new.public, None)


def test_a_client_that_knows_the_next_key_of_its_broker_comes_back_after_the_change(house: House) -> None:
    following = BrokerKey(**generate_pair().model_dump())
    key = house.make_key(broker=(house.key.public, following.public))
    client = house.dial(key)
    house.send(client)
    house.restart(following)
    for channel in BOTH_WAYS:
        assert house.send(client, channel).key == key.public
    house.hint(client)


def test_a_running_client_learns_the_next_key_of_its_broker_from_its_file(
    house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_transport, "KEY_CHECK_SECONDS", 0.0)
    path = client_file(tmp_path, "us")
    key = house.make_key()
    write_client_key(path, key)
    client = house.dial(read_client_key(path))
    house.send(client)
    following = BrokerKey(**generate_pair().model_dump())
    write_client_key(path, key.model_copy(update={"broker": (house.key.public, following.public)}))
    house.restart(following)
    assert house.send(client).key == key.public
    house.hint(client)


# ----------------------------------------------------------------------------------------------------- failing closed


def test_an_allow_list_that_fails_lets_nobody_in_and_works_again_afterwards(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = house.make_key()
    sound = house.allowed
    monkeypatch.setattr(house, "allowed", None)
    assert "does not stand in the allow-list" in house.denial(house.dial(key))
    house.allowed = sound
    assert house.send(house.dial(key)).key == key.public


def heard_by(client: ZmqClient, monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What the monitors of a client report from now on."""
    outcomes: list[Outcome] = []
    handle = client._dialling.handle

    def listen(channel: Channel, outcome: Outcome, now: float) -> None:
        outcomes.append(outcome)
        handle(channel, outcome, now)

    monkeypatch.setattr(client._dialling, "handle", listen)
    return outcomes


def test_nobody_is_let_in_when_nobody_answers_at_the_door(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = house.broker._doors
    assert doors is not None
    house.broker._poller.unregister(doors.socket)
    doors.close()
    house.broker._doors = None
    monkeypatch.setattr(zmq_transport, "HANDSHAKE_MILLISECONDS", 200)  # some wait for an answer that never comes
    client = house.dial(house.make_key())
    outcomes = heard_by(client, monkeypatch)
    house.until(lambda: client.poll(0.0) == [] and outcomes.count(Outcome.CUT) >= 3)
    assert Outcome.OPENED not in outcomes
    assert house.arrivals == []


def test_a_broker_that_lets_everybody_in_does_not_start(house: House) -> None:
    with pytest.raises(ConfigError, match=r"let an unknown key in at tcp://127.0.0.1:.* tried its own doors"):
        ZmqBroker("127.0.0.1", keys=house.key, is_allowed=lambda public: True)


@contextmanager
def left_open(kind: str, key: BrokerKey, channel: Channel) -> Iterator[int]:
    """The port of a socket at which something was forgotten."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    opened = context.socket(zmq.XPUB if channel is Channel.EVENTS else zmq.ROUTER)
    opened.linger = 0
    if kind != "no keys":
        opened.setsockopt(zmq.CURVE_SERVER, 1)
        opened.setsockopt(zmq.CURVE_SECRETKEY, key.secret.encode())
    if kind == "a domain that is not enforced":
        opened.setsockopt_string(zmq.ZAP_DOMAIN, "isles")
    opened.bind("tcp://127.0.0.1:*")
    try:
        yield int(opened.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
    finally:
        opened.close()
        context.term()


@pytest.mark.parametrize("channel", list(Channel))
@pytest.mark.parametrize("kind", ["no keys", "no domain", "a domain that is not enforced"])
def test_the_self_test_finds_the_one_door_that_is_open(house: House, channel: Channel, kind: str) -> None:
    with left_open(kind, house.key, channel) as port:
        ports = dict(zip(Channel, ports_of(house.broker), strict=True)) | {channel: port}
        address = Address("127.0.0.1", *ports.values())
        with pytest.raises(ConfigError, match=f"in at {address.of(channel)} when it tried its own doors"):
            prove_closed(address, house.key.public, house.turn)


def test_a_door_that_does_not_answer_the_self_test_is_no_proof(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "SELF_TEST_SECONDS", 0.1)
    with pytest.raises(
        ConfigError, match=r"strangers were not refused at tcp://\S+, tcp://\S+, tcp://\S+ within 0.1 s"
    ):
        prove_closed(house.broker.address, house.key.public, lambda: None)


def test_halves_that_do_not_belong_together_are_found_at_once(house: House) -> None:
    mixed = {"public": generate_pair().public, "secret": generate_pair().secret}
    with pytest.raises(ConfigError, match="the broker's key is damaged"):
        ZmqBroker("127.0.0.1", keys=BrokerKey(**mixed))
    with pytest.raises(ConfigError, match="the key of worker us is damaged"):
        ZmqClient(house.broker.address, house.make_key().model_copy(update=mixed))


# ------------------------------------------------------------------------------------------------------- bad company


def test_strangers_who_knock_all_the_time_do_not_stop_those_inside(house: House) -> None:
    honest = house.dial(house.make_key())
    house.send(honest)
    silent = [socket.create_connection(("127.0.0.1", port)) for port in ports_of(house.broker) for _ in range(50)]
    for one in silent[::2]:
        one.sendall(b"\xff" + bytes(8) + b"\x7f")
    strangers = [house.dial(house.make_key(is_allowed=False)) for _ in range(5)]
    late = house.dial(house.make_key(name="late"))
    for stranger in strangers:
        assert house.denial(stranger)
        assert house.send(honest).key == honest._key.public
    assert house.send(late).key == late._key.public
    house.hint(honest)
    for one in silent:
        one.close()


def test_garbage_at_a_port_costs_its_sender_the_connection_and_nobody_else(house: House) -> None:
    honest = house.dial(house.make_key())
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(64),
        b"\xff" * 4096,
        b"\xff" + bytes(8) + b"\x7f\x03" + bytes(500),
    ):
        for port in ports_of(house.broker):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(garbage)
                house.send(honest)
    assert {arrival.key for arrival in house.arrivals} == {honest._key.public}


def test_a_damaged_byte_costs_one_connection_not_the_socket(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    with relay(house.broker.address.control_port, num_damaged=3) as port:
        client = house.dial(house.make_key(), with_control_port(house.broker.address, port))
        lost: list[Channel] = []
        due = client._dialling.due
        monkeypatch.setattr(client._dialling, "due", lambda now: (lost.extend(found := due(now)), found)[1])
        house.until(lambda: client.poll(0.0) == [] and len(lost) >= 3)
        assert set(lost) == {Channel.CONTROL}
        house.send(client)
        client.close()


def ports_of(broker: ZmqBroker) -> tuple[int, int, int]:
    return broker.address.control_port, broker.address.bulk_port, broker.address.events_port


def with_control_port(address: Address, port: int) -> Address:
    return Address(address.host, port, address.bulk_port, address.events_port)


GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)


def test_a_stranger_fills_no_longer_frame_than_a_message_of_ours_may_have(house: House) -> None:
    house.broker.close()
    house.broker = ZmqBroker("127.0.0.1", keys=house.key, chunk_bytes=4096)
    longest = {Channel.CONTROL: HEADER_BYTES_MAX, Channel.BULK: 4096, Channel.EVENTS: 0}
    for channel, port in zip(Channel, ports_of(house.broker), strict=True):
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(GREETING)
            size = longest[channel] + (1 << 20)
            stranger.sendall(b"\x06" + size.to_bytes(8, "big"))
            stranger.setblocking(False)  # it is told off by the length alone, before a byte of it is there
            house.until(lambda: is_hung_up(stranger))


def is_hung_up(one: socket.socket) -> bool:
    try:
        return not one.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_broker_may_have_all_the_descriptors_that_its_machine_permits() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1] // 2, before[1]))
    try:
        assert allow_descriptors() == before[1]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def forwarder_without_a_broker() -> Iterator[Address]:
    """Three ports where every connection is taken and closed, as a forwarder does whose broker is away."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in Channel]

    def hang_up(listener: socket.socket) -> None:
        while True:
            try:
                listener.accept()[0].close()
            except OSError:
                return

    threads = [threading.Thread(target=hang_up, args=(listener,)) for listener in listeners]
    for thread in threads:
        thread.start()
    yield Address("127.0.0.1", *(listener.getsockname()[1] for listener in listeners))
    stop(listeners, threads)


@contextmanager
def relay(target: int, num_damaged: int) -> Iterator[int]:
    """A port in front of another one; of the first connections it damages the greeting that comes back."""
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []
    pairs: list[socket.socket] = []

    def pump(source: socket.socket, sink: socket.socket, is_damaged: bool) -> None:
        try:
            while data := source.recv(4096):
                sink.sendall(bytes([data[0] ^ 0x40]) + data[1:] if is_damaged else data)
        except OSError:
            pass
        for one in (source, sink):
            with_shutdown(one)

    def serve() -> None:
        number = 0
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", target))
            pairs.extend((near, far))
            for source, sink, is_back in ((near, far, False), (far, near, True)):
                threads.append(threading.Thread(target=pump, args=(source, sink, is_back and number < num_damaged)))
                threads[-1].start()
            number += 1

    threads.append(threading.Thread(target=serve))
    threads[0].start()
    yield listener.getsockname()[1]
    stop([listener, *pairs], threads)


def with_shutdown(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)


def stop(sockets: list[socket.socket], threads: list[threading.Thread]) -> None:
    for one in sockets:
        with_shutdown(one)
    for thread in list(threads):
        thread.join()
    for one in sockets:
        one.close()


def test_a_pair_is_shown_without_its_secret() -> None:
    pair = KeyPair(**generate_pair().model_dump())
    assert pair.secret not in repr(pair)
