"""Who a peer is: a libp2p RSA key in a file, the peer id derived from it, and its incarnation.

The key file is what hivemind's P2P takes as `identity_path` (a libp2p PrivateKey protobuf). Beside it stand
`<name>.incarnation`, a counter that grows at every start so that records of an earlier start are void, and
`<name>.lock`, held while the identity is in use. The same key signs records, so the peer id of a record can
be checked against the key that signed it.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import logging
import os
import secrets
import shutil
import stat
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from hivemind.proto import crypto_pb2

logger = logging.getLogger(__name__)

KEY_BITS = 2048
"""RSA modulus of new identities; the smallest that libp2p accepts, and the fastest to verify."""

MAX_KEY_BITS = 4096
MAX_PUBLIC_KEY_BYTES = 1024
MAX_SIGNATURE_BYTES = MAX_KEY_BITS // 8
_SHA256_MULTIHASH = b"\x12\x20"
_DOMAIN = b"swarm-peer signature 1\0"
"""Prefixed to everything signed: the same key also signs libp2p handshakes, which must not be confused."""

_PADDING = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=padding.PSS.DIGEST_LENGTH)


_EPHEMERAL_PREFIX = "swarm-peer-identity-"


class IdentityError(RuntimeError):
    """An identity file cannot be read or written; the message names the file and what to do."""


class IdentityInUse(IdentityError):  # noqa: N818
    """Another running process holds this identity."""


class IdentityLock:
    """An identity held by this process; released by `release`, at the end of a `with`, or at exit."""

    def __init__(self, descriptor: int | None) -> None:
        self._descriptor = descriptor

    def release(self) -> None:
        """Let go of the identity; harmless when repeated. The lock file stays (removing it would race)."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def __enter__(self) -> IdentityLock:
        """The lock itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release the lock."""
        self.release()


class Identity:
    """A peer's key pair on disk.

    path: the key file, as hivemind's `identity_path`.
    peer_id: base58 text, as libp2p shows it ("Qm...").
    public_key: DER SubjectPublicKeyInfo bytes, as they stand in records.
    """

    def __init__(self, path: Path, key: rsa.RSAPrivateKey, *, is_ephemeral: bool) -> None:
        self.path = path
        self.is_ephemeral = is_ephemeral
        self._key = key
        self._incarnation: int | None = None
        self.public_key = key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        self.peer_id = peer_id_of(self.public_key)

    @classmethod
    def load_or_create(cls, path: Path | str | None) -> Identity:
        """The identity in `path`, created there (mode 0600) if missing.

        None makes an ephemeral identity in a temporary directory, removed by `close`. A key file readable
        by others is tightened to 0600 with a warning. Raises IdentityError if the file is not a libp2p
        RSA key or cannot be read or written.
        """
        if path is None:
            _sweep_ephemeral()
            directory = Path(tempfile.mkdtemp(prefix=f"{_EPHEMERAL_PREFIX}{os.getpid()}-"))
            return cls(directory / "identity.key", _create(directory / "identity.key"), is_ephemeral=True)
        path = Path(path).expanduser()
        try:
            key = _load(path)
        except FileNotFoundError:
            key = _create(path)
        return cls(path, key, is_ephemeral=False)

    @property
    def incarnation(self) -> int:
        """Number of this start, strictly higher than any before; known once `lock` has succeeded."""
        if self._incarnation is None:
            raise RuntimeError("the incarnation is drawn by Identity.lock(); lock the identity first")
        return self._incarnation

    def lock(self) -> IdentityLock:
        """Hold this identity and draw the next incarnation.

        Raises IdentityInUse, naming the file and the process that holds it, if it is in use (also by this
        process), and IdentityError if the counter cannot be written.
        """
        if self.is_ephemeral:
            self._incarnation = max((self._incarnation or 0) + 1, int(time.time() * 1000))
            return IdentityLock(None)
        lock_path = self.path.with_name(self.path.name + ".lock")
        descriptor = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
                raise IdentityInUse(
                    f"identity {self.path} is in use by process {holder}: stop it, or give this peer "
                    "another --identity"
                ) from error
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode("ascii"), 0)
            self._incarnation = self._next_incarnation()
        except BaseException:
            os.close(descriptor)
            raise
        return IdentityLock(descriptor)

    def sign(self, data: bytes) -> bytes:
        """Signature of `data` (RSA-PSS, SHA-256), to be checked with `verify`."""
        return self._key.sign(_DOMAIN + data, _PADDING, hashes.SHA256())

    def close(self) -> None:
        """Remove an ephemeral identity's directory; nothing for one with a path."""
        if self.is_ephemeral:
            shutil.rmtree(self.path.parent, ignore_errors=True)

    def _next_incarnation(self) -> int:
        """Read, raise and store the counter.

        At least the milliseconds since 1970, so that a lost counter file, or a key copied without it, still
        yields a higher number, and two starts of a copied key never the same one.
        """
        path = self.path.with_name(self.path.name + ".incarnation")
        previous = 0
        try:
            previous = int(path.read_text("ascii"))
        except FileNotFoundError:
            pass
        except (ValueError, UnicodeDecodeError):
            logger.warning("%s does not hold a number; starting again from the clock", path)
        incarnation = max(previous + 1, int(time.time() * 1000))
        try:
            _replace_durably(path, f"{incarnation}\n".encode("ascii"))
        except OSError as error:
            raise IdentityError(f"cannot store the incarnation in {path}: {error}") from error
        return incarnation


def _sweep_ephemeral() -> None:
    """Remove the ephemeral identities of this user's processes that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_EPHEMERAL_PREFIX}*"):
        pid = directory.name.removeprefix(_EPHEMERAL_PREFIX).partition("-")[0]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc/self").exists():
            shutil.rmtree(directory, ignore_errors=True)


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of a public key (DER SubjectPublicKeyInfo): base58 of its multihash.

    libp2p specification, "Peer Ids": sha2-256 of the PublicKey protobuf, since an RSA key is longer than
    42 bytes. Raises ValueError if it is not an RSA key that we accept.
    """
    _load_public(public_key)
    protobuf = crypto_pb2.PublicKey(key_type=crypto_pb2.RSA, data=public_key).SerializeToString()
    return base58.b58encode(_SHA256_MULTIHASH + hashlib.sha256(protobuf).digest()).decode("ascii")


def verify(public_key: bytes, data: bytes, signature: bytes) -> bool:
    """Whether `signature` is that of `data` by the private half of `public_key`; False for malformed keys."""
    try:
        _load_public(public_key).verify(signature, _DOMAIN + data, _PADDING, hashes.SHA256())
    except (ValueError, InvalidSignature):
        return False
    return True


@functools.lru_cache(maxsize=4096)
def _load_public(public_key: bytes) -> rsa.RSAPublicKey:
    """Parse a public key; ValueError unless RSA of 2048 to 4096 bits with a small exponent.

    Bounded, because strangers send keys: verifying with a huge modulus or exponent would take seconds.
    """
    if len(public_key) > MAX_PUBLIC_KEY_BYTES:
        raise ValueError(f"public key of {len(public_key)} bytes; at most {MAX_PUBLIC_KEY_BYTES}")
    try:
        key = serialization.load_der_public_key(public_key)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ValueError("not a DER public key") from error
    if not isinstance(key, rsa.RSAPublicKey):
        raise ValueError("not an RSA public key")
    if not KEY_BITS <= key.key_size <= MAX_KEY_BITS or key.public_numbers().e >= 2**32:
        raise ValueError(f"RSA key of {key.key_size} bits; {KEY_BITS} to {MAX_KEY_BITS} are accepted")
    return key


def _load(path: Path) -> rsa.RSAPrivateKey:
    """Read a key file; FileNotFoundError if missing, IdentityError if it is something else."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise IdentityError(f"cannot read the identity {path}: {error}") from error
    try:
        der = crypto_pb2.PrivateKey.FromString(data).data
        key = serialization.load_der_private_key(der, password=None)
    except Exception as error:  # protobuf's DecodeError differs between its implementations
        raise IdentityError(
            f"{path} is not a libp2p identity: name another file with --identity (one that does not exist is made)"
        ) from error
    if not isinstance(key, rsa.RSAPrivateKey):
        raise IdentityError(f"{path} holds a key that is not RSA: name another file with --identity")
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            path.chmod(0o600)
            logger.warning("%s was readable by others (mode %o); it is 600 now", path, mode)
    except OSError as error:
        raise IdentityError(f"cannot make the identity {path} private: {error}") from error
    return key


def _create(path: Path) -> rsa.RSAPrivateKey:
    """Write a new key: private from its first byte, complete or absent; an existing file wins a race."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=KEY_BITS)
    der = key.private_bytes(
        serialization.Encoding.DER,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    protobuf = crypto_pb2.PrivateKey(key_type=crypto_pb2.RSA, data=der).SerializeToString()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _write_private(temporary, protobuf)
        try:
            os.link(temporary, path)  # unlike a rename, fails if another process was first
        finally:
            temporary.unlink()
        _sync_directory(path.parent)
    except FileExistsError:
        return _load(path)
    except OSError as error:
        raise IdentityError(f"cannot create the identity {path}: {error}") from error
    return key


def _write_private(path: Path, data: bytes) -> None:
    """Create `path` (mode 0600, must not exist), write and fsync it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _replace_durably(path: Path, data: bytes) -> None:
    """Replace a small file so that after a crash it holds either the old or the new content."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        _write_private(temporary, data)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    """Make a rename or link in `path` survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
