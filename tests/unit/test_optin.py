"""A whole app switched on by a setting: which tasks it reaches, and that nothing else about them changes."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import pytest
from celery import Celery, Task, shared_task
from celery.worker.request import Request as CeleryRequest

import celery_idem
from celery_idem import ConfigurationError, IdempotentTask, Policy, current, install, received
from celery_idem.app import CheckStore, runtime_of
from celery_idem.core.policy import Patterns
from celery_idem.optin import SETTING, switch_on_bound
from celery_idem.task import Idempotent
from tests.support.delivery import Shop


@pytest.fixture
def make_shop() -> Iterator[Callable[..., Shop]]:
    made: list[Shop] = []

    def make(**conf: Any) -> Shop:
        made.append(Shop(**{"task_annotations": [SETTING], **conf}))
        return made[-1]

    yield make
    for shop in made:
        shop.close()


@pytest.fixture
def shop(make_shop: Any) -> Shop:
    return make_shop()


def plain(shop: Shop, function: Any = None, **options: Any) -> Any:
    """``@app.task`` as an application says it, with no word of ours."""
    decorate = shop.app.task(shared=False, **options)
    return decorate if function is None else decorate(named(function))


def named(function: Any) -> Any:
    """Celery writes a function's name into code, and a lambda's is none."""
    function.__name__ = "body"
    return function


def twice(shop: Shop, task: Any, *args: Any, **options: Any) -> list[Any]:
    """One message, delivered two times."""
    message = shop.send(task, *args, **options)
    return [shop.deliver(message) for _ in range(2)]


def values(delivered: list[Any]) -> list[Any]:
    return [d.value for d in delivered]


# --- what it reaches ------------------------------------------------------------------------------


def test_a_plain_task_runs_once(shop: Shop) -> None:
    runs = []

    @plain(shop)
    def add(x: int, y: int = 1) -> int:
        runs.append(current())
        return x + y

    assert values(twice(shop, add, 1)) == [2, 2]
    assert len(runs) == 1
    assert runs[0].fence > 0, "current() is the running attempt"
    assert shop.terminal() == ["NEW", "REPLAYED"]


def test_without_the_setting_the_same_task_runs_twice(make_shop: Any) -> None:
    shop, runs = make_shop(task_annotations=None), []
    twice(shop, plain(shop, lambda: runs.append(1), name="add"))
    assert len(runs) == 2


def test_a_bound_task_sees_its_run(shop: Shop) -> None:
    keys = []

    @plain(shop, bind=True)
    def pay(self: Any) -> None:
        keys.append((self.idempotency.key, self.request.id))

    twice(shop, pay)
    ((key, message_id),) = keys
    assert len(key) == 64
    assert message_id


def test_a_shared_task_is_switched_on_in_the_app_that_says_so(make_shop: Any) -> None:
    from celery import _state

    runs, before = [], set(_state._on_app_finalizers)

    @shared_task(name="shared-by-two-apps")
    def pay() -> None:
        runs.append(1)

    try:
        on, off = make_shop(), make_shop(task_annotations=None)
        for shop, expected in ((on, 1), (off, 2)):
            runs.clear()
            shop.app.finalize(auto=True)
            twice(shop, shop.app.tasks["shared-by-two-apps"])
            assert len(runs) == expected
    finally:
        _state._on_app_finalizers.intersection_update(before)  # else every later app of the process has the task


def test_a_task_class_is_switched_on(shop: Shop) -> None:
    class Pay(Task):  # type: ignore[type-arg]
        name = "pay"
        runs = 0

        def run(self, amount: int) -> int:
            type(self).runs += 1
            return amount

    assert values(twice(shop, shop.app.register_task(Pay()), 50)) == [50, 50]
    assert Pay.runs == 1


class Counting(Task):  # type: ignore[type-arg]
    """A base of the application's own, which wraps every body."""

    abstract = True
    calls: list[str] = []  # noqa: RUF012

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(self.name)
        return super().__call__(*args, **kwargs)


@pytest.fixture
def counting() -> type[Counting]:
    return type("Counting2", (Counting,), {"calls": [], "abstract": True})


def test_a_base_with_its_own_call_runs_inside_the_claim(shop: Shop, counting: Any) -> None:
    task = plain(shop, lambda: 7, name="pay", base=counting)
    assert values(twice(shop, task)) == [7, 7]
    assert counting.calls == ["pay"]


def test_a_class_with_its_own_call_runs_inside_the_claim(shop: Shop) -> None:
    class Pay(Counting):
        name = "pay"
        calls: list[str] = []  # noqa: RUF012

        def run(self) -> int:
            return 7

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("own")
            return super().__call__(*args, **kwargs)

    assert values(twice(shop, shop.app.register_task(Pay()))) == [7, 7]
    assert Pay.calls == ["own", "pay"]


def test_a_call_that_skips_super_runs_inside_the_claim_too(shop: Shop) -> None:
    class Pay(IdempotentTask):
        name = "pay"
        runs = 0

        def run(self) -> int:
            return 7

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            type(self).runs += 1
            return self.run(*args, **kwargs)

    assert values(twice(shop, shop.app.register_task(Pay()))) == [7, 7]
    assert Pay.runs == 1


def test_a_mixin_in_front_of_the_task_class_runs_inside_the_claim(shop: Shop) -> None:
    class Mixin:
        runs = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            Mixin.runs += 1
            return super().__call__(*args, **kwargs)  # type: ignore[misc]

    class Pay(Mixin, IdempotentTask):
        name = "pay"

        def run(self) -> int:
            return 7

    assert values(twice(shop, shop.app.register_task(Pay()))) == [7, 7]
    assert Mixin.runs == 1


def test_a_base_that_was_bound_before_its_tasks_is_switched_on_with_them(shop: Shop, counting: Any) -> None:
    class Pay(counting):  # type: ignore[misc]
        name = "pay"

        def run(self) -> int:
            return 7

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("own")
            return super().__call__(*args, **kwargs)

    counting.bind(shop.app)  # as reading ``counting.app`` does; Celery never shows Pay to annotations after it
    assert values(twice(shop, shop.app.register_task(Pay()))) == [7, 7]
    assert counting.calls == ["own", "pay"]


def test_a_task_that_is_the_base_of_another_may_be_bound_after_it(shop: Shop) -> None:
    class Pay(Counting):
        name = "pay"
        calls: list[str] = []  # noqa: RUF012

        def run(self) -> int:
            return 7

    class Refund(Pay):
        name = "refund"

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            self.calls.append("own")
            return super().__call__(*args, **kwargs)

    tasks = [shop.app.register_task(task()) for task in (Refund, Pay)]
    for task in tasks:
        assert values(twice(shop, task)) == [7, 7]
    assert Pay.calls == ["own", "refund", "pay"]


T = TypeVar("T")


class Slotted:
    __slots__ = ()


@pytest.mark.parametrize("first", [abc.ABC, Generic[T], Slotted])
def test_a_base_without_a_dict_may_come_first(shop: Shop, first: Any) -> None:
    class Base(first, Task):  # type: ignore[misc, type-arg]
        abstract = True

    class Direct(first, Task):  # type: ignore[misc, type-arg]
        name = "direct"
        runs = 0

        def run(self) -> int:
            type(self).runs += 1
            return self.runs

    class Below(Base):
        name = "below"
        runs = 0
        run = Direct.run

    for cls in (Direct, Below):
        assert values(twice(shop, shop.app.register_task(cls()))) == [1, 1]


class _Descriptor:
    def __get__(self, task: Any, _: Any = None) -> Any:
        return self if task is None else task.run


class _Instance:
    def __call__(self) -> int:
        return 7


@pytest.mark.parametrize("base", [Task, IdempotentTask])
@pytest.mark.parametrize(
    "call",
    [
        property(lambda self: self.run),
        staticmethod(lambda: 7),
        classmethod(lambda cls: cls.paid),
        functools.partialmethod(lambda self, value: value, 7),
        _Descriptor(),
        _Instance(),
    ],
    ids=lambda call: type(call).__name__,
)
def test_a_call_may_be_anything_python_can_call(shop: Shop, call: Any, base: Any) -> None:
    attributes = {"name": "pay", "paid": 7, "run": lambda self: 7, "__call__": call}
    task = shop.app.register_task(type("Pay", (base,), attributes)())
    assert values(twice(shop, task)) == [7, 7]
    assert shop.terminal() == ["NEW", "REPLAYED"]


def test_a_call_that_was_patched_into_celerys_class_runs_inside_the_claim(shop: Shop, monkeypatch: Any) -> None:
    seen, celerys = [], Task.__call__

    def traced(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(self.name)
        return celerys(self, *args, **kwargs)

    monkeypatch.setattr(Task, "__call__", traced)
    twice(shop, plain(shop, lambda: 1, name="pay"))
    assert seen == ["pay"]


def test_a_name_may_be_computed(shop: Shop) -> None:
    class Pay(Task):  # type: ignore[type-arg]
        name = property(lambda self: "pay")  # type: ignore[assignment]
        run = lambda self: 1  # type: ignore[assignment]  # noqa: E731

    twice(shop, shop.app.register_task(Pay()))
    assert shop.terminal() == ["NEW", "REPLAYED"]


def test_a_name_that_is_registered_again_gets_the_new_tasks_policy(shop: Shop) -> None:
    twice(shop, plain(shop, lambda order: 1, name="pay"), 7)
    shop.app.tasks.unregister("pay")
    again = plain(shop, lambda order: 2, name="pay", idempotency=Policy(key="order:{order}"))
    assert [shop.deliver(shop.send(again, 7)).value for _ in range(2)] == [2, 2]
    assert shop.terminal()[-2:] == ["NEW", "REPLAYED"]


class Sending(Task):  # type: ignore[type-arg]
    """A base that gives every message options of its own."""

    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        options.setdefault("task_id", f"order-{args[0]}")
        options.setdefault("link", self.app.signature("celery.accumulate"))
        return super().apply_async(args, kwargs, **options)


def test_a_base_with_its_own_apply_async_still_chooses_what_it_chose(shop: Shop) -> None:
    runs: list[int] = []
    task = plain(shop, lambda order: runs.append(order) or order, name="pay", base=Sending)
    first, again = (shop.send(task, 7) for _ in range(2))
    assert first["id"] == again["id"] == "order-7"
    assert first["callbacks"][0]["task"] == "celery.accumulate"
    assert [shop.deliver(message).state for message in (first, again)] == ["SUCCESS", "SUCCESS"]
    assert runs == [7]
    shop.messages()
    keyed = shop.send(task, 8, idempotency_key="k")
    assert keyed["idempotency_key"] == "k", "the worker derives the rest"


def test_such_a_base_keeps_an_id_that_was_given_and_its_stamp(shop: Shop) -> None:
    task = plain(shop, lambda order: None, name="pay", base=Sending)
    message = shop.send(task, 7, task_id="given")
    assert message["id"] == "given"
    assert "given" in message["idempotency_stamp"]


def test_a_request_class_of_the_applications_own_comes_behind_ours(shop: Shop) -> None:
    class Request(CeleryRequest):  # type: ignore[misc]
        kept = True

    class Base(Task):  # type: ignore[type-arg]
        abstract = True

    Base.Request = Request
    task = plain(shop, lambda: 1, name="pay", base=Base)
    task.Strategy = lambda task, app, consumer: None  # what Celery makes of the class takes a whole worker
    task.start_strategy(shop.app, None)
    assert task.Request.kept
    assert issubclass(task.Request, received.Request)


def test_eager_calls_take_the_arguments_celery_takes_by_place(shop: Shop) -> None:
    task = plain(shop, lambda x: x, name="pay")
    linked = plain(shop, lambda x: x, name="next")
    assert task.apply((1,), {}, linked.s()).get() == 1


def test_autoretry_retries_inside_the_claim(shop: Shop) -> None:
    runs = []

    @plain(shop, autoretry_for=(OSError,), max_retries=2, retry_backoff=False, default_retry_delay=0)
    def flaky() -> str:
        runs.append(1)
        if len(runs) == 1:
            raise OSError("down")
        return "up"

    first = shop.send(flaky)
    assert shop.deliver(first).state == "RETRY"
    (second,) = shop.messages()
    assert shop.deliver(second).value == "up"
    assert shop.deliver(first).state == "IGNORED"
    assert shop.deliver(second).value == "up"
    assert len(runs) == 2


def test_pydantic_tasks_get_their_models_and_hand_on_dumps(shop: Shop) -> None:
    pydantic = pytest.importorskip("pydantic")
    Order = pydantic.create_model("Order", number=(int, ...), amount=(int, 1))
    seen = []

    def pay(order):  # type: ignore[no-untyped-def]
        seen.append(order)
        return order

    pay.__annotations__ = {"order": Order, "return": Order}
    task = plain(shop, pay, pydantic=True, name="pay")
    assert values(twice(shop, task, {"number": 7})) == [{"number": 7, "amount": 1}] * 2
    assert seen == [Order(number=7)]


def test_decorated_functions_keep_their_decorators(shop: Shop) -> None:
    def doubled(function: Any) -> Any:
        @functools.wraps(function)
        def run(*args: Any) -> Any:
            return 2 * function(*args)

        return run

    task = plain(shop, doubled(named(lambda amount: amount)), name="pay")
    assert values(twice(shop, task, 4)) == [8, 8]


def test_a_task_made_after_the_app_was_finalized_is_switched_on(shop: Shop) -> None:
    shop.app.finalize()
    runs: list[int] = []
    twice(shop, plain(shop, lambda: runs.append(1), name="late", lazy=False))
    assert len(runs) == 1


def test_a_task_that_calls_itself_or_another_task_does_not_wait_for_its_own_key(shop: Shop) -> None:
    inner = plain(shop, lambda: 1, name="inner")

    @plain(shop, bind=True)
    def countdown(self: Any, n: int) -> int:
        return 1 + self(n - 1) if n else inner()

    assert values(twice(shop, countdown, 3)) == [4, 4]


# --- what it leaves alone -------------------------------------------------------------------------


def test_celerys_own_tasks_are_left_alone(shop: Shop) -> None:
    shop.app.finalize()
    own = [task for name, task in shop.app.tasks.items() if name.startswith("celery.")]
    assert own
    assert not any(isinstance(task, Idempotent) for task in own)
    assert list(runtime_of(shop.app).tasks()) == []


@pytest.mark.parametrize(
    "options", [{}, {"acks_late": True}, {"acks_late": False, "reject_on_worker_lost": True}, {"rate_limit": "1/s"}]
)
def test_ack_settings_and_all_other_attributes_stay_what_they_were(make_shop: Any, options: Any) -> None:
    on, off = make_shop(), make_shop(task_annotations=None)
    tasks = [plain(shop, lambda: 1, name="pay", **options) for shop in (on, off)]
    said = [{name: getattr(task, name) for name in [*ATTRIBUTES, *options]} for task in tasks]
    assert said[0] == said[1]
    assert isinstance(tasks[0], Idempotent)


ATTRIBUTES = [name for name, _ in Task.from_config] + [
    "abstract",
    "max_retries",
    "default_retry_delay",
    "throws",
    "typing",
]


def test_the_applications_own_annotations_keep_working(make_shop: Any) -> None:
    seen = []

    def on_failure(self: Any, exc: Exception, *_: Any) -> None:
        seen.append(repr(exc))

    shop = make_shop(task_annotations=[SETTING, {"pay": {"rate_limit": "7/m"}, "*": {"on_failure": on_failure}}])

    @plain(shop, name="pay")
    def pay() -> None:
        raise ValueError("declined")

    assert [d.state for d in twice(shop, pay)] == ["FAILURE", "IGNORED"]
    assert pay.rate_limit == "7/m"
    assert seen == ["ValueError('declined')"]


def test_an_annotation_that_answers_first_is_made_up_for_at_worker_start(make_shop: Any) -> None:
    shop, runs = make_shop(task_annotations=[{"pay": {"rate_limit": "7/m"}}, SETTING]), []
    task = plain(shop, lambda: runs.append(1), name="pay")
    shop.app.finalize()
    assert not isinstance(task, Idempotent)
    runtime = runtime_of(shop.app)
    assert runtime.whole_app, "Celery's own tasks were shown to us"
    CheckStore.start(_step(shop.app), None)
    twice(shop, task)
    assert len(runs) == 1


def _step(app: Any) -> Any:
    step = object.__new__(CheckStore)
    step._app = app
    return step


@pytest.mark.parametrize("mode", ["enforce", "off"])
def test_started_is_written_once_by_the_run_that_starts(make_shop: Any, mode: str) -> None:
    shop = make_shop(idempotency_mode=mode)
    states = []

    @plain(shop, bind=True, track_started=True)
    def pay(self: Any) -> None:
        states.append(self.AsyncResult(self.request.id).state)

    message = shop.send(pay)
    assert shop.deliver(message).state == "SUCCESS"
    assert states == ["STARTED"]
    assert pay.AsyncResult(message["id"]).state == "SUCCESS"


def test_a_value_no_serializer_can_say_is_as_free_as_before_where_its_result_is_ignored(shop: Shop) -> None:
    runs = []

    @plain(shop, ignore_result=True)
    def pay() -> object:
        runs.append(1)
        return object()

    assert [d.state for d in twice(shop, pay)] == ["SUCCESS", "SUCCESS"]
    assert len(runs) == 1


def test_the_first_runs_value_goes_on_as_it_is(shop: Shop) -> None:
    seen = []

    class Base(Task):  # type: ignore[type-arg]
        def on_success(self, retval: Any, *_: Any) -> None:
            seen.append(retval)

    first, again = twice(shop, plain(shop, lambda: {1: (2, 3)}, name="pay", base=Base))
    assert first.value == {1: (2, 3)} == seen[0]
    assert again.value == {"1": [2, 3]}


def test_a_word_of_the_applications_own_named_idempotency_stays(shop: Shop) -> None:
    class Base(Task):  # type: ignore[type-arg]
        idempotency = "ours"

    task = plain(shop, lambda: 1, name="pay", base=Base, key="k")
    assert values(twice(shop, task)) == [1, 1]
    assert task.idempotency == "ours"
    assert runtime_of(shop.app).policy_of(task).key == "message", "key= is ours only on IdempotentTask"


def test_a_policy_on_a_plain_task_holds_once_the_app_is_switched_on(shop: Shop) -> None:
    runs = []

    class Base(Task):  # type: ignore[type-arg]
        idempotency = Policy(key="order:{order}", ttl=5)

    task = plain(shop, lambda order: runs.append(order) or 1, name="pay", base=Base, idempotency=Policy(ttl=7))
    for _ in range(2):
        shop.deliver(shop.send(task, 1))
    assert runs == [1]
    assert runtime_of(shop.app).policy_of(task).ttl == 7


def test_a_class_python_cannot_change_is_refused_by_name(shop: Shop) -> None:
    class Slotted(Task):  # type: ignore[type-arg]
        name = "pay"
        __bases__ = property()  # stands for a metaclass that forbids it

    class Fixed(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            if name == "__bases__":
                raise TypeError("these bases are fixed")
            super().__setattr__(name, value)

    with pytest.raises(ConfigurationError, match=r"pay .*these bases are fixed.*base=IdempotentTask"):
        shop.app.register_task(Fixed("Pay", (Task,), {"name": "pay", "run": lambda self: None})())


def test_a_class_that_cannot_be_changed_is_left_out_by_a_glob(make_shop: Any) -> None:
    def pay() -> Any:
        own = "the application's own"
        return type("Pay", (Task,), {"name": "pay", "idempotency_policy": own, "run": lambda self: own})()

    with pytest.raises(ConfigurationError, match=r"pay .*idempotency_policy has a name of ours"):
        make_shop().app.register_task(pay())
    shop = make_shop(idempotency_tasks={"pay": False, "*": True})
    task = shop.app.register_task(pay())
    switch_on_bound(shop.app)
    assert values(twice(shop, task)) == ["the application's own"] * 2


# --- which tasks ----------------------------------------------------------------------------------

TASKS = {"reports.*": False, "billing.pay": {"key": "order:{order}"}, "billing.*": True}


@pytest.mark.parametrize(
    ("name", "runs"), [("billing.pay", 1), ("billing.refund", 2), ("reports.day", 4), ("other", 4), ("mine.pay", 2)]
)
def test_the_first_glob_that_fits_decides(make_shop: Any, name: str, runs: int) -> None:
    """Two messages of one order, each delivered twice."""
    shop, ran = make_shop(idempotency_tasks=TASKS), []
    base = {"base": IdempotentTask} if name.startswith("mine") else {}
    task = plain(shop, lambda order: ran.append(order) or 1, name=name, **base)
    for _ in range(2):
        twice(shop, task, 1)
    assert len(ran) == runs


def test_an_idempotent_task_is_switched_off_by_a_glob_and_gets_its_options(make_shop: Any) -> None:
    shop = make_shop(task_annotations=None, idempotency_tasks={"a": False, "*": {"ttl": 7, "lease": 3}})
    off, on = (shop.task(name=name, idempotency=Policy(lease=5))(named(lambda: 1)) for name in ("a", "b"))
    runtime = runtime_of(shop.app)
    assert not runtime.protects(off)
    assert runtime.protects(on)
    policy = runtime.policy_of(on)
    assert (policy.ttl, policy.lease, policy.max_deliveries) == (7, 5, 5)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"a": {"kye": "x"}}, r"idempotency_tasks\['a'\] names 'kye'.*'key'"),
        ({"a": {"ttl": -1}}, r"idempotency_tasks\['a'\]: Policy\(ttl=…\) = -1: must be at least 0"),
        ({"a": False}, r'switches nothing on: add "\*": True'),
        ({"a": 1}, "must map globs"),
        ("billing.*", "must map globs"),
        ({}, "must map globs"),
        ([1], "must map globs"),
    ],
)
def test_what_idempotency_tasks_cannot_mean_is_refused(make_shop: Any, given: Any, text: str) -> None:
    shop = make_shop(idempotency_tasks=given)
    with pytest.raises(ConfigurationError, match=text):
        runtime_of(shop.app).check()


def test_a_glob_that_fits_no_task_is_told_at_worker_start(make_shop: Any) -> None:
    shop = make_shop(idempotency_tasks=["biling.*", "pay"])
    plain(shop, lambda: 1, name="pay")
    assert "idempotency_tasks names 'biling.*', which fits no task" in runtime_of(shop.app).check()


def test_a_list_of_globs_is_enough() -> None:
    patterns = Patterns(["billing.*", "pay"])
    assert patterns.of("billing.x") == Policy()
    assert patterns.of("reports") is None


def test_observe_mode_says_what_it_would_do_and_runs_everything(make_shop: Any) -> None:
    shop, runs = make_shop(idempotency_mode="observe"), []
    twice(shop, plain(shop, lambda: runs.append(1), name="pay"))
    assert len(runs) == 2
    assert "WOULD_REPLAY" in shop.names()


@pytest.mark.parametrize("publish", ["delay", "send_task"])
def test_observe_mode_refuses_nothing_that_has_no_key(make_shop: Any, publish: str, caplog: Any) -> None:
    shop, runs = make_shop(idempotency_mode="observe", idempotency_tasks={"pay": {"key": "order:{order}"}}), []
    task = plain(shop, lambda order: runs.append(order), name="pay")  # noqa: PLW0108  a builtin has no signature
    task.delay(None) if publish == "delay" else shop.app.send_task("pay", (None,))
    (message,) = shop.messages()
    assert [shop.deliver(message).state for _ in range(2)] == ["SUCCESS", "SUCCESS"]
    assert runs == [None, None]
    assert "would be refused: pay: the key's 'order' is None" in caplog.text


def test_arguments_that_do_not_fit_the_task_are_told_as_such(make_shop: Any) -> None:
    shop = make_shop(idempotency_tasks={"pay": {"key": "order:{order}"}})
    plain(shop, lambda order, amount: amount, name="pay", lazy=False)
    shop.app.send_task("pay", (1,))
    (message,) = shop.messages()
    delivered = shop.deliver(message)
    assert delivered.state == "FAILURE"
    assert "do not fit the task (missing a required argument: 'amount')" in str(delivered.value)


# --- in code --------------------------------------------------------------------------------------


def test_install_before_the_configuration_reads_none_of_it(make_shop: Any) -> None:
    app = Celery("lazy", set_as_current=False)
    install(app)
    assert not app.configured

    class Config:
        broker_url = "memory://"
        task_annotations = {"*": {"rate_limit": "7/m"}}  # noqa: RUF012
        idempotency_store = "memory://"

    app.config_from_object(Config)
    task = app.task(shared=False, name="pay")(named(lambda: 1))
    app.finalize()
    assert isinstance(task, Idempotent)
    assert runtime_of(app).protects(task)
    assert task.rate_limit == "7/m"
    app.close()


def test_install_reaches_tasks_that_are_bound_already_and_is_good_for_twice(make_shop: Any) -> None:
    shop, runs = make_shop(task_annotations=None), []
    task = plain(shop, lambda: runs.append(1), name="early")
    shop.app.finalize()
    assert not isinstance(task, Idempotent)
    install(shop.app)
    install(shop.app)
    switch_on_bound(shop.app)
    twice(shop, task)
    late: list[int] = []
    twice(shop, plain(shop, lambda: late.append(1), name="late", lazy=False))
    assert len(runs) == len(late) == 1
    assert shop.app.conf.task_annotations.count(SETTING) == 1
    assert task.__class__.__mro__.count(Idempotent) == 1


def test_the_object_itself_may_stand_in_the_setting(make_shop: Any) -> None:
    shop, runs = make_shop(task_annotations=[celery_idem.annotation]), []
    twice(shop, plain(shop, lambda: runs.append(1), name="pay"))
    assert len(runs) == 1
