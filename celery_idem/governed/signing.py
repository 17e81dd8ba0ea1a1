"""Signed approvals: an Ed25519 signature over the evidence, so that writing to the database is not yet approving.

Signed is the digest of the evidence's canonical JSON without the signature itself, behind a text that says what is
signed. The private half belongs to whatever the owner approves with, the public half into ``governed_approval_keys``.
Keys are named, several may be good at a time, and each may have an end.

Not here: what the evidence has to say (``gate``), and where private keys are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, Union

from celery_idem.errors import ConfigurationError
from celery_idem.governed.refusals import digest_or_refusal, epoch, is_text, refused, shown

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

SIGNATURE = "signature"
"""The field of the evidence: ``{"key_id": text, "value": 128 hex characters}``."""
PURPOSE = b"celery_idem.governed.approval.v1\0"
"""In front of the digest's 64 hex characters: what this key signs elsewhere approves nothing here."""

_HEX = frozenset("0123456789abcdef")
_ANYBODYS = frozenset(
    {
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    }
)
"""Points of small order, the last bit aside: for them anybody makes signatures, and a row of zeros is one of them."""


class ApprovalSigner:
    """Signs approvals, where the owner is.

    Args:
        key_id: what ``governed_approval_keys`` calls the public half.
        private_key: an ``Ed25519PrivateKey``.
    """

    def __init__(self, key_id: str, private_key: Ed25519PrivateKey) -> None:
        if not is_text(key_id):
            raise ConfigurationError("ApprovalSigner: key_id is a text: the name that governed_approval_keys has it by")
        if not isinstance(private_key, _ed25519().Ed25519PrivateKey):
            raise ConfigurationError(
                f"ApprovalSigner {key_id!r}: this is no Ed25519 private key: make one with generate_key()"
            )
        self.key_id = key_id
        self._private_key = private_key

    @classmethod
    def from_pem(cls, key_id: str, pem: str | bytes, password: str | bytes | None = None) -> ApprovalSigner:
        """The signer whose private key this PEM text is.

        Raises:
            ConfigurationError: it is none, not of Ed25519, or the password does not open it.
        """
        _ed25519()
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        secret = password.encode() if isinstance(password, str) else password
        try:
            private_key: Any = load_pem_private_key(pem.encode() if isinstance(pem, str) else pem, secret)
        except (ValueError, TypeError, UnsupportedAlgorithm) as error:
            raise ConfigurationError(
                f"ApprovalSigner {key_id!r}: this is no private key in PEM that the password opens: make one with "
                "generate_key()"
            ) from error
        return cls(key_id, private_key)

    def __repr__(self) -> str:
        return f"ApprovalSigner({self.key_id!r})"

    def sign(self, evidence: Mapping[str, Any]) -> dict[str, Any]:
        """The evidence with this signer's signature, in place of any other.

        Raises:
            GateRefused: ``evidence``, where it has no canonical JSON.
        """
        value = self._private_key.sign(_signed(evidence)).hex()
        return {**evidence, SIGNATURE: {"key_id": self.key_id, "value": value}}


PublicKey: TypeAlias = Union[str, bytes, "Ed25519PublicKey"]
"""PEM, the raw key as 64 hex characters, or cryptography's own."""


@dataclass(frozen=True)
class ApprovalKey:
    """A public key that is good until ``expires_at``, seconds since 1970 by the store's clock, or without end.

    It must outlast the approvals made with it: what it signed is refused from then on, however long ago that was.
    """

    public_key: PublicKey
    expires_at: float | None = None


class ApprovalKeys:
    """Whose signature makes an approval, by key id.

    Raises:
        ConfigurationError: no key at all, one that cannot be read, or one under two names, for then the end of the one
            name would not be the end of the key.
    """

    def __init__(self, keys: Mapping[str, PublicKey | ApprovalKey]) -> None:
        if not isinstance(keys, Mapping) or not keys:
            raise ConfigurationError(
                "governed_approval_keys maps key ids to public keys: give it at least one, or None where approvals are "
                "not signed"
            )
        self._keys: dict[str, tuple[Ed25519PublicKey, float | None]] = {}
        names: dict[bytes, str] = {}
        for key_id, key in keys.items():
            if not is_text(key_id):
                raise ConfigurationError(f"governed_approval_keys: a key id is a text, and not {key_id!r:.60}")
            given = key if isinstance(key, ApprovalKey) else ApprovalKey(key)
            if given.expires_at is not None and epoch(given.expires_at) is None:
                raise ConfigurationError(
                    f"governed_approval_keys, {key_id!r}: expires_at is seconds since 1970, or None for no end"
                )
            public_key = _public_key(key_id, given.public_key)
            first = names.setdefault(public_key.public_bytes_raw(), key_id)
            if first != key_id:
                raise ConfigurationError(
                    f"governed_approval_keys, {key_id!r}: this is the key {first!r} again: make a new one"
                )
            self._keys[key_id] = (public_key, given.expires_at)

    def check(self, evidence: Mapping[str, Any], now: float) -> str:
        """The id of the key that signed this very evidence.

        Args:
            now: seconds since 1970, by the store's clock; what judges the key's end.

        Raises:
            GateRefused: ``unsigned``, ``unknown_key``, ``key_expired`` or ``signature``; ``evidence`` or ``time`` where
                one of these cannot be read.
        """
        if not isinstance(evidence, Mapping):
            raise refused("evidence")
        if SIGNATURE not in evidence:
            raise refused("unsigned")
        key_id, value = signature_parts(evidence[SIGNATURE])
        if key_id not in self._keys:
            raise refused("unknown_key", f"no key is called {shown(key_id)} here")
        public_key, expires_at = self._keys[key_id]
        moment = epoch(now)
        if moment is None:
            raise refused("time")
        if expires_at is not None and moment >= expires_at:
            raise refused("key_expired", f"the key {key_id!r} ended {moment - expires_at:.0f} s ago")
        from cryptography.exceptions import InvalidSignature

        try:
            public_key.verify(value, _signed(evidence))
        except InvalidSignature as error:
            raise refused("signature", f"the key {key_id!r} has not signed what this approval says") from error
        return key_id


def signature_parts(signature: object) -> tuple[str, bytes]:
    """Key id and the 64 bytes of a signature as evidence carries it; nothing is verified.

    Raises:
        GateRefused: ``signature``, where it has another form.
    """
    if isinstance(signature, Mapping) and signature.keys() == {"key_id", "value"} and is_text(signature["key_id"]):
        value = signature["value"]
        if isinstance(value, str) and len(value) == 128 and _HEX.issuperset(value):
            return signature["key_id"], bytes.fromhex(value)
    raise refused("signature", "a signature is a key_id and, as value, 128 lowercase hex characters")


def generate_key() -> tuple[str, str]:
    """A new key: the private half as PEM text, the public half as 64 hex characters."""
    private_key = _ed25519().Ed25519PrivateKey.generate()
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    pem = private_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return pem.decode("ascii"), private_key.public_key().public_bytes_raw().hex()


def _signed(evidence: Mapping[str, Any]) -> bytes:
    """What is signed of this evidence."""
    said = {field: value for field, value in evidence.items() if field != SIGNATURE}
    return PURPOSE + digest_or_refusal(said, "evidence").encode("ascii")


def _public_key(key_id: str, given: object) -> Ed25519PublicKey:
    ed25519 = _ed25519()
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    found: Any = given
    try:
        if isinstance(given, str) and len(given.strip()) == 64:
            found = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(given.strip()))
        elif isinstance(given, (str, bytes)):
            found = load_pem_public_key(given.encode() if isinstance(given, str) else given)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        found = None  # the text stays out of the message: it may be the private half
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise ConfigurationError(
            f"governed_approval_keys, {key_id!r}: this is no Ed25519 public key as PEM or 64 hex characters: take the "
            "public half that generate_key() gave"
        )
    public_key: Ed25519PublicKey = found
    raw = public_key.public_bytes_raw()
    if (raw[:-1] + bytes([raw[-1] & 0x7F])).hex() in _ANYBODYS:
        raise ConfigurationError(
            f"governed_approval_keys, {key_id!r}: with this key everybody's signature would count: take the "
            "public half that generate_key() gave"
        )
    return public_key


def _ed25519() -> Any:
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError as error:
        raise ConfigurationError('signed approvals need cryptography: pip install "celery-idem[governed]"') from error
    return ed25519
