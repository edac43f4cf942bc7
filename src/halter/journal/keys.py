"""The key that checkpoints are signed with: Ed25519, one file for it, and its public half beside it."""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PRIVATE = 0o600
PUBLIC = 0o644


class SigningKey:
    """A private key, and how its public half is written into every checkpoint."""

    def __init__(self, private: "Ed25519PrivateKey") -> None:
        self._private = private
        self.public = private.public_key().public_bytes_raw().hex()

    def sign(self, data: bytes) -> str:
        """Sign, written as hexadecimal digits."""
        return self._private.sign(data).hex()


def signing_key(path: Path) -> SigningKey:
    """Load the private key, or make one where there is none. Raises OSError or ValueError."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    _place_once(path, PRIVATE, _new_private_key)
    try:
        loaded = load_pem_private_key(path.read_bytes(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise ValueError(f"{path} holds no key that can be read") from error
    match loaded:
        case Ed25519PrivateKey():
            key = SigningKey(loaded)
        case _:
            raise ValueError(f"{path} holds a key of another kind than Ed25519")
    _place_once(public_key_path(path), PUBLIC, f"{key.public}\n".encode)
    return key


def public_key_path(path: Path) -> Path:
    """Tell where the public half of a key file stands."""
    return path.with_name(f"{path.name}.pub")


def public_keys(path: Path) -> frozenset[str]:
    """Read the keys whose checkpoints are to be trusted, one to a line. Raises OSError."""
    return frozenset(path.read_text("ascii", "replace").split())


def is_signed(data: bytes, signature: str, public: str) -> bool:
    """Tell whether the owner of the public key signed the data."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(bytes.fromhex(signature), data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _new_private_key() -> bytes:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _place_once(path: Path, mode: int, content: Callable[[], bytes]) -> None:
    """Create a file whole or not at all; of several processes that try, the first one wins."""
    if path.exists():
        return
    file, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        os.write(file, content())
        os.fchmod(file, mode)
        os.fsync(file)
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        os.close(file)
        Path(draft).unlink()
