"""The client of Redis servers against servers that are none: bounded in time and in bytes."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from perfuse.cache.resp import RedisAddress, command, encoded

Answer = Callable[[socket.socket], None]


@contextmanager
def answering(answer: Answer) -> Iterator[RedisAddress]:
    """A block with a server that answers one connection in its own way."""

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            try:
                connection.recv(1 << 16)
                answer(connection)
            except OSError:
                return  # the client has gone

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield RedisAddress("127.0.0.1", listener.getsockname()[1])
        thread.join(10)
        assert not thread.is_alive()


def saying(data: bytes) -> Answer:
    return lambda connection: connection.sendall(data)


def in_pieces(data: bytes) -> Answer:
    def answer(connection: socket.socket) -> None:
        for k in range(len(data)):
            connection.sendall(data[k : k + 1])
            time.sleep(0.001)

    return answer


def without_end(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x" * 1000)


def trickling(connection: socket.socket) -> None:
    connection.sendall(b"$100\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


REPLIES = {
    b"+OK\r\n": "OK",
    b":12\r\n": 12,
    b"$5\r\na\r\nbc\r\n": b"a\r\nbc",
    b"$0\r\n\r\n": b"",
    b"$-1\r\n": None,
}


@pytest.mark.parametrize("data", REPLIES, ids=repr)
@pytest.mark.parametrize("way", [saying, in_pieces])
def test_replies(data: bytes, way: Callable[[bytes], Answer]) -> None:
    with answering(way(data)) as address:
        assert command(address, "GET", "a", timeout_s=10) == REPLIES[data]


UNUSABLE: dict[str, tuple[Answer, type[Exception]]] = {
    "an error": (saying(b"-ERR no\r\n"), ConnectionError),
    "an error of a key": (saying(b"-WRONGTYPE no\r\n"), ValueError),
    "HTTP": (saying(b"HTTP/1.1 400 Bad Request\r\n\r\n"), ConnectionError),
    "nothing": (saying(b""), ConnectionError),
    "half a line": (saying(b"$1"), ConnectionError),
    "half a value": (saying(b"$10\r\nabc"), ConnectionError),
    "a length that is none": (saying(b"$ten\r\n"), ConnectionError),
    "a huge length": (saying(b"$99999999999\r\n"), ValueError),
    "a line without end": (without_end, ConnectionError),
    "one byte at a time": (trickling, TimeoutError),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_replies_end_soon(name: str) -> None:
    answer, error = UNUSABLE[name]
    start = time.monotonic()
    with answering(answer) as address, pytest.raises(error):
        command(address, "GET", "a", timeout_s=0.5, most_bytes=1000)
    assert time.monotonic() - start < 5


def test_a_port_that_nobody_listens_on() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RedisAddress("127.0.0.1", listener.getsockname()[1])
    with pytest.raises(OSError):
        command(address, "PING", timeout_s=1)


def test_plain_text_where_encryption_is_expected() -> None:
    with answering(saying(b"+OK\r\n")) as address, pytest.raises(OSError):
        encrypted = RedisAddress(address.host, address.port, is_encrypted=True)
        command(encrypted, "PING", timeout_s=1)


def certificate(folder: Path, host: str) -> Path:
    """A new private key with a certificate that it signed itself, in one file."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a test")])
    now = datetime.datetime.now(datetime.UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1))
    made = made.not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    signed = made.sign(key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path = folder / f"{host}.pem"
    path.write_bytes(private + signed.public_bytes(pem))
    return path


@contextmanager
def encrypted_server(pem: Path) -> Iterator[RedisAddress]:
    """A block with a server that expects encryption and answers one command."""

    def serve() -> None:
        connection, _ = listener.accept()
        try:
            with encryption.wrap_socket(connection, server_side=True) as encrypted:
                encrypted.recv(1 << 16)
                encrypted.sendall(b"+PONG\r\n")
        except OSError:
            connection.close()  # the client does not trust us

    encryption = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    encryption.load_cert_chain(pem)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield RedisAddress("localhost", listener.getsockname()[1], is_encrypted=True)
        thread.join(10)


@pytest.mark.parametrize(
    ("host", "is_trusted"), [("localhost", True), ("localhost", False), ("elsewhere", True)]
)
def test_certificates_are_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, is_trusted: bool
) -> None:
    pem = certificate(tmp_path, host)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(pem))
    with encrypted_server(pem) as address:
        if host == "localhost" and is_trusted:
            assert command(address, "PING", timeout_s=10) == "PONG"
            return
        with pytest.raises(ssl.SSLCertVerificationError):
            command(address, "PING", timeout_s=10)


def test_commands_are_arrays_of_strings_with_their_lengths() -> None:
    assert encoded(("SET", "a\r\n", b"\x00\xa9")) == (
        b"*3\r\n$3\r\nSET\r\n$3\r\na\r\n\r\n$2\r\n\x00\xa9\r\n"
    )
