"""The thread in which a cluster lives: it enters a context, and leaves it whatever happens to those that wait."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import warnings

import pytest

from openmed_nb.distributed.starting import Lifetime
from openmed_nb.errors import OpenMedWarning


@contextlib.asynccontextmanager
async def room(log, entering=0.0, on_the_way=None, at_the_end=None):
    """A context that notes what happens to it."""
    try:
        log.append("enters")
        await asyncio.sleep(entering)
        if on_the_way:
            raise on_the_way
        yield threading.current_thread().name
    finally:
        log.append("leaves")
        await asyncio.sleep(0)
        if at_the_end:
            raise at_the_end


def threads():
    """Return the threads in which clusters live; the tests' own cluster has one too."""
    return {thread.ident for thread in threading.enumerate() if thread.name == "openmed_nb cluster"}


def test_from_begin_to_end():
    """The context is entered in a thread of its own and left once; a second end does nothing."""
    log, before = [], threads()
    life = Lifetime(room(log))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        name = life.begin()
        assert log == ["enters"]
        life.end()
        life.end()

    assert name == "openmed_nb cluster"
    assert log == ["enters", "leaves"]
    assert threads() == before


def test_what_cannot_be_entered():
    """What keeps the context from being entered is raised where it is waited for."""
    log = []
    life = Lifetime(room(log, on_the_way=LookupError("no room")))
    with pytest.raises(LookupError, match="no room"):
        life.begin()
    life.end()

    assert log == ["enters", "leaves"]


def test_end_on_the_way_in():
    """A context that is long in coming is left as soon as nobody wants it any more."""
    log = []
    life = Lifetime(room(log, entering=3600))

    def end():
        while not log:
            time.sleep(0.001)
        life.end()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(asyncio.CancelledError):
        life.begin()
    ending.join()

    assert log == ["enters", "leaves"]


def test_end_before_the_beginning():
    """A life that never began has ended."""
    before = threads()
    life = Lifetime(room([]))
    life.end()

    assert threads() == before


def test_error_at_the_end():
    """What goes wrong at the end is warned of once, because another error may be under way."""
    life = Lifetime(room([], at_the_end=OSError("nobody there")))
    life.begin()
    with pytest.warns(OpenMedWarning, match=r"^The cluster did not end as it should: nobody there\. Look whether"):
        life.end()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        life.end()
