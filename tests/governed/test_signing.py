"""Signed approvals: what a signature covers, whose counts and until when, and keys in every form."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from celery_idem.errors import ConfigurationError, GateRefused
from celery_idem.governed import records
from celery_idem.governed.canonical import digest_json
from celery_idem.governed.gate import message_approval, validate_owner_gate
from celery_idem.governed.signing import PURPOSE, ApprovalKey, ApprovalKeys, ApprovalSigner, generate_key

ROOT = Path(__file__).parents[2]
NOW = 2_000_000_000.0
OLD_PEM, OLD_PUBLIC = generate_key()
NEW_PEM, NEW_PUBLIC = generate_key()
OLD, NEW = ApprovalSigner.from_pem("2025", OLD_PEM), ApprovalSigner.from_pem("2026", NEW_PEM)
BOTH = ApprovalKeys({"2025": ApprovalKey(OLD_PUBLIC, expires_at=NOW + 60), "2026": NEW_PUBLIC})


def action_of(action_id: str = "act-1", **changed: Any) -> dict[str, Any]:
    payload = changed.pop("payload", {"order": 7, "amount": "12.50"})
    return {
        "action_id": action_id,
        "action_type": "payments.refund",
        "source": "shop",
        "payload": payload,
        "payload_sha256": digest_json(payload),
        **changed,
    }


def evidence_of(action: dict[str, Any]) -> dict[str, Any]:
    return message_approval(
        action, principal="ann@example.org", channel="web", thread_id="t-1", event_id="click-1", decided_at=NOW - 60
    )


def judged(action: dict[str, Any], evidence: dict[str, Any], keys: ApprovalKeys = BOTH, now: float = NOW) -> str | None:
    """Who signed, as the gate finds out where this evidence is the action's one gate, with everything else right."""
    receipt = {
        "action_id": action["action_id"],
        "receipt_key": "owner-gate",
        "kind": records.GATE_RECEIPT_KIND,
        "status": "passed",
        "external_id": evidence["approval_id"],
        "evidence": evidence,
        "evidence_sha256": digest_json(evidence),
    }
    return validate_owner_gate(action, [receipt], now=now, grantable=False, keys=keys).key_id


def code_of(call: Callable[..., object], *args: Any) -> str:
    with pytest.raises(GateRefused) as caught:
        call(*args)
    return caught.value.code


def public_pem(public: str) -> str:
    key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()


class TestSigned:
    def test_who_signed_is_told(self) -> None:
        action = action_of()
        assert judged(action, OLD.sign(evidence_of(action))) == "2025"
        assert judged(action, NEW.sign(evidence_of(action))) == "2026"

    def test_signing_leaves_the_evidence_alone_and_replaces_another_signature(self) -> None:
        evidence = evidence_of(action_of())
        before = dict(evidence)
        signed = NEW.sign(OLD.sign(evidence))
        assert evidence == before
        assert signed == NEW.sign(evidence)
        assert signed == {**before, "signature": {"key_id": "2026", "value": signed["signature"]["value"]}}

    def test_anybody_can_check_it_with_sha256_and_ed25519(self) -> None:
        evidence = evidence_of(action_of())
        value = bytes.fromhex(NEW.sign(evidence)["signature"]["value"])
        key = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(NEW_PUBLIC))
        key.verify(value, PURPOSE + digest_json(evidence).encode())
        assert PURPOSE == b"celery_idem.governed.approval.v1\x00"

    @pytest.mark.parametrize("field", sorted(evidence_of(action_of())))
    def test_no_field_can_be_changed_afterwards(self, field: str) -> None:
        signed = NEW.sign(evidence_of(action_of()))
        value = signed[field] + 1 if isinstance(signed[field], (int, float)) else f"{signed[field]}x"
        assert code_of(BOTH.check, {**signed, field: value}, NOW) == "signature"
        assert code_of(BOTH.check, {name: kept for name, kept in signed.items() if name != field}, NOW) == "signature"

    def test_one_of_another_action_is_refused_however_it_is_dressed(self) -> None:
        one, other = action_of("act-1"), action_of("act-2")
        signed, unsigned = NEW.sign(evidence_of(one)), evidence_of(other)
        assert code_of(judged, other, signed) == "action_id"
        assert code_of(judged, other, {**signed, "action_id": "act-2"}) == "signature"
        assert code_of(judged, other, {**unsigned, "signature": signed["signature"]}) == "signature"

    def test_one_for_another_payload_type_or_source_is_refused(self) -> None:
        signed = NEW.sign(evidence_of(action_of()))
        assert code_of(judged, action_of(payload={"order": 7, "amount": "99.00"}), signed) == "action_digest"
        assert code_of(judged, action_of(action_type="payments.charge"), signed) == "action_type"
        assert code_of(judged, action_of(source="billing"), signed) == "action_source"

    def test_one_that_the_same_key_made_for_another_purpose_is_refused(self) -> None:
        evidence = evidence_of(action_of())
        private: Any = load_pem_private_key(NEW_PEM.encode(), None)
        for said in (digest_json(evidence).encode(), b"another.v1\0" + digest_json(evidence).encode()):
            signature = {"key_id": "2026", "value": private.sign(said).hex()}
            assert code_of(BOTH.check, {**evidence, "signature": signature}, NOW) == "signature"

    def test_nothing_rides_along_in_the_signature(self) -> None:
        signed = NEW.sign(evidence_of(action_of()))
        assert code_of(BOTH.check, {**signed, "signature": {**signed["signature"], "note": "x"}}, NOW) == "signature"

    def test_what_has_no_canonical_form_is_not_signed(self) -> None:
        assert code_of(NEW.sign, {**evidence_of(action_of()), "principal": float("nan")}) == "evidence"


class TestWhoseCounts:
    def test_unsigned_does_not_count(self) -> None:
        assert code_of(BOTH.check, evidence_of(action_of()), NOW) == "unsigned"

    @pytest.mark.parametrize("evidence", [None, [], "approved", 7])
    def test_no_evidence_is_no_approval(self, evidence: Any) -> None:
        assert code_of(BOTH.check, evidence, NOW) == "evidence"

    @pytest.mark.parametrize("now", [None, float("nan"), True, "2000000000"])
    def test_no_time_is_no_approval(self, now: Any) -> None:
        assert code_of(BOTH.check, OLD.sign(evidence_of(action_of())), now) == "time"

    def test_another_key_does_not_count_whatever_it_calls_itself(self) -> None:
        evidence, (pem, _) = evidence_of(action_of()), generate_key()
        assert code_of(BOTH.check, ApprovalSigner.from_pem("2027", pem).sign(evidence), NOW) == "unknown_key"
        assert code_of(BOTH.check, ApprovalSigner.from_pem("2026", pem).sign(evidence), NOW) == "signature"
        borrowed = NEW.sign(evidence)
        borrowed["signature"]["key_id"] = "2025"
        assert code_of(BOTH.check, borrowed, NOW) == "signature"

    def test_the_message_names_the_key_and_the_setting(self) -> None:
        signed = ApprovalSigner.from_pem("laptop", NEW_PEM).sign(evidence_of(action_of()))
        with pytest.raises(GateRefused, match=r"no key is called .laptop. here: .*governed_approval_keys"):
            BOTH.check(signed, NOW)

    def test_the_old_key_ends_and_the_new_one_goes_on(self) -> None:
        evidence = evidence_of(action_of())
        old, new = OLD.sign(evidence), NEW.sign(evidence)
        assert [BOTH.check(signed, NOW + 59.999) for signed in (old, new)] == ["2025", "2026"]
        assert code_of(BOTH.check, old, NOW + 60) == "key_expired"
        assert BOTH.check(new, NOW + 10**9) == "2026"

    @pytest.mark.parametrize(
        "signature",
        [
            None,
            "x" * 128,
            {},
            {"key_id": "2026"},
            {"value": "00" * 64},
            {"key_id": "2026", "value": "00" * 64, "more": 1},
            {"key_id": "2026", "value": "00" * 63},
            {"key_id": "2026", "value": "AB" * 64},
            {"key_id": "2026", "value": "0x" + "00" * 63},
            {"key_id": "2026", "value": "00 " * 42 + "00"},
            {"key_id": "2026", "value": "\u0661" * 128},
            {"key_id": "2026", "value": b"0" * 128},
            {"key_id": "2026", "value": None},
            {"key_id": "", "value": "00" * 64},
            {"key_id": ["2026"], "value": "00" * 64},
            {"key_id": "2026", "value": "00" * 64},
        ],
    )
    def test_what_is_no_signature_is_refused(self, signature: Any) -> None:
        assert code_of(BOTH.check, {**evidence_of(action_of()), "signature": signature}, NOW) == "signature"


class TestKeys:
    @pytest.mark.parametrize(
        "form",
        [
            NEW_PUBLIC,
            NEW_PUBLIC.upper(),
            f"{NEW_PUBLIC}\n",
            public_pem(NEW_PUBLIC),
            public_pem(NEW_PUBLIC).encode(),
            ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(NEW_PUBLIC)),
            ApprovalKey(public_pem(NEW_PUBLIC)),
        ],
        ids=["hex", "upper case hex", "hex of a file", "PEM", "PEM bytes", "object", "ApprovalKey"],
    )
    def test_a_public_key_in_any_form(self, form: Any) -> None:
        assert ApprovalKeys({"2026": form}).check(NEW.sign(evidence_of(action_of())), NOW) == "2026"

    @pytest.mark.parametrize(
        "form",
        [
            None,
            7,
            "",
            "x" * 64,
            "00" * 31,
            b"\0" * 32,
            public_pem(NEW_PUBLIC)[:-40],
            NEW_PEM,
            NEW_PEM.encode(),
            load_pem_private_key(NEW_PEM.encode(), None),
            ec.generate_private_key(ec.SECP256R1())
            .public_key()
            .public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        ],
        ids=range(11),
    )
    def test_anything_else_is_refused_by_its_name_and_not_repeated(self, form: Any) -> None:
        with pytest.raises(
            ConfigurationError, match="governed_approval_keys, '2026': this is no Ed25519 public key"
        ) as it:
            ApprovalKeys({"2026": form})
        assert NEW_PEM.splitlines()[1] not in str(it.value)
        assert it.value.__context__ is None or it.value.__suppress_context__ or NEW_PEM not in str(it.value.__context__)

    @pytest.mark.parametrize("last", [0x00, 0x80])
    @pytest.mark.parametrize("first", ["00" * 31, "01" + "00" * 30])
    def test_a_key_for_which_anybody_can_sign_is_refused(self, first: str, last: int) -> None:
        """What it is about: with the second of them, the same 64 bytes are a signature of whatever you like."""
        anybodys = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex("01" + "00" * 31))
        anybodys.verify(b"\x01" + b"\0" * 63, b"pay me")
        with pytest.raises(ConfigurationError, match="everybody's signature would count"):
            ApprovalKeys({"2026": f"{first}{last:02x}"})

    @pytest.mark.parametrize("keys", [{}, None, [], "2026", NEW_PUBLIC], ids=range(5))
    def test_no_key_at_all_is_no_way_to_say_unsigned(self, keys: Any) -> None:
        with pytest.raises(ConfigurationError, match="governed_approval_keys maps key ids to public keys"):
            ApprovalKeys(keys)

    @pytest.mark.parametrize("key_id", ["", " ", 7, None, "x" * 513])
    def test_a_key_id_is_a_text(self, key_id: Any) -> None:
        with pytest.raises(ConfigurationError, match="key id is a text"):
            ApprovalKeys({key_id: NEW_PUBLIC})
        with pytest.raises(ConfigurationError, match="key_id is a text"):
            ApprovalSigner.from_pem(key_id, NEW_PEM)

    def test_one_key_under_two_names_is_refused(self) -> None:
        twice = {"old": ApprovalKey(NEW_PUBLIC, expires_at=NOW), "new": public_pem(NEW_PUBLIC)}
        with pytest.raises(ConfigurationError, match="'new': this is the key 'old' again"):
            ApprovalKeys(twice)

    @pytest.mark.parametrize("expires_at", [float("nan"), float("inf"), True, "tomorrow", []])
    def test_an_end_is_a_time(self, expires_at: Any) -> None:
        with pytest.raises(ConfigurationError, match="expires_at is seconds since 1970"):
            ApprovalKeys({"2026": ApprovalKey(NEW_PUBLIC, expires_at)})

    def test_every_generated_key_is_another(self) -> None:
        pem, public = generate_key()
        assert pem.startswith("-----BEGIN PRIVATE KEY-----\n")
        assert len(bytes.fromhex(public)) == 32
        assert generate_key() != (pem, public)


class TestPrivateKeys:
    def test_a_pem_may_have_a_password(self) -> None:
        key = ed25519.Ed25519PrivateKey.generate()
        locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"secret"))
        keys, evidence = ApprovalKeys({"k": key.public_key()}), evidence_of(action_of())
        for password in ("secret", b"secret"):
            assert keys.check(ApprovalSigner.from_pem("k", locked, password).sign(evidence), NOW) == "k"
        for wrong in ("another", None):
            with pytest.raises(ConfigurationError, match="no private key in PEM that the password opens"):
                ApprovalSigner.from_pem("k", locked, wrong)
        assert keys.check(ApprovalSigner("k", key).sign(evidence), NOW) == "k"

    @pytest.mark.parametrize("pem", ["", "x", NEW_PUBLIC, public_pem(NEW_PUBLIC), NEW_PEM[:-60]], ids=range(5))
    def test_what_is_no_private_key_is_refused(self, pem: str) -> None:
        with pytest.raises(ConfigurationError, match="ApprovalSigner 'k': this is no private key in PEM"):
            ApprovalSigner.from_pem("k", pem)

    def test_another_kind_of_key_is_refused(self) -> None:
        key: Any = ec.generate_private_key(ec.SECP256R1())
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        with pytest.raises(ConfigurationError, match="no Ed25519 private key"):
            ApprovalSigner.from_pem("k", pem)
        with pytest.raises(ConfigurationError, match="no Ed25519 private key"):
            ApprovalSigner("k", key.public_key())

    def test_it_shows_its_name_and_nothing_else(self) -> None:
        assert repr(NEW) == "ApprovalSigner('2026')"


class TestExtra:
    def test_cryptography_is_needed_where_something_is_signed_and_not_before(self) -> None:
        code = (
            "import sys\n"
            "sys.modules['cryptography'] = None\n"
            "from celery_idem.errors import ConfigurationError\n"
            "from celery_idem.governed import gate, signing\n"
            "of_pem = lambda: signing.ApprovalSigner.from_pem('k', 'x')\n"
            "keys, signer = lambda: signing.ApprovalKeys({'k': '00'}), lambda: signing.ApprovalSigner('k', None)\n"
            "for call in (signing.generate_key, keys, signer, of_pem):\n"
            "    try:\n"
            "        call()\n"
            "    except ConfigurationError as error:\n"
            "        print(error)\n"
        )
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
        assert done.stdout == 'signed approvals need cryptography: pip install "celery-idem[governed]"\n' * 4
