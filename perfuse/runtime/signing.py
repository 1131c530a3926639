"""Ed25519 signatures of artefacts: they prove who compiled it; checksums only detect damage.

The keys are those of the `cryptography` package, which is needed only where artefacts are signed
or signatures are asked for: `pip install 'perfuse[sign]'`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from perfuse.errors import ArtefactError

Key = str | bytes | Path  # 32 raw bytes, their 64 hexadecimal digits, or a file that holds either

SIGN_EXTRA = "pip install 'perfuse[sign]' installs what signatures need."
PUBLIC = ".pub"  # at the end of the name of a public key's file
KEY_BYTES = 32
HEXADECIMAL = re.compile(r"[0-9a-fA-F]{64}")


def new_key_pair() -> tuple[bytes, bytes]:
    """A new private key and its public key, 32 bytes each."""
    private = _ed25519().Ed25519PrivateKey.generate()
    return private.private_bytes_raw(), private.public_key().public_bytes_raw()


def check_private_key(key: Key) -> None:
    """Raise ArtefactError if this key cannot sign."""
    if isinstance(key, str | Path) and str(key).endswith(PUBLIC):
        message = f"{key} is a public key"
        raise ArtefactError(message, hint=f"sign with the private one: {str(key)[: -len(PUBLIC)]}.")
    _ed25519().Ed25519PrivateKey.from_private_bytes(key_bytes(key))


def sign(data: bytes, private_key: Key) -> tuple[bytes, bytes]:
    """The public key and the signature of `data`."""
    private = _ed25519().Ed25519PrivateKey.from_private_bytes(key_bytes(private_key))
    return private.public_key().public_bytes_raw(), private.sign(data)


def is_signed_by(data: bytes, signature: bytes, trusted_keys: Iterable[Key]) -> bool:
    """Whether one of these public keys signed `data`."""
    return any(_verifies(data, signature, key_bytes(key)) for key in trusted_keys)


def key_bytes(key: Key) -> bytes:
    """The 32 bytes of a key, in whichever form it is given."""
    if isinstance(key, Path) or (isinstance(key, str) and not HEXADECIMAL.fullmatch(key)):
        try:
            return key_bytes(Path(key).read_bytes())
        except OSError as error:
            raise ArtefactError(f"cannot read a key: {error}", hint=KEY_HINT) from error
    raw = key.encode() if isinstance(key, str) else key
    if not isinstance(raw, bytes):
        raise ArtefactError(f"not an Ed25519 key: {type(key).__name__}", hint=KEY_HINT)
    if len(raw) != KEY_BYTES:
        try:
            raw = bytes.fromhex(raw.decode().strip())
        except ValueError:
            raise ArtefactError("not an Ed25519 key", hint=KEY_HINT) from None
    if len(raw) != KEY_BYTES:
        raise ArtefactError(f"an Ed25519 key has 32 bytes, this has {len(raw)}", hint=KEY_HINT)
    return raw


KEY_HINT = (
    "pass 32 raw bytes, 64 hexadecimal digits, or a file of either; "
    "`perfuse artefact keygen` creates a pair."
)


def _verifies(data: bytes, signature: bytes, public_key: bytes) -> bool:
    invalid = importlib.import_module("cryptography.exceptions").InvalidSignature
    try:
        _ed25519().Ed25519PublicKey.from_public_bytes(public_key).verify(signature, data)
    except (invalid, ValueError):
        return False
    return True


def _ed25519() -> Any:
    try:
        return importlib.import_module("cryptography.hazmat.primitives.asymmetric.ed25519")
    except ImportError as error:
        raise ArtefactError(f"signatures are not available: {error}", hint=SIGN_EXTRA) from error
