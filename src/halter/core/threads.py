"""Threads for blocking calls that may never return."""

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class ThreadPerTaskExecutor(Executor):
    """Runs each task in its own daemon thread.

    Hanging tasks would exhaust a pool, and a pool would be joined at exit.
    """

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        threading.Thread(target=_fulfil_future, args=(future, partial(fn, *args, **kwargs)), daemon=True).start()
        return future


def _fulfil_future(future: "Future[Any]", work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 A future carries every exception to its waiter.
        future.set_exception(error)
    else:
        future.set_result(result)
