"""A pytest plugin that writes one line per test begun and per test done, so that a crash or a hang has a name."""

from __future__ import annotations

import faulthandler
import inspect
import json
import os
import signal
import time
import unittest
from pathlib import Path
from typing import Any

import pytest
from _pytest.unittest import UnitTestCase

from tests.upstream_npu import fork_server

_LOG = Path(os.environ["UPSTREAM_LOG"])
_DONE = set(json.loads(os.environ.get("UPSTREAM_DONE", "[]")))
_outcomes: dict[str, dict[str, Any]] = {}


def name_of(nodeid: str) -> str:
    """``Class::test`` of a pytest node id; parameters stay."""
    return nodeid.partition("::")[2]


def _write(**line: Any) -> None:
    with _LOG.open("a") as log:
        log.write(json.dumps(line) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # the runner asks before it ends a test that hangs
    if os.environ.get("UPSTREAM_SPAWN") != "1":
        fork_server.install()
    UnitTestCase.newinstance = _instance  # type: ignore[method-assign]


def _as_unittest(item: pytest.Item) -> tuple[str, ...]:
    """unittest's order, by name, which some files count on; what is not of unittest comes after, as it stands."""
    case = getattr(item, "cls", None)
    return (case.__name__, item.name) if case and issubclass(case, unittest.TestCase) else ("~",)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _write(collected=[name_of(i.nodeid) for i in items])
    items[:] = sorted((i for i in items if name_of(i.nodeid) not in _DONE), key=_as_unittest)


def _instance(collector: UnitTestCase) -> unittest.TestCase:
    """Some of torch's base classes accept the name of a test only, not the ``runTest`` that pytest gives."""
    case = collector.obj
    names = unittest.defaultTestLoader.getTestCaseNames(case)
    return case(names[0]) if names else case.__new__(case)


def pytest_pycollect_makeitem(collector: pytest.Module | pytest.Class, name: str, obj: object) -> list[pytest.Item] | None:
    """Upstream runs its files by unittest: a function of a module is none of its tests, whatever its name."""
    return [] if isinstance(collector, pytest.Module) and inspect.isfunction(obj) else None


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.outcome != "passed" and report.nodeid:
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        _write(collect=report.outcome, why=why)


def pytest_runtest_logstart(nodeid: str) -> None:
    _outcomes[nodeid] = {"outcome": "passed", "why": "", "seconds": time.time()}
    _write(begun=name_of(nodeid), said=os.fstat(1).st_size)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    result = _outcomes[report.nodeid]
    whole = type(report) is pytest.TestReport  # a subtest may fail its test; it cannot pass or skip it
    if report.failed and result["outcome"] != "failed":
        result.update(outcome="failed", why=report.longreprtext)
    elif report.skipped and whole and result["outcome"] == "passed":
        if hasattr(report, "wasxfail"):
            result.update(outcome="passed", why="expected failure")
        else:
            result.update(outcome="skipped", why=report.longrepr[2] if isinstance(report.longrepr, tuple) else "")


def pytest_runtest_logfinish(nodeid: str) -> None:
    result = _outcomes.pop(nodeid)
    result["seconds"] = round(time.time() - result["seconds"], 1)
    _write(done=name_of(nodeid), said=os.fstat(1).st_size, **result)
