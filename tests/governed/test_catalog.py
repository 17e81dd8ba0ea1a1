"""Action types: what may be declared, and that a payload is stored, approved and executed as one and the same."""

from __future__ import annotations

import enum
import json
import subprocess
import sys
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, RootModel, SecretStr, computed_field, field_validator

from celery_idem.errors import ConfigurationError, PayloadRefused
from celery_idem.governed import catalog as module
from celery_idem.governed.canonical import canonical_json
from celery_idem.governed.catalog import ActionType, Catalog, action

any_speed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy

ROOT = Path(__file__).parents[2]
SECRET = "hunter2-very-secret"


class Refund(BaseModel):
    order_id: int
    amount: Decimal = Field(gt=0)
    currency: str = "EUR"


class Service:
    made = 0

    def __init__(self) -> None:
        Service.made += 1

    def execute(self, request: Any) -> Any:
        return request.completed()

    def observe(self, request: Any) -> Any:
        return request.absent()


def declared(
    payload: Any = Refund, endpoint_class: Any = Service, name: Any = "payments.refund", **given: Any
) -> ActionType:
    return ActionType(name, payload, endpoint_class, **given)


def refusal(type_: ActionType, value: Any) -> str:
    with pytest.raises(PayloadRefused) as caught:
        type_.payload_of(value)
    assert caught.value.__context__ is None, "a traceback would show the error that quotes the value"
    return str(caught.value)


class TestDeclaring:
    def test_the_decorator_registers_the_class_and_leaves_it_alone(self) -> None:
        types = Catalog()
        before = dict(vars(Service))
        found = action(
            "payments.refund",
            payload=Refund,
            grantable=True,
            observation_window=60,
            max_observations=3,
            observe_delay=0.5,
            catalog=types,
        )(Service)
        assert found is Service
        assert dict(vars(Service)) == before
        assert list(types) == [types.get("payments.refund")]
        assert types.get("payments.refund") == declared(
            grantable=True, observation_window=60, max_observations=3, observe_delay=0.5
        )

    def test_by_default_no_grant_approves_it(self) -> None:
        assert declared().grantable is False

    def test_without_a_catalog_it_is_in_the_default_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module.catalog, "_types", {})
        action("payments.refund", payload=Refund)(Service)
        assert "payments.refund" in module.catalog

    @pytest.mark.parametrize("name", ["", " a", "a b", "ä", "a\n", "x" * 129, ".a", None, 7])
    def test_a_name_that_would_not_fit_everywhere_is_refused(self, name: Any) -> None:
        with pytest.raises(ConfigurationError, match="name= is 1 to 128 letters"):
            declared(name=name)

    @pytest.mark.parametrize(
        "payload", [dict, Refund(order_id=1, amount=Decimal(1)), RootModel[list[int]], None, "Refund"]
    )
    def test_a_payload_that_is_no_model_with_fields_is_refused(self, payload: Any) -> None:
        with pytest.raises(
            ConfigurationError, match=r"payload= is .*: give a subclass of pydantic.BaseModel with fields"
        ):
            declared(payload=payload)

    @pytest.mark.parametrize("missing", ["execute", "observe"])
    def test_a_class_that_lacks_a_method_is_refused(self, missing: str) -> None:
        methods = {name: lambda self, request: None for name in ("execute", "observe") if name != missing}
        with pytest.raises(
            ConfigurationError, match=rf"'payments.refund': Half has no {missing}\(self, request\): add it"
        ):
            declared(endpoint_class=type("Half", (), methods))

    def test_an_abstract_method_is_a_missing_one(self) -> None:
        class Base(ABC):
            @abstractmethod
            def execute(self, request: Any) -> Any: ...

            def observe(self, request: Any) -> Any:
                return None

        with pytest.raises(ConfigurationError, match="has no execute"):
            declared(endpoint_class=Base)

    def test_an_async_method_is_refused_because_it_would_never_run(self) -> None:
        class Later(Service):
            async def execute(self, request: Any) -> Any: ...

        with pytest.raises(ConfigurationError, match=r"Later.execute is async.*make it a plain method"):
            declared(endpoint_class=Later)

    def test_a_class_that_wants_arguments_is_refused(self) -> None:
        class Wanting(Service):
            def __init__(self, url: str) -> None: ...

        with pytest.raises(ConfigurationError, match=r"Wanting is made without arguments.*'url'.*give defaults"):
            declared(endpoint_class=Wanting)

    def test_something_that_is_no_class_is_refused(self) -> None:
        with pytest.raises(ConfigurationError, match=r"endpoint_class= is .*: give a class"):
            action("payments.refund", payload=Refund, catalog=Catalog())(Service())  # type: ignore[type-var]

    @pytest.mark.parametrize(
        ("argument", "wrong"),
        [
            *(
                ("observation_window", wrong)
                for wrong in (0, 0.9, 3600.1, float("nan"), float("inf"), "600", None, True)
            ),
            *(("max_observations", wrong) for wrong in (0, 101, 1.5, "10", None, True)),
            *(("observe_delay", wrong) for wrong in (-1, 601, float("nan"), "5", None, False)),
            *(("grantable", wrong) for wrong in (None, 1, "no")),
        ],
    )
    def test_a_bound_beyond_the_contracts_is_refused_by_name(self, argument: str, wrong: Any) -> None:
        with pytest.raises(ConfigurationError, match=rf"'payments.refund': {argument}= is .*: give "):
            declared(**{argument: wrong})

    @pytest.mark.parametrize(
        "bounds",
        [
            {"observation_window": 1, "observe_delay": 0, "max_observations": 1},
            {"observation_window": 3600, "observe_delay": 3600, "max_observations": 100},
        ],
        ids=["least", "most"],
    )
    def test_the_bounds_themselves_are_allowed(self, bounds: dict[str, Any]) -> None:
        assert declared(**bounds)


class TestCatalog:
    def test_a_name_belongs_to_one_class(self) -> None:
        types = Catalog()
        types.register(declared())
        other = type("Other", (Service,), {})
        with pytest.raises(
            ConfigurationError, match=r"belongs to .*Service, so .*Other cannot have it: give one of them"
        ):
            types.register(declared(endpoint_class=other))
        assert types.get("payments.refund").endpoint_class is Service

    def test_a_class_that_was_imported_again_replaces_itself(self) -> None:
        types = Catalog()
        types.register(declared())
        again = type("Service", (), dict(vars(Service)) | {"__qualname__": Service.__qualname__})
        types.register(declared(endpoint_class=again, max_observations=2))
        assert types.get("payments.refund").endpoint_class is again
        assert len(types) == 1

    def test_one_class_may_serve_two_types(self) -> None:
        types = Catalog()
        types.register(declared())
        types.register(declared(name="payments.refund_part"))
        assert [found.name for found in types] == ["payments.refund", "payments.refund_part"]

    def test_an_unknown_name_is_answered_with_the_nearest(self) -> None:
        types = Catalog()
        types.register(declared())
        with pytest.raises(
            ConfigurationError, match=r"'payments.refnd' .*did you mean 'payments.refund'.*import the module"
        ):
            types.get("payments.refnd")
        with pytest.raises(ConfigurationError, match="here: import the module"):
            Catalog().get("payments.refund")
        assert "payments.refnd" not in types


class TestEndpoint:
    def test_it_is_made_once_when_it_is_first_asked_for(self) -> None:
        before = Service.made
        found = declared()
        assert Service.made == before
        assert found.endpoint is found.endpoint
        assert Service.made == before + 1

    def test_what_its_constructor_raises_is_raised_each_time(self) -> None:
        class Broken(Service):
            def __init__(self) -> None:
                raise ConfigurationError("no key file")

        found = declared(endpoint_class=Broken)
        for _ in range(2):
            with pytest.raises(ConfigurationError, match="no key file"):
                _ = found.endpoint

    def test_a_fork_makes_its_own_even_while_another_thread_was_making_the_parents(self) -> None:
        script = """
import os, threading
from celery_idem.governed.endpoint import PerProcess
entered, go_on, parent = threading.Event(), threading.Event(), os.getpid()
def make():
    if os.getpid() == parent:
        entered.set()
        go_on.wait()
    return os.getpid()
own = PerProcess(make)
thread = threading.Thread(target=own.get)
thread.start()
entered.wait()
child = os.fork()
if child == 0:
    os._exit(own.get() != os.getpid())
status = os.waitpid(child, 0)[1]
go_on.set()
thread.join()
print(os.waitstatus_to_exitcode(status), own.get() == parent)
"""
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", script],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split() == ["0", "True"]


class Colour(enum.Enum):
    RED = "red"


class Line(BaseModel):
    sku: str
    count: int = 1


class Rich(BaseModel):
    id: uuid.UUID
    when: datetime
    day: date
    price: Decimal
    ratio: float
    colour: Colour
    pause: timedelta
    lines: list[Line]
    by_number: dict[int, str] = {}
    raw: bytes = b""


RICH = {
    "id": uuid.UUID(int=7),
    "when": datetime(2030, 1, 2, 3, 4, 5, 678, tzinfo=timezone(timedelta(hours=2))),
    "day": date(2030, 1, 2),
    "price": Decimal("10.10"),
    "ratio": 0.1,
    "colour": Colour.RED,
    "pause": timedelta(seconds=1, microseconds=5),
    "lines": [{"sku": "ä-1"}],
    "by_number": {1: "one"},
    "raw": b"raw",
}


class TestPayload:
    def test_it_is_plain_json_with_defaults_filled_in(self) -> None:
        assert declared().payload_of({"order_id": "7", "amount": 5}) == {
            "order_id": 7,
            "amount": "5",
            "currency": "EUR",
        }

    def test_a_model_instance_is_taken_too(self) -> None:
        found = declared().payload_of(Refund(order_id=7, amount=Decimal("5.00")))
        assert found == {"order_id": 7, "amount": "5.00", "currency": "EUR"}

    @pytest.mark.parametrize("given_as", [RICH, Rich(**RICH), MappingProxyType(RICH)], ids=["dict", "model", "mapping"])
    def test_types_that_json_lacks_come_back_as_they_were(self, given_as: Any) -> None:
        type_ = declared(payload=Rich)
        stored = type_.payload_of(given_as)
        assert json.loads(canonical_json(stored)) == stored
        assert type_.model_of(json.loads(canonical_json(stored))) == Rich(**RICH)
        assert type_.payload_of(stored) == stored

    def test_a_strict_model_reads_what_it_stored(self) -> None:
        class Strict(BaseModel):
            model_config = ConfigDict(strict=True)
            when: datetime

        type_ = declared(payload=Strict)
        moment = datetime(2030, 1, 1, tzinfo=timezone.utc)
        assert type_.model_of(type_.payload_of({"when": moment})).when == moment

    @settings(any_speed, max_examples=60)
    @given(st.floats(allow_nan=False, allow_infinity=False), st.text(st.characters(exclude_categories=["Cs", "Cc"])))
    def test_any_float_and_text_come_back_to_the_byte(self, ratio: float, text: str) -> None:
        class Pair(BaseModel):
            ratio: float
            text: str

        type_ = declared(payload=Pair)
        stored = type_.payload_of({"ratio": ratio, "text": text})
        assert type_.model_of(json.loads(canonical_json(stored))) == Pair(ratio=ratio, text=text)

    def test_a_refusal_names_the_fields_and_never_the_values(self) -> None:
        text = refusal(declared(), {"order_id": SECRET, "amount": -3, "currency": [SECRET]})
        assert text == (
            "payload of 'payments.refund' does not fit Refund: order_id (int parsing), amount (greater than), "
            "currency (string type)"
        )

    def test_what_a_validator_says_is_not_repeated(self) -> None:
        class Checked(BaseModel):
            a: str
            b: str = ""

            @field_validator("a")
            @classmethod
            def known(cls, value: str) -> str:
                raise ValueError(f"unknown: {value}")

            @field_validator("b")
            @classmethod
            def broken(cls, value: str) -> str:
                raise KeyError(value)

        assert refusal(declared(payload=Checked), {"a": SECRET}).endswith("does not fit Checked: a (value error)")
        broken = refusal(declared(payload=Checked), {"a": "x", "b": SECRET})
        assert broken.endswith("does not fit Checked: a validator raised KeyError")

    def test_a_model_that_was_never_finished_is_the_declarations_fault(self) -> None:
        unfinished = type("Unfinished", (BaseModel,), {"__annotations__": {"a": "NotYetThere"}})
        with pytest.raises(ConfigurationError, match=r"'payments.refund': payload= cannot be used: .*NotYetThere"):
            declared(payload=unfinished).payload_of({"a": 1})

    def test_many_problems_are_counted(self) -> None:
        wide = type("Wide", (BaseModel,), {"__annotations__": {f"f{n}": int for n in range(13)}})
        assert refusal(declared(payload=wide), {}).endswith("f9 (missing) and 3 more")

    @pytest.mark.parametrize("value", [None, "{}", [], 7, Line(sku="a")])
    def test_what_is_neither_mapping_nor_this_model_is_refused(self, value: Any) -> None:
        assert refusal(declared(), value).endswith(": give a mapping or a Refund")

    def test_a_subclass_of_the_model_would_lose_its_own_fields(self) -> None:
        class More(Refund):
            note: str = ""

        assert "is a " in refusal(declared(), More(order_id=1, amount=Decimal(1), note="x"))


class TestNothingIsDropped:
    @pytest.mark.parametrize("extra", [None, "ignore", "forbid"])
    def test_a_field_that_the_model_does_not_know_is_refused(self, extra: Any) -> None:
        config = ConfigDict() if extra is None else ConfigDict(extra=extra)
        model = type("Loose", (Refund,), {"model_config": config})
        text = refusal(declared(payload=model), {"order_id": 1, "amount": 1, "curency": SECRET})
        assert "curency" in text
        assert SECRET not in text

    def test_nested_too(self) -> None:
        text = refusal(declared(payload=Rich), RICH | {"lines": [{"sku": "a"}, {"sku": "b", "cuont": 9}]})
        assert text.endswith("has lines.1.cuont, which Rich would drop: leave that out, or add it to the model")

    def test_a_model_that_says_it_keeps_them_keeps_them(self) -> None:
        class Open(BaseModel):
            model_config = ConfigDict(extra="allow")
            a: int

        type_ = declared(payload=Open)
        assert type_.payload_of({"a": 1, "b": {"c": [2]}}) == {"a": 1, "b": {"c": [2]}}
        assert "come back as it was" in refusal(type_, {"a": 1, "b": date(2030, 1, 1)})

    def test_an_aliased_field_is_stored_by_its_alias_and_given_by_either(self) -> None:
        class Aliased(BaseModel):
            model_config = ConfigDict(populate_by_name=True)
            order_id: int = Field(alias="zOrder")
            lines: list[Line] = Field(default=[], alias="aLines")

        type_ = declared(payload=Aliased)
        stored = {"zOrder": 1, "aLines": [{"sku": "a", "count": 1}]}
        assert type_.payload_of({"zOrder": 1, "aLines": [{"sku": "a"}]}) == stored
        assert type_.payload_of({"order_id": 1, "lines": [{"sku": "a"}]}) == stored
        assert "lines.0.x" in refusal(type_, {"order_id": 1, "lines": [{"sku": "a", "x": 1}]})
        assert type_.model_of(stored).order_id == 1

    def test_a_secret_is_refused_because_it_would_be_stored_as_stars(self) -> None:
        class Hidden(BaseModel):
            token: SecretStr

        type_ = declared(payload=Hidden)
        for value in ({"token": SECRET}, Hidden(token=SecretStr(SECRET))):
            text = refusal(type_, value)
            assert "does not come back as it was from what Hidden makes of it" in text
            assert SECRET not in text

    def test_an_excluded_field_is_refused_where_it_says_something(self) -> None:
        class Excluding(BaseModel):
            a: int
            note: str = Field(default="", exclude=True)

        type_ = declared(payload=Excluding)
        assert "has note, which Excluding would drop" in refusal(type_, {"a": 1, "note": "x"})
        assert "come back as it was" in refusal(type_, Excluding(a=1, note="x"))
        assert type_.payload_of({"a": 1}) == {"a": 1}

    def test_a_name_that_goes_out_other_than_it_comes_in_is_refused(self) -> None:
        class Crossed(BaseModel):
            a: int = Field(validation_alias="in", serialization_alias="out")

        assert "Crossed" in refusal(declared(payload=Crossed), {"in": 1})

    def test_computed_and_private_parts_are_no_part_of_it(self) -> None:
        class Computed(BaseModel):
            model_config = ConfigDict(extra="forbid")
            a: int
            _seen: uuid.UUID = PrivateAttr(default_factory=uuid.uuid4)

            @computed_field  # type: ignore[prop-decorator]
            @property
            def double(self) -> int:
                return self.a * 2

        assert declared(payload=Computed).payload_of({"a": 1}) == {"a": 1}

    @pytest.mark.parametrize("value", [{"tags": {"a", "b"}}, {"tags": []}, {}])
    def test_a_set_is_refused_however_many_are_in_it(self, value: Mapping[str, Any]) -> None:
        class Tagged(BaseModel):
            tags: set[str] = set()

        assert "has a set at tags, and a set has no order" in refusal(declared(payload=Tagged), value)

    def test_an_instance_that_skipped_validation_is_validated(self) -> None:
        unchecked = Refund.model_construct(order_id=SECRET, amount=Decimal(-1))  # type: ignore[arg-type]
        text = refusal(declared(), unchecked)
        assert "order_id (int parsing), amount (greater than)" in text
        assert SECRET not in text


class TestBounds:
    class Free(BaseModel):
        value: Any

    @pytest.mark.parametrize(
        ("value", "problem"),
        [
            ("x" * 65_536, "has 65548 bytes as JSON"),
            (float("nan"), "does not come back as it was"),
            (2**63, "value is a whole number beyond 64 bits"),
            ("a\0b", "a character no database can keep"),
        ],
        ids=["large", "nan", "long", "nul"],
    )
    def test_what_cannot_be_stored_exactly_is_refused(self, value: Any, problem: str) -> None:
        with pytest.raises(PayloadRefused, match=rf"payload of 'payments.refund'.*{problem}"):
            declared(payload=self.Free).payload_of({"value": value})

    def test_what_nests_too_deep_is_refused(self) -> None:
        deep: Any = 1
        for _ in range(16):
            deep = [deep]
        with pytest.raises(PayloadRefused, match="nests too deep"):
            declared(payload=self.Free).payload_of({"value": deep})

    def test_what_refers_to_itself_is_refused(self) -> None:
        loop: list[Any] = []
        loop.append(loop)
        with pytest.raises(PayloadRefused):
            declared(payload=self.Free).payload_of({"value": loop})


class TestAfterAChangeOfTheModel:
    def test_a_field_that_was_added_was_not_approved(self) -> None:
        class Notifying(Refund):
            notify: bool = True

        stored = declared().payload_of({"order_id": 1, "amount": 1})
        with pytest.raises(PayloadRefused, match=r"Notifying makes of it: .*propose it again"):
            declared(payload=Notifying).model_of(stored)

    def test_a_field_that_was_removed_would_not_be_executed(self) -> None:
        class Narrow(BaseModel):
            order_id: int
            amount: Decimal

        stored = declared().payload_of({"order_id": 1, "amount": 1})
        with pytest.raises(PayloadRefused, match="propose it again"):
            declared(payload=Narrow).model_of(stored)
