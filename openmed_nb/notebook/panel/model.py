"""The panel without its widgets: its verbs, its state, and the thread that runs the cells, where every click is done.

JupyterLab from 4.4 on sends what a widget says over a subshell of the kernel, whose handlers run in a thread of their
own (its setting ``commsOverSubshells``). Tensor work in two threads can crash the process on MPS (pytorch#197805), and
torch's modes, which the simulated MPS uses, count in one thread. So a click is handed to the event loop of the main thread,
and a timer on that loop, not a thread, looks at the memory now and then.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from traitlets import HasTraits, Instance

from ..._annotate import annotate_text
from ..._events.activity import ProgressEvent
from ..._render.display import Report
from ..._utils.text import short_type_name
from ...annotation.loading import create_pipeline
from ...errors import OpenMedError
from ...models.config import OpenMedConfig
from ...session import SESSION, Session
from ...training.release import release
from .state import PanelState, read_memory, read_state

# How long what was typed before a click may be under way in another thread of the kernel.
PENDING_INPUT_SECONDS = 0.1


class MainThreadRunner:
    """The main thread, which runs the cells, and its event loop; without a loop all is done at once, where it is asked for."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self.loop = loop
        if loop is None:
            with contextlib.suppress(RuntimeError):  # The only way to learn that there is none.
                self.loop = asyncio.get_running_loop()

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller may do its work at once: this is the main thread, or there is none to hand it to."""
        return self.loop is None or threading.current_thread() is threading.main_thread()

    def run(self, function: Callable[[], None]) -> None:
        """Run a function in the main thread: at once where this is it, otherwise as soon as no cell runs."""
        if self.is_current_thread:
            function()
        else:
            self.call_soon(function)

    def call_soon(self, function: Callable[[], None], wait: float = 0.0) -> None:
        """Let the loop of the main thread run a function as soon as it comes to it, or later; at once where there is no loop."""
        if self.loop is None:
            function()
        elif wait:
            self.loop.call_soon_threadsafe(self.loop.call_later, wait, _interruptible, function)
        else:
            self.loop.call_soon_threadsafe(_interruptible, function)


def kernel_loop(shell: Any) -> asyncio.AbstractEventLoop | None:
    loop = getattr(getattr(shell.kernel, "io_loop", None), "asyncio_loop", None)
    return loop if isinstance(loop, asyncio.AbstractEventLoop) else None


def _interruptible(function: Callable[[], None]) -> None:
    """Run a function so that an interrupt of the kernel can end it.

    While no message is worked on, a kernel ignores interrupts (ipykernel's ``init_signal``).
    """
    if threading.current_thread() is not threading.main_thread():
        function()  # A kernel in another thread gets no interrupts, and Python allows no handlers there.
        return
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        function()
    except KeyboardInterrupt:
        pass  # It came when the work was done: there is nothing to stop, and asyncio would end the kernel's loop.
    finally:
        signal.signal(signal.SIGINT, former)


# Who asks, where a device was clicked.
PANEL_SOURCE = "the panel"

NO_TEXT = "There is no text yet: type one into the box, then press Annotate."

# How often the memory is looked at, where that is switched on.
REFRESH_SECONDS = 2.0

# How many looks at the memory the history has: two minutes where it is looked at every two seconds.
MAX_LOOKS = 60

# How long after a click a person is taken to look at it still.
IMMEDIATE_SECONDS = 1.0

StateChanges = dict[str, Any]


class PanelModel(HasTraits):
    """What a panel shows, and what it can be asked to do; it decides nothing that the session does not.

    Who shows it observes the trait ``state``, which changes in whatever thread the session is changed.
    """

    state: PanelState = Instance(PanelState)

    def __init__(  # noqa: PLR0913 - each is one thing that differs between a notebook, a script and a test
        self,
        session: Session = SESSION,
        model: str | None = None,
        show_text: bool = True,
        *,
        cells: MainThreadRunner | None = None,
        events: Any = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(state=PanelState(**read_state(session)))
        self.session = session
        self.cells = cells or MainThreadRunner()
        self.clock = clock
        self._name = model
        self._show_text = show_text
        self._lock = threading.RLock()
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._depth = 0  # How many cells run inside one another.
        self._last_end = -math.inf
        self._postponed: list[Callable[[], None]] = []
        self._stop_listening = session.subscribe(self._on_event)
        self._events = events
        if events is not None:
            events.register("pre_run_cell", self.on_cell_start)
            events.register("post_run_cell", self.on_cell_end)

    @property
    def responds_immediately(self) -> bool:
        """Whether what was clicked just now is answered just now: no cell runs, and none kept the click waiting."""
        return not self.state.cell_running and self.clock() - self._last_end > IMMEDIATE_SECONDS

    def use_device(self, device: str) -> None:
        """Override the device for the session, as ``%openmed_device`` does."""
        self._dispatch(
            ProgressEvent("Changing the device", device),
            lambda: _moved(self.session.use(device, PANEL_SOURCE).moved_models),
        )

    def reset(self) -> None:
        self._dispatch(ProgressEvent("Changing the device", "reset"), lambda: _moved(self.session.reset().moved_models))

    def refresh(self) -> None:
        self._dispatch(ProgressEvent("Looking", "device, environment, memory"), dict)

    def release(self) -> None:
        """Hand memory back, as ``%openmed_release`` does: of the session of this process, whatever session is shown."""
        self._dispatch(ProgressEvent("Releasing", "memory"), lambda: {"said": release().final_report()})

    def unload(self, name: str) -> None:
        def verb() -> StateChanges:
            names = ", ".join(self.session.unload(name))
            kept = "A model that a variable still holds stays in memory."
            return {"said": Report(f"Unloaded: {names}. {kept}" if names else "Nothing of that name was loaded.")}

        self._dispatch(ProgressEvent("Unloading", name), verb)

    def annotate(self, text: str) -> None:
        """Find entities in a text, which stays in this process."""
        texts = [text]
        del text  # The frames of an error would hold it.
        self._dispatch(ProgressEvent("Annotating", self._name or "bundled"), lambda: self._annotated(texts.pop()))

    def annotate_deferred(self, read: Callable[[], str]) -> None:
        """Find entities in a text that may still be on its way here: a kernel can answer a click before what was typed."""

        def now() -> None:
            self._count_pending(-1)
            self.annotate(read())

        self._hand_over(now, PENDING_INPUT_SECONDS)

    def on_cell_start(self, *_information: Any) -> None:
        """Say that a cell runs, for as long as it does: a click then has to wait, and often cannot say so itself."""
        self._depth += 1
        self._update(cell_running=True)

    def on_cell_end(self, *_result: Any) -> None:
        """Show what a cell has changed; IPython calls this after each, also after one that another cell runs."""
        self._depth = max(0, self._depth - 1)  # The cell that opens a panel began before.
        self._last_end = self.clock()
        self._update(cell_running=self._depth > 0)
        self.cells.run(lambda: self._update(**self._read_state()))
        if not self._depth:
            postponed = self._postponed
            self._postponed = []
            for function in postponed:
                self.cells.call_soon(partial(self._run_when_idle, function))

    def set_auto_refresh(self, wanted: bool) -> None:
        """Begin or stop looking at the memory every few seconds, whenever no cell runs."""
        self.cells.run(partial(self._switch, wanted))

    def close(self) -> None:
        """Follow the session and the cells no longer, and do nothing any more; closing twice does no harm."""
        self._closed = True
        self._stop_listening()
        if self._events is not None:
            self._events.unregister("pre_run_cell", self.on_cell_start)
            self._events.unregister("post_run_cell", self.on_cell_end)
        self._events = None
        self.unobserve_all()
        self._postponed.clear()
        self._switch(wanted=False)

    def _dispatch(self, activity: ProgressEvent, verb: Callable[[], StateChanges]) -> None:
        """Let the main thread do what was asked for, and say that it waits where it has to."""
        if self.cells.is_current_thread:
            self._run_operation(activity, verb)
        else:
            self._hand_over(lambda: self._run_operation(activity, verb, waited=1))

    def _hand_over(self, function: Callable[[], None], wait: float = 0.0) -> None:
        """Let the main thread run a function when no cell runs; until the function takes that back, the panel says that it waits."""
        self._count_pending(1)
        self.cells.call_soon(partial(self._run_when_idle, function), wait)

    def _run_when_idle(self, function: Callable[[], None]) -> None:
        """Run a function now, or after the cell: while a cell awaits something, the loop does what was handed to it."""
        if self.state.cell_running:
            self._postponed.append(function)
        else:
            function()

    def _count_pending(self, more: int, **changes: Any) -> None:
        with self._lock:
            self._update(waiting=self.state.pending_clicks + more, **changes)

    def _run_operation(self, activity: ProgressEvent, verb: Callable[[], StateChanges], waited: int = 0) -> None:
        """Call a verb of the session, and show what came of it; an error of ours is shown with its remedy.

        The wait ends in the state in which the activity begins: between the two the controls would jump back.
        A new error with the same words is kept: the frames and causes of the other would keep tensors and the text alive.
        """
        if self._closed:  # While the click waited.
            return
        changes: StateChanges = {}
        unexpected = ""
        remedy = "Type the same as a command: its traceback tells where."
        try:
            self._count_pending(-waited, activity=activity, error=None, said=None)
            with self.session.operation():  # Then all panels look again, this one too.
                changes = verb()
        except OpenMedError as error:
            changes = {"error": type(error)(error.message, error.remedy)}
        except KeyboardInterrupt:
            what = f"{activity} was interrupted."
            changes = {"error": OpenMedError(what, "Click again; restart the kernel if that fails.")}
        except Exception as error:  # noqa: BLE001 - it is raised on, without its text and its frames
            # Its text could quote a note, and a kernel writes what is raised into the notebook.
            unexpected = f"{activity.operation} failed with {short_type_name(error)}."
            changes = {"error": OpenMedError(unexpected, remedy)}
        finally:
            self._update(activity=None, **changes)
        if unexpected:
            raise OpenMedError(unexpected, remedy)  # What is raised gets frames; what is shown has none.

    def _on_event(self, activity: ProgressEvent | None) -> None:
        """Show what the session does, whoever asked it, and in whatever thread."""
        if activity is None:
            self.cells.run(self._reload_state)
        else:
            self._update(activity=activity)

    def _reload_state(self) -> None:
        """Show the session as it is now, without the error or the answer to a click if the device has changed since."""
        changes = {"activity": None, **self._read_state()}
        if changes.get("devices", self.state.devices).choice != self.state.choice:
            changes |= {"error": None, "said": None}
        self._update(**changes)

    def _read_state(self) -> StateChanges:
        """Return what there is to see, nothing while another thread changes it: it tells when it is done."""
        return read_state(self.session) if self.session.is_idle() else {}

    def _update(self, **changes: Any) -> None:
        with self._lock:
            if "memory" in changes:
                seen = {bar.name: bar.history for bar in self.state.memory}
                changes["memory"] = tuple(
                    replace(bar, history=(*seen.get(bar.name, ()), bar.used)[-MAX_LOOKS:]) for bar in changes["memory"]
                )
            self.state = replace(self.state, **changes)

    def _annotated(self, text: str) -> StateChanges:
        if isinstance(text, str) and not text.strip():
            return {"answer": None, "said": Report(NO_TEXT)}
        create_pipeline(self.session, self._name, OpenMedConfig())  # So that the time is that of the text alone.
        start = time.perf_counter()
        answer = annotate_text(self.session, text, self._name, show_text=self._show_text)
        return {"answer": answer, "seconds": time.perf_counter() - start}

    def _switch(self, wanted: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if wanted and self.cells.loop is not None and not self._closed:
            self._timer = self.cells.loop.call_later(REFRESH_SECONDS, self._tick)
        self._update(refreshes=self._timer is not None)

    def _tick(self) -> None:
        self._update(memory=read_memory(self.session, self.state.choice))
        self._switch(wanted=True)


def _moved(names: tuple[str, ...]) -> StateChanges:
    return {"said": Report(f"Moved: {', '.join(names)}.")} if names else {}
